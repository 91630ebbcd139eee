"""Encoder-decoders: logits of `transformers`, in the common loop, from sources that are encoded once."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.eager.live import EagerLive
from headrace.backends.eager.program import EagerProgram
from headrace.data import sources as sources_module
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.decoding.prompts import Pooling, Scoring
from headrace.engine.engine import AdmissionError, Engine
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.ops import attention
from headrace.weights.source import WeightError
from tests.beams import add_beam
from tests.cli_shell import Shell
from tests.tiny import finish, run_alone, tiny_engine, tokens_of
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import EOS, PAD, VOCAB, loaded, logits, oracle, source_of, write_tiny_marian

KINDS = ("marian", "marian-gelu", "t5", "t5-gated")
ENDS = {"marian": EOS, "t5-gated": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def sources(count: int = 6, seed: int = 3, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB - 1, int(rng.integers(1, longest))).tolist() for _ in range(count)]


# -- the models ----------------------------------------------------------------------------------------------------------


def gap(ours: Model, theirs: Any) -> float:
    """The largest difference of logits over sources short and long; a token that is never written counts nowhere."""
    rng, worst = np.random.default_rng(5), 0.0
    for length, written in ((1, 3), (7, 12), (42, 30)):
        source, ids = rng.integers(0, VOCAB - 1, length).tolist(), rng.integers(0, VOCAB - 1, written).tolist()
        with torch.no_grad():
            expected = theirs(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids])).logits[0]
        got = logits(ours, source, ids)
        kept = [token for token in range(VOCAB) if token != ours.config.never]
        worst = max(worst, float((got - expected)[:, kept].abs().max()))
        assert expected.std() > 0.3, "the logits must say something"
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str) -> None:
    theirs = oracle(kind)
    assert gap(loaded(theirs), theirs) < 1e-5


def interleave(model: Any) -> None:
    for positions in (model.positions, model.encoder.positions):
        half = positions.weight.shape[1] // 2
        positions.weight = torch.stack([positions.weight[:, :half], positions.weight[:, half:]], -1).flatten(1)


BROKEN: dict[str, tuple[str, Callable[[Any], None]]] = {
    "sines and cosines interleaved": ("marian", interleave),
    "no bias of the head": ("marian", lambda model: model.output.bias.clamp_(max=0).clamp_(min=0)),
    "a head that is not scaled": ("t5", lambda model: object.__setattr__(model.config, "head_scale", 1.0)),
    "tables of relative positions swapped": (
        "t5-gated",
        lambda model: setattr(model, "relative", model.encoder.relative),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_caught(name: str) -> None:
    kind, damage = BROKEN[name]
    theirs = oracle(kind)
    ours = loaded(theirs)
    damage(ours)
    assert gap(ours, theirs) > 1e-2


def test_distances_without_a_last_bucket_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.buckets

    def unclamped(distance: torch.Tensor, count: int, most: int, both: bool) -> torch.Tensor:
        return torch.where(distance.abs() < most, right(distance, count, most, both), distance.abs() % count)

    monkeypatch.setattr(attention, "buckets", unclamped)
    theirs = oracle("t5")
    assert gap(loaded(theirs), theirs) > 1e-2


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("marian", {"decoder_vocab_size": 50}, "two vocabularies"),
        ("marian", {"normalize_before": True}, "normalize_before"),
        ("marian", {"activation_function": "mish"}, "activation 'mish'"),
        ("marian", {"pad_token_id": VOCAB}, "pad_token_id"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "MLP 'gated-mish'"),
        ("t5", {"relative_attention_num_buckets": 6}, "6 buckets"),
    ],
)
def test_unsupported_settings_are_refused(kind: str, change: dict[str, Any], said: str) -> None:
    source = source_of(oracle(kind))
    source.config = source.metadata = {**source.config, **change}
    from headrace.weights.loader import load_model

    with pytest.raises(WeightError, match=said):
        load_model(source)


# -- the loop --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["marian", "t5-gated"])
def both(request: pytest.FixtureRequest) -> tuple[str, Any, Model]:
    theirs = oracle(request.param)
    return request.param, theirs, loaded(theirs)


def generated(kind: str, theirs: Any, source: list[int], **more: Any) -> Any:
    """What transformers writes; Marian's padding never."""
    never = {"bad_words_ids": [[PAD]]} if kind == "marian" else {}
    start = PAD if kind == "marian" else 0
    given = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": ENDS[kind], "pad_token_id": start}
    return theirs.generate(
        torch.tensor([source]),
        attention_mask=torch.ones(1, len(source), dtype=torch.long),
        decoder_start_token_id=start,
        use_cache=False,
        **{**given, **never, **more},
    )


