"""Whisper: torch in float64 against transformers, the native core against torch, and the readers of its files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from benchmarks.peers.speech import read_clips
from headrace import LLM, SamplingParams
from headrace.audio.decode import samples_of
from headrace.audio.mel import HOP, LogMel
from headrace.backends.eager.program import EagerProgram
from headrace.backends.native.encoder import NativeEncoder
from headrace.cli.app import main
from headrace.data.frames import frames_of
from headrace.data.sources import Tokens
from headrace.engine.admission import AdmissionError
from headrace.kv.pool import KVPool
from headrace.models import whisper
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from headrace.ops.patches import patch_rows
from headrace.startup.fit.headers import open_shape
from headrace.startup.fit.machine import find
from headrace.startup.fit.sizes import BLOCK, Load, bytes_of, encoder_bytes
from headrace.startup.fit.sound import window_record
from headrace.startup.speech import speech_model
from headrace.weights.ctranslate2 import CTranslate2Folder
from headrace.weights.loader import load_model, stored_tensors
from headrace.weights.source import WeightError
from tests.models.zoo import MemorySource
from tests.places import data_path, model_file
from tests.tiny_whisper import EOT, POSITIONS, TEXT, VOCAB, ctranslate2_bytes, frames, oracle, write_ctranslate2, write_folder

PROMPT = [EOT + 1, EOT + 2, EOT + 6, 40, 41]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def loaded(theirs: Any) -> Model:
    return load_model(MemorySource("safetensors", theirs.state_dict(), theirs.config.to_dict()), torch.float64)


def logits(ours: Model, rows: np.ndarray, prompt: Sequence[int] = PROMPT) -> torch.Tensor:
    """Logits of every row of a prompt with these frames as source."""
    positions, own = len(rows) // 2, 10
    table = range(own, own + -(-positions // 8))
    pool = KVPool(ours.config, table.stop + 10, 8, torch.float64)
    EagerProgram(ours, pool).encode([(frames_of(rows), table)])
    with torch.inference_mode():
        feed = FeedRows(list(prompt), range(-(-len(prompt) // 8)), source=positions, source_table=table)
        result: torch.Tensor = ours(build(pool, [feed]))
    return result


def expected(theirs: Any, rows: np.ndarray, prompt: Sequence[int] = PROMPT) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = theirs(
            input_features=torch.from_numpy(rows.T.copy())[None].double(), decoder_input_ids=torch.tensor([list(prompt)])
        ).logits[0]
    return result


@pytest.mark.parametrize("bins", [80, 128])
def test_logits_equal_transformers(bins: int) -> None:
    theirs = oracle(bins)
    assert (logits(loaded(theirs), frames(bins)) - expected(theirs, frames(bins))).abs().max() < 1e-9


@pytest.mark.weights
@pytest.mark.slow
def test_logits_of_real_weights_equal_transformers() -> None:
    """whisper-base in float64 on 16 s of speech, with its text as the decoder's prompt."""
    source = CTranslate2Folder(model_file("whisper-base"))
    theirs = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**source.config))
    half = {f"model.{name}": source.raw(name).view(np.float16).reshape(source.info(name).shape) for name in source.names()}
    missing, surplus = theirs.load_state_dict({name: torch.from_numpy(one.copy()) for name, one in half.items()}, strict=False)
    assert (missing, surplus) == (["proj_out.weight"], [])
    theirs.tie_weights()
    theirs = theirs.double().eval()
    samples = samples_of(model_file("speech.wav"))
    rows = LogMel(samples, 80).window(0, 3000)
    prompt = [50258, 50259, 50359, 50364, 6776, 502, 281, 2136, 428, 36541, 712, 3636, 13, 50518]
    right = expected(theirs, rows, prompt)
    ours = load_model(source, torch.float64)
    assert (logits(ours, rows, prompt) - right).abs().max() < 1e-9
    assert right.abs().max() > 10
    positions = dict(ours.named_parameters())["encoder.positions.weight"]
    stored = positions.data.clone()
    # The file's positions are sinusoids. A control: computed with another base they give other logits.
    assert (sinusoids(*stored.shape) - stored).abs().max() < 1e-3
    positions.data.copy_(sinusoids(*stored.shape, base=5_000))
    assert (logits(ours, rows, prompt) - right).abs().max() > 1e-3
    positions.data.copy_(stored)
    # A control: the last row of sound is lost.
    rows[len(samples) // HOP - 1] = 0
    assert (logits(ours, rows, prompt) - right).abs().max() > 1e-6


def sinusoids(count: int, width: int, base: float = 10_000) -> torch.Tensor:
    """The positions with which Whisper's encoders were trained, [count, width] float64."""
    steps = torch.arange(width // 2, dtype=torch.float64) / (width // 2 - 1)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * base**-steps
    return torch.cat([angles.sin(), angles.cos()], 1)


def test_a_shorter_window_is_that_of_a_model_with_fewer_positions(folder: Path) -> None:
    theirs, rows = oracle(), frames()[:62]
    short = oracle(positions=31, vocab_size=VOCAB)
    state = theirs.state_dict()
    table = "model.encoder.embed_positions.weight"
    short.load_state_dict(state | {table: state[table][:31]})
    assert (logits(loaded(theirs), rows) - expected(short, rows)).abs().max() < 1e-9
    assert (logits(loaded(theirs), rows) - logits(loaded(theirs), np.pad(rows, ((0, 38), (0, 0))))).abs().max() > 1e-6
    windows = [frames(), rows, frames(seed=1), rows[:40]]
    with LLM(folder, quantize="int8") as llm:
        alone = [written(llm, [one])[0][0] for one in windows]
    with LLM(folder, quantize="int8") as llm:
        assert written(llm, windows)[0] == alone  # the same bits in one batch


def test_slips_in_the_encoder_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, rows = oracle(), frames()
    right = expected(theirs, rows)

    def error(ours: Model) -> float:
        return float((logits(ours, rows) - right).abs().max())

    with monkeypatch.context() as slip:  # the taps in the wrong order
        slip.setattr("headrace.backends.eager.program.patch_rows", lambda *sizes: patch_rows(*sizes)[:, ::-1].copy())
        assert error(loaded(theirs)) > 1e-3
    with monkeypatch.context() as slip:  # a stride that begins one row later
        slip.setattr(
            "headrace.backends.eager.program.patch_rows",
            lambda count, taps, stride: np.minimum(patch_rows(count, taps, stride) + stride - 1, count),
        )
        assert error(loaded(theirs)) > 1e-3
    with monkeypatch.context() as slip:
        gelu = whisper.act
        slip.setattr(whisper, "act", lambda x, kind: gelu(x, "gelu_tanh"))
        assert error(loaded(theirs)) > 1e-6
    computed = loaded(theirs)  # positions that are computed and not the file's
    positions = dict(computed.named_parameters())["encoder.positions.weight"]
    positions.data.copy_(sinusoids(*positions.shape))
    assert error(computed) > 1e-3
    biased: Any = loaded(theirs)
    biased.layers[0].qkv.bias[32:64] = torch.linspace(-1, 1, 32)
    assert error(biased) < 1e-9  # all keys move alike, which softmax does not see
    biased.layers[0].qkv.bias[:32] = 0  # but the bias of the queries counts
    assert error(biased) > 1e-3


def test_patches_are_a_convolution() -> None:
    x, weight = torch.randn(9, 4, dtype=torch.float64), torch.randn(5, 4, 3, dtype=torch.float64)
    for stride in (1, 2):
        padded = torch.cat([x, torch.zeros(1, 4, dtype=torch.float64)])
        rows = padded[torch.from_numpy(patch_rows(len(x), 3, stride))].flatten(1)
        ours = rows @ weight.swapaxes(1, 2).reshape(5, -1).T
        assert torch.allclose(ours, functional.conv1d(x.T[None], weight, stride=stride, padding=1)[0].T)


def test_stored_tensors_are_those_that_were_read() -> None:
    state = oracle().state_dict()
    written = stored_tensors(loaded(oracle()), "safetensors")
    assert all(torch.equal(value, state[name]) for name, value in written.items())
    assert set(state) - set(written) == {"proj_out.weight"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whisper"))


def written(llm: LLM, sources: list[np.ndarray], params: SamplingParams = GREEDY) -> tuple[list[list[int]], int]:
    """Output tokens of a request for each source, run together, and how often they were preempted."""
    requests = [llm.engine.add(PROMPT, params, source=frames_of(rows)) for rows in sources]
    tokens: dict[tuple[str, int], list[int]] = {(one.id, index): [] for one in requests for index in range(params.n)}
    while llm.engine.busy:
        for delta in llm.engine.step():
            assert delta.error is None
            tokens[delta.request_id, delta.index] += delta.token_ids
    llm.engine.check()
    return list(tokens.values()), sum(request.metrics.preemptions for request in requests)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_same_tokens_alone_in_a_batch_after_preemption_and_from_the_cache(folder: Path, quantize: str | None) -> None:
    sources = [frames(seed=seed) for seed in range(8)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    with LLM(folder, quantize=quantize) as llm:
        assert llm.backend == "native"
        alone = [written(llm, [rows], params)[0][0] for rows in sources]
        assert len({tuple(one) for one in alone}) == 8
        assert written(llm, sources, params) == (alone, 0)  # all sources come from the cache
        block = llm.memory_plan.kv_bytes // llm.memory_plan.num_blocks
    with LLM(folder, quantize=quantize, kv_cache_memory=24 * block) as tight:
        tokens, preemptions = written(tight, sources, params)
        assert tokens == alone
        assert preemptions


def test_one_window_is_encoded_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder) as llm:
        encoder: Any = llm.runner.programs[0].encoder  # type: ignore[attr-defined]
        windows: list[int] = []
        encode = type(encoder)._encode
        monkeypatch.setattr(type(encoder), "_encode", lambda self, group: (windows.append(len(group)), encode(self, group)))
        first = written(llm, [frames()], GREEDY.replace(n=3, temperature=0.7, seed=1))
        assert sum(windows) == 1
        assert written(llm, [frames()], GREEDY.replace(n=3, temperature=0.7, seed=1)) == first
        assert sum(windows) == 1
        written(llm, [frames(seed=1)])
        assert sum(windows) == 2


def likeliest(llm: LLM) -> dict[int, float]:
    """Log-probabilities of the five likeliest first tokens of a window."""
    llm.engine.add(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, logprobs=5), source=frames_of(frames()))
    (entry,) = next(delta for delta in iter(lambda: llm.engine.step()[:1], None) if delta)[0].logprobs
    return dict(zip(entry.top_ids, entry.top_logprobs, strict=True))


def test_the_native_core_is_close_to_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder, backend="torch", dtype="float32") as llm:
        right = likeliest(llm)
    with LLM(folder) as llm:
        near = likeliest(llm)
    common = near.keys() & right.keys()
    assert len(common) >= 4
    assert max(abs(near[token] - right[token]) for token in common) < 0.1
    encode = NativeEncoder._encode

    def skip_block(self: NativeEncoder, group: list[Any]) -> None:
        """A control: one block of a window is not written, but one far behind it."""
        encode(self, [(source, [blocks[0], max(blocks) + 40, *blocks[2:]]) for source, blocks in group])

    monkeypatch.setattr(NativeEncoder, "_encode", skip_block)
    with LLM(folder) as llm:
        far = likeliest(llm)
    common = far.keys() & right.keys()
    assert max((abs(far[token] - right[token]) for token in common), default=1.0) > 0.1


def gaps_at_first_differences(right: list[list[int]], ours: list[list[int]], gaps: list[list[float]]) -> list[float]:
    """For each text the gap (nats) between the best two tokens where it first differs; 0 if it does not."""
    found = []
    for expected, written, gap in zip(right, ours, gaps, strict=False):
        pairs = enumerate(zip(expected, written, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(expected), len(written)) - 1)
        found.append(0.0 if expected == written else gap[at])
    return found


@pytest.mark.weights
@pytest.mark.slow
def test_the_native_core_writes_the_tokens_of_torch_on_recordings() -> None:
    """whisper-base, greedy, the first 30 s of each recording: tokens of bfloat16 equal those of float32 up to a near-tie."""
    clips = read_clips(data_path("clips/clips.json"))
    written, gaps = [], []
    for backend in ("torch", "native"):
        with LLM(model_file("whisper-base"), backend=backend, dtype="float32" if backend == "torch" else "bfloat16") as llm:
            known, outputs = speech_model(llm.opened)[1], []
            limits: dict[str, Any] = {"max_tokens": 200, "stop_token_ids": (known.end,), "timestamps": known.rules(50)}
            params = SamplingParams(temperature=0.0, logprobs=2, logprobs_mode="masked", **limits)
            for clip in clips:
                samples = samples_of(clip.path)[: 30 * 16_000]
                rows = frames_of(LogMel(samples, 80).window(0, 3000))
                llm.engine.add(known.prompt(clip.language, "transcribe"), params, source=rows)
                entries = [entry for delta in iter(lambda: llm.engine.busy and llm.engine.step(), False) for entry in delta]
                assert entries
                outputs.append([token for delta in entries for token in delta.token_ids])
                tops = [sorted(one.top_logprobs) for delta in entries for one in delta.logprobs or ()]
                gaps.append([top[-1] - top[-2] for top in tops])
            written.append(outputs)
    found = gaps_at_first_differences(written[0], written[1], gaps)  # the gaps of torch come first
    assert max(found) < 0.1
    assert found.count(0.0) > len(clips) / 2
    assert max(gaps_at_first_differences(written[0], written[1][1:] + written[1][:1], gaps)) > 0.1, "others' tokens are seen"
    assert sum(map(len, written[0])) > 1000


def test_ctranslate2_folders_hold_the_same_tensors(tmp_path: Path) -> None:
    model = oracle()
    folder = CTranslate2Folder(write_ctranslate2(tmp_path / "ct2", model))
    ours = load_model(folder, torch.float64)
    for name, value in loaded(model).named_parameters():
        assert torch.equal(dict(ours.named_parameters())[name].double(), value.half().double()), name
    assert folder.config["num_mel_bins"] == 80
    assert folder.config["encoder_layers"] == 2
    assert folder.config["decoder_layers"] == 3


def test_damaged_ctranslate2_files_are_refused(tmp_path: Path) -> None:
    good = (write_ctranslate2(tmp_path, oracle()) / "model.bin").read_bytes()
    one = {"encoder/conv1/bias": np.zeros(4, np.float16)}
    twice = ctranslate2_bytes(one)[:-4] + ctranslate2_bytes(one)[len(ctranslate2_bytes({})) - 4 : -4] + bytes(4)
    count = 4 + 2 + len("WhisperSpec") + 1 + 4
    cases = {
        "does not fit": [good[: len(good) // 2], good[:count] + b"\xff\xff\xff\xff" + good[count + 4 :]],
        "another version": [ctranslate2_bytes(one, version=7)],
        "only Whisper": [ctranslate2_bytes(one, "TransformerSpec")],
        "twice": [twice[:count] + (2).to_bytes(4, "little") + twice[count + 4 :]],
        "has no variable": [ctranslate2_bytes(one)],
    }
    for message, files in cases.items():
        for data in files:
            (tmp_path / "model.bin").write_bytes(data)
            with pytest.raises(WeightError, match=message):
                CTranslate2Folder(tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(good[:20_000])
        for at in rng.integers(0, 400, 3):
            broken[at] = rng.integers(256)
        (tmp_path / "model.bin").write_bytes(broken)
        with pytest.raises(WeightError):
            CTranslate2Folder(tmp_path)


def test_requests_that_do_not_fit_the_model_are_refused(folder: Path) -> None:
    window = frames_of(frames())
    with LLM(folder) as llm:
        with pytest.raises(AdmissionError, match="reads no text"):
            llm.generate([[1, 2]], GREEDY)
        for rows in (frames()[:0], frames()[:51], frames(positions=51), frames(40)):
            with pytest.raises(AdmissionError, match="up to 100 rows of 80"):
                llm.engine.add(PROMPT, GREEDY, source=frames_of(rows))
        with pytest.raises(AdmissionError, match="cannot score"):
            llm.engine.add(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0), source=window)
        with pytest.raises(AdmissionError, match="the context holds 96"):
            llm.engine.add([1] * 96, GREEDY, source=window)


def test_digests_name_kind_and_shape() -> None:
    rows = frames()
    same = {frames_of(rows).digest, frames_of(rows.copy()).digest}
    others = {frames_of(rows.reshape(-1, 40)).digest, frames_of(rows + np.float32(1e-6)).digest, Tokens((1,)).digest}
    assert len(same) == 1
    assert len(same | others) == 4
    assert VOCAB > TEXT


def test_the_planner_predicts_windows_of_sound(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = open_shape(str(folder))
    # The planner counts the encoder's table of positions among the vectors.
    matrices = sum(value.numel() for value in oracle().parameters() if value.dim() > 1)
    assert shape.parameters == matrices - POSITIONS * oracle().config.d_model
    with LLM(folder) as llm:
        program: Any = llm.runner.programs[0]  # type: ignore[attr-defined]
        assert 0 <= shape.weights_bytes - program.weights.bytes < 0.06 * program.weights.bytes  # norms and biases
        assert shape.kv_block_bytes("bfloat16", BLOCK) == program.block_bytes()
        assert encoder_bytes(shape) > program.encoder.scratch_bytes
        one, two = (bytes_of(shape, Load(96, batch, 64)).kv for batch in (1, 2))
        window = -(-POSITIONS // BLOCK)
        assert one == (6 + window) * program.block_bytes()
        assert two == 2 * one
    ctranslate2 = open_shape(str(write_ctranslate2(tmp_path / "ct2", oracle())))
    assert ctranslate2.parameters == shape.parameters
    machine = find("h100")
    assert machine is not None
    record = window_record(shape, machine, 1, "bfloat16")
    longer = window_record(replace(shape, source_positions=2000), machine, 1, "bfloat16")
    assert 0 < record["encoder_ms"] < longer["encoder_ms"]
    assert record["token_ms"] < longer["token_ms"]  # which attends to more positions
    assert record["window_ms"] > record["encoder_ms"] + 100 * record["token_ms"]
    assert main(["fit", str(folder), "--machine", "h100", "--context", "96"]) == 0
    printed = capsys.readouterr().out
    assert "30 s of sound" in printed
    assert "K/V of a window" in printed