def written(engine: Engine, batch: list[list[int]], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    requests = [engine.add(source, params) for source in batch]
    finish(engine)
    return [tokens_of(request) for request in requests]


def test_greedy_outputs_of_a_batch_equal_transformers(both: tuple[str, Any, Model]) -> None:
    """Also where a source is longer than a step's budget."""
    kind, theirs, ours = both
    engine = tiny_engine(ours, budget=16)
    engine.eos_ids = frozenset({ENDS[kind]})
    batch = sources()
    assert max(map(len, batch)) > 16
    for source, (found,) in zip(batch, written(engine, batch), strict=True):
        expected = generated(kind, theirs, source).tolist()[0][1:]
        assert found == expected[: len(found)]
        assert len(found) == 12 or found[-1] == ENDS[kind]


def test_beams_equal_transformers_and_share_one_source(both: tuple[str, Any, Model]) -> None:
    kind, theirs, ours = both
    engine = tiny_engine(ours)
    engine.eos_ids = frozenset({ENDS[kind]})
    source = sources()[1]
    request = add_beam(engine, source, BeamSearchParams(beam_width=4, n=4, max_tokens=12))
    shared = 0
    while engine.busy:
        engine.step()
        tables = {tuple(seq.kv.tables[1]) for seq in request.seqs}
        assert len(tables) <= 1, "hypotheses have blocks of a source of their own"
        for block in next(iter(tables), ()):
            shared = max(shared, engine.blocks.pool.refs[block])
        engine.check()
    assert shared == 4
    more = {"num_beams": 4, "num_return_sequences": 4, "return_dict_in_generate": True, "output_scores": True}
    expected = generated(kind, theirs, source, **more)
    ranked = request.strategy.results(request)
    for (seq, score), tokens, theirs_score in zip(
        ranked, expected.sequences.tolist(), expected.sequences_scores.tolist(), strict=True
    ):
        assert seq.output == tokens[1:][: len(seq.output)]
        assert score == pytest.approx(theirs_score, abs=1e-5)


def test_each_child_equals_a_separate_run(both: tuple[str, Any, Model]) -> None:
    _, _, ours = both
    params = SamplingParams(temperature=0.9, n=3, max_tokens=10, seed=7)
    source = sources()[2]
    (found,) = written(tiny_engine(ours), [source], params)
    assert found == [run_alone(ours, source, params, child) for child in range(3)]
    assert len({tuple(each) for each in found}) > 1


def test_preemption_changes_no_request(both: tuple[str, Any, Model]) -> None:
    _, _, ours = both
    batch, params = sources(8, longest=24), SamplingParams(temperature=0.8, n=2, max_tokens=14, seed=3)
    plenty = written(tiny_engine(ours, blocks=256), batch, params)
    scarce = tiny_engine(ours, blocks=20)
    assert written(scarce, batch, params) == plenty
    assert scarce.scheduler.preemptions > 0
    assert scarce.blocks.used == 0


def test_preemption_changes_no_beam(both: tuple[str, Any, Model]) -> None:
    _, _, ours = both

    def searched(engine: Engine) -> list[tuple[list[int], float]]:
        params = BeamSearchParams(beam_width=3, n=3, max_tokens=12)
        requests = [add_beam(engine, source, params) for source in sources(6, longest=24)]
        finish(engine)
        return [(seq.output, score) for one in requests for seq, score in one.strategy.results(one)]

    scarce = tiny_engine(ours, blocks=24)
    for (found, score), (output, expected) in zip(searched(scarce), searched(tiny_engine(ours, blocks=256)), strict=True):
        assert found == output
        assert score == pytest.approx(expected, abs=1e-9)
    assert scarce.scheduler.preemptions > 0
    assert scarce.blocks.used == 0


class Counting:
    """How often sources were encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        encode = EagerProgram.encode

        def counted(program: EagerProgram, sources: Any) -> None:
            self.count += len(sources)
            encode(program, sources)

        monkeypatch.setattr(EagerProgram, "encode", counted)


def test_equal_sources_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together or later; but of each tenant, and where nothing is cached, for its own."""
    ours, encoded = loaded(oracle("marian")), Counting(monkeypatch)
    engine, source = tiny_engine(ours), sources()[0]
    engine.add(source, GREEDY)
    engine.add(source, GREEDY)
    finish(engine)
    assert encoded.count == 1
    again = engine.add(source, GREEDY)
    finish(engine)
    assert (encoded.count, again.metrics.cached_tokens) == (1, len(source))
    engine.add(source, GREEDY, salt=b"another")
    finish(engine)
    assert encoded.count == 2
    alone = tiny_engine(ours, prefix_caching=False)
    alone.add(source, GREEDY)
    alone.add(source, GREEDY)
    finish(alone)
    assert encoded.count == 4


def test_a_source_left_out_of_the_hash_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __init__(self, data: bytes) -> None: ...

        def digest(self) -> bytes:
            return bytes(32)

    ours = loaded(oracle("marian"))
    batch, params = [[5] * 9, [60] * 9], SamplingParams(temperature=1.0, max_tokens=12, seed=3)
    right = [run_alone(ours, source, params) for source in batch]
    assert right[0] != right[1]
    assert [one for (one,) in written(tiny_engine(ours), batch, params)] == right
    monkeypatch.setattr(sources_module, "sha256", Nothing)
    assert [one for (one,) in written(tiny_engine(ours), batch, params)] != right


def test_forks_with_stale_blocks_of_the_source_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, source = loaded(oracle("t5-gated")), sources()[2]
    params = SamplingParams(temperature=0.9, n=3, max_tokens=10, seed=7)
    (right,) = written(tiny_engine(ours), [source], params)
    fork = EagerLive.fork

    def stale(live: EagerLive) -> EagerLive:
        made = fork(live)
        made.tables[1][:] = range(63, 63 - len(made.tables[1]), -1)
        return made

    monkeypatch.setattr(EagerLive, "fork", stale)
    (wrong,) = written(tiny_engine(ours), [source], params)
    assert wrong[0] == right[0]
    assert wrong[1:] != right[1:]


def test_invalid_source_requests_are_refused() -> None:
    ours = loaded(oracle("marian"))
    engine = tiny_engine(ours)
    with pytest.raises(AdmissionError, match="the source is empty"):
        engine.add([], GREEDY)
    with pytest.raises(AdmissionError, match="cannot score or embed"):
        engine.add([5], GREEDY, strategy=Pooling("mean"))
    with pytest.raises(AdmissionError, match="cannot score or embed"):
        engine.add([5], GREEDY.replace(prompt_logprobs=0), strategy=Scoring())
    with pytest.raises(AdmissionError, match="not in the vocabulary"):
        engine.add([VOCAB], GREEDY)
    with pytest.raises(AdmissionError, match="shorten it"):
        engine.add([5] * 257, GREEDY)
    with pytest.raises(AdmissionError, match="KV blocks"):
        tiny_engine(ours, blocks=4).add([5] * 16, GREEDY)


# -- folders and commands --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_marian(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, threads=1, device="cpu", backend="torch") as made:
        yield made


def test_both_back_ends_run_them(folder: Path, llm: LLM, shell: Shell) -> None:
    """The native core unless told otherwise; nearly the same log-probabilities, and by name the same lines."""
    assert (llm.backend, llm.dtype, llm.exactness) == ("torch", "float32", "near-tie-exact")
    texts = ["a dog runs on the grass .", "la la la"]
    with LLM(folder, threads=1, device="cpu") as ours:
        assert (ours.backend, ours.dtype, ours.exactness) == ("native", "bfloat16", "bitwise")
        made = [each.generate(texts, temperature=0.0, max_tokens=6, logprobs=0) for each in (ours, llm)]
    for a, b in zip(*made, strict=True):
        for one, other in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=0.2)
    for backend, outputs in zip(("native", "torch"), made, strict=True):
        code, out, _ = shell("translate", str(folder), *texts, "--max-tokens", "6", "--threads", "1", "--backend", backend)
        assert (code, out.splitlines()) == (0, [output.outputs[0].text.strip() for output in outputs])


def test_a_text_is_the_source(llm: LLM) -> None:
    (output,) = llm.generate("a dog runs on the grass .", temperature=0.0, max_tokens=8)
    known = llm.tokenizer
    assert output.prompt_token_ids == [known.id_of(f"▁{word}") for word in "a dog runs on the grass .".split()] + [EOS]
    theirs = oracle("marian").float()
    expected = generated("marian", theirs, output.prompt_token_ids, max_new_tokens=8).tolist()[0][1:]
    (one,) = output.outputs
    assert one.token_ids == expected[: len(one.token_ids)]
    assert one.text == known.decode(one.token_ids)
    assert not one.text.startswith(" ")


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_lookups_in_the_source_change_no_token(folder: Path, backend: str) -> None:
    texts = ["a dog runs on the grass .", "un chien court sur l' herbe .", "la la la la la"]
    made = []
    for drafts in ({"speculate": None}, {"speculate": "ngram", "draft_tokens": 3}):
        with LLM(folder, threads=1, device="cpu", backend=backend, **drafts) as llm:
            made.append([output.outputs[0].token_ids for output in llm.generate(texts, temperature=0.0, max_tokens=20)])
    assert made[0] == made[1]


def test_translate_writes_a_line_for_a_line(folder: Path, llm: LLM, shell: Shell, tmp_path: Path) -> None:
    texts = ["a dog runs", "", "the grass ."]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n")
    common = ["--max-tokens", "6", "--threads", "1", "--backend", "torch"]
    code, out, _ = shell("translate", str(folder), "--file", str(tmp_path / "in.txt"), *common)
    made = [one.outputs[0].text.strip() for one in llm.generate([texts[0], texts[2]], temperature=0.0, max_tokens=6)]
    assert (code, out.splitlines()) == (0, [made[0], "", made[1]])
    code, out, _ = shell("translate", str(folder), texts[0], "--beams", "3", "--json", *common)
    (searched,) = llm.generate(texts[0], BeamSearchParams(beam_width=3, max_tokens=6))
    assert (code, json.loads(out)["translation"]) == (0, searched.outputs[0].text.strip())
    assert (json.loads(out)["text"], json.loads(out)["score"]) == (texts[0], searched.outputs[0].score)
    assert "exits" not in json.loads(out)


def test_a_file_that_is_not_utf8_is_named(folder: Path, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"a dog\n\xff\n")
    code, _, said = shell("translate", folder, "--file", tmp_path / "in.txt")
    assert code == 1
    assert "in.txt is not UTF-8 text" in said


def test_translate_refuses_a_model_without_a_source(shell: Shell, tmp_path: Path) -> None:
    code, _, said = shell("translate", str(write_tiny_gguf(tmp_path / "tiny.gguf")), "a dog")
    assert code == 1
    assert "is not an encoder-decoder" in said


def test_run_reads_a_text_as_the_source(folder: Path, llm: LLM, shell: Shell) -> None:
    (made,) = llm.generate("a dog runs", temperature=0.0, max_tokens=5)
    code, out, _ = shell("run", str(folder), "a dog runs", "-m", "5", "-q", "--threads", "1", "--backend", "torch")
    assert (code, out.strip()) == (0, made.outputs[0].text.strip())
    code, _, said = shell("run", str(folder), "a dog", "--system", "Be brief.", "-q", "--threads", "1")
    assert code == 1
    assert "has no chat roles; leave --system out" in said
