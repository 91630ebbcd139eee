"""The native back end in an engine: selection, messages, two engines at once, after a fork, after Ctrl-C."""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import core
from headrace.backends.eager.program import EagerProgram
from headrace.backends.native.program import NativeProgram
from headrace.backends.native.step import NativeStep
from headrace.backends.native.weights import PackedWeights
from headrace.compress.export import write_folder
from headrace.data.params import SamplingParams
from headrace.data.progress import Progress
from headrace.llm import LLM
from headrace.runner.record import RecordError
from headrace.startup import opening
from headrace.text.tokenizer import TokenizerError
from headrace.weights.gguf import GGUFFile
from tests.tiny_files import write_tiny_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SEEDED = SamplingParams(seed=5, max_tokens=12, logprobs=2, prompt_logprobs=1)
PROMPT = list(range(3, 30))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("native") / "tiny.gguf", context=256)


def open_tiny(tiny: Path, **settings: Any) -> LLM:
    return LLM(tiny, **{"threads": 1, "kv_cache_memory": "1MiB", "max_num_seqs": 4, **settings})


def tokens(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    (output,) = llm.generate([prompt], params)
    assert output.error is None, output.error
    return output.outputs[0].token_ids


def test_the_vocabulary_is_read_while_weights_are_packed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin."""
    reading, packing = threading.Event(), threading.Event()
    read, pack = opening._load_text_processing, PackedWeights.pack

    def read_words(*found: Any) -> Any:
        reading.set()
        assert packing.wait(300)
        return read(*found)

    def pack_weights(weights: PackedWeights, progress: Progress) -> None:
        packing.set()
        assert reading.wait(300)
        pack(weights, progress)

    monkeypatch.setattr(opening, "_load_text_processing", read_words)
    monkeypatch.setattr(PackedWeights, "pack", pack_weights)
    assert tokens(open_tiny(tiny))


def test_a_broken_vocabulary_is_a_one_line_error(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes().replace(b"gpt2", b"gpt9", 1))
    for open_it in (open_tiny, opening.open_model):
        with pytest.raises(TokenizerError, match="unknown tokenizer model 'gpt9'") as caught:
            open_it(broken)
        assert "\n" not in str(caught.value)
    opened = opening.open_files(broken)
    assert opened.config.hidden_size
    for _ in range(2):
        with pytest.raises(TokenizerError, match="gpt9"):
            _ = opened.tokenizer


# -- which back end ----------------------------------------------------------------------------------------------------


def test_native_is_the_default_on_a_cpu(tiny: Path) -> None:
    for settings in (
        {},
        {"backend": "native"},
        {"dtype": "bfloat16"},
        {"device": "cpu", "kv_dtype": "int8"},
        {"kv_dtype": "int4"},
    ):
        llm = open_tiny(tiny, **settings)
        assert llm.backend == "native"
        assert isinstance(llm.runner.programs[0], NativeProgram)
        assert len(tokens(llm)) == 12


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "float32"}, "dtype float32 is not supported"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "dtype float64 is not supported"),
        ({"kv_dtype": "float16"}, "keeps no KV in float16"),
    ],
)
def test_unsupported_settings_run_in_torch_with_a_log_line(
    tiny: Path, settings: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headrace"):
        llm = open_tiny(tiny, **settings)
    assert llm.backend == "torch"
    assert isinstance(llm.runner.programs[0], EagerProgram)
    (line,) = [record.getMessage() for record in caplog.records if "running in torch" in record.getMessage()]
    assert said in line
    with pytest.raises(ValueError, match=said):
        open_tiny(tiny, backend="native", **settings)


def test_without_the_core_everything_runs_in_torch(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "_CORE", None)
    with caplog.at_level(logging.INFO, "headrace"):
        assert open_tiny(tiny).backend == "torch"
    assert "native core is not built" in caplog.text
    with pytest.raises(ValueError, match="native core is not built"):
        open_tiny(tiny, backend="native")


def test_a_model_that_cannot_be_recorded_runs_in_torch_as_a_whole(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RecordError("layer 0 reads ids or positions")

    monkeypatch.setattr("headrace.backends.native.program.record", refuse)
    with caplog.at_level(logging.WARNING, "headrace"):
        llm = open_tiny(tiny)
    assert llm.backend == "torch"
    assert "running in torch: layer 0 reads ids or positions" in caplog.text
    assert len(tokens(llm)) == 12


def test_torch_stays(tiny: Path) -> None:
    assert open_tiny(tiny, backend="torch").backend == "torch"
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        open_tiny(tiny, backend="cuda")
    with pytest.raises(ValueError, match="unknown kv_dtype"):
        open_tiny(tiny, kv_dtype="int3")


def test_quantised_at_load(tiny: Path) -> None:
    sizes = {}
    for quantize in (None, "int8", "int4"):
        llm = open_tiny(tiny, quantize=quantize)
        sizes[quantize] = llm.runner.programs[0].weights.bytes  # type: ignore[attr-defined]
        assert len(tokens(llm)) == 12
    assert sizes[None] > sizes["int8"] >= sizes["int4"]
    with pytest.raises(ValueError, match="quantize needs the native back end"):
        open_tiny(tiny, quantize="int8", backend="torch")
    with pytest.raises(ValueError, match="quantize must be"):
        open_tiny(tiny, quantize="int3")


def test_the_conversion_to_bfloat16_is_logged_once(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace"):
        open_tiny(tiny)
    assert caplog.text.count("float32 weights are held as bfloat16") == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_folder_of_safetensors_runs_natively(
    dtype: str, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """bfloat16 is taken as it is; other matrices become it, which is said. The tokens are those of the GGUF file."""
    write_folder(GGUFFile(tiny), tmp_path / "folder")
    weights = tmp_path / "folder" / "model.safetensors"
    matrices = {name: values.to(getattr(torch, dtype)) for name, values in load_file(weights).items() if values.dim() == 2}
    save_file({**load_file(weights), **matrices}, weights)
    with caplog.at_level(logging.INFO, "headrace"):
        llm = open_tiny(tmp_path / "folder", backend="native")
    assert caplog.text.count("held as bfloat16") == (dtype != "bfloat16")
    assert dtype == "bfloat16" or f"{dtype} weights are held as bfloat16" in caplog.text
    assert tokens(llm) == tokens(open_tiny(tiny))
    assert open_tiny(tmp_path / "folder", quantize="int4").backend == "native"


def test_transformers_is_not_imported(tiny: Path) -> None:
    code = (
        "import sys; from headrace.llm import LLM; from headrace.data.params import SamplingParams; "
        f"llm = LLM({str(tiny)!r}, threads=1, kv_cache_memory='1MiB', max_num_seqs=4); "
        "llm.generate('a', SamplingParams(max_tokens=3)); assert llm.backend == 'native'; "
        "assert not {'transformers', 'gguf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


# -- more than one, and less than whole --------------------------------------------------------------------------------


def test_two_engines_in_one_process(tiny: Path, tmp_path: Path) -> None:
    """They share the threads and nothing else: taking turns, each gives what it gives alone."""
    first, second = open_tiny(tiny, threads=2), open_tiny(write_tiny_gguf(tmp_path / "b.gguf", context=256, seed=1), threads=2)
    alone = tokens(first), tokens(second)
    assert alone[0] != alone[1]
    outputs = [llm.add(PROMPT, GREEDY) for llm in (first, second)]
    while not all(output.finished for output in outputs):
        first.step()
        second.step()
    assert tuple(output.outputs[0].token_ids for output in outputs) == alone


FORK = """
import os, sys
from headrace.llm import LLM
from headrace.data.params import SamplingParams
params = SamplingParams(temperature=0.0, max_tokens=4)
llm = LLM(sys.argv[1], threads=2, kv_cache_memory="1MiB", max_num_seqs=4)
before = llm.generate("a", params)[0].outputs[0].token_ids
child = os.fork()
if child == 0:
    error = llm.generate("a", params)[0].error
    print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert llm.generate("a", params)[0].outputs[0].token_ids == before
"""


def test_a_forked_child_raises_an_error(tiny: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "this process was forked" in done.stdout
    assert len(done.stdout.splitlines()) == 1


class Interrupted:
    """A program that is interrupted inside its third step: Ctrl-C is noted while the core computes, and acted on after."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.steps = 0

    def run(self, step: Any, **how: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            signal.raise_signal(signal.SIGINT)
        self.program.run(step, **how)


def test_ctrl_c_during_a_step_keeps_the_engine_usable(tiny: Path) -> None:
    llm = open_tiny(tiny, speculate=None)  # as many steps as tokens
    before = tokens(llm)
    target: Any = llm.runner.programs[0]
    program, target.core = target.core, Interrupted(target.core)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT[:5]], GREEDY)
    target.core = program
    assert not llm.engine.busy
    llm.engine.check()
    assert llm.engine.blocks.used == 0
    assert tokens(llm) == before


# -- what Want can ask for ---------------------------------------------------------------------------------------------


def test_logprobs_agree_with_torch(tiny: Path) -> None:
    """Of drawn and of prompt tokens, with their ranks and alternatives; torch multiplies other roundings."""
    ours, theirs = (
        llm.generate([PROMPT], SEEDED)[0] for llm in (open_tiny(tiny), open_tiny(tiny, dtype="float32", kv_dtype="float32"))
    )
    for a, b in zip(ours.prompt_logprobs or [], theirs.prompt_logprobs or [], strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.token == b.token
            assert a.logprob == pytest.approx(b.logprob, abs=0.2)
            assert len(a.top_ids) == len(b.top_ids) == 1
    (one,), (other,) = ours.outputs, theirs.outputs
    assert one.token_ids[:4] == other.token_ids[:4]
    for a, b in zip(one.logprobs[:4], other.logprobs[:4], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=0.2)


def test_a_callers_processor_sees_the_row(tiny: Path) -> None:
    class Only:
        scope = "pointwise"

        def apply(self, logits: Any, history: Any, paths: Any) -> Any:
            keep = logits[:, 40].clone()
            logits[:] = float("-inf")
            logits[:, 40] = keep
            return logits

    llm = open_tiny(tiny)
    (output,) = llm.generate([PROMPT], GREEDY, processors=[Only()])
    assert output.outputs[0].token_ids == [40] * 12
    assert llm.backend == "native"


def test_impossible_parameters_fail_only_their_request(tiny: Path) -> None:
    llm = open_tiny(tiny)
    impossible = GREEDY.replace(allowed_token_ids=(7,), bad_words=((7,),))
    bad, good = llm.generate([PROMPT, PROMPT], [impossible, GREEDY])
    assert bad.error is not None
    assert "no token can be drawn" in bad.error
    assert good.outputs[0].token_ids == tokens(llm)


def test_batched_draws_equal_single_draws(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which every sequence gets one token and nothing else are asked for all at once."""
    prompts = [PROMPT[start:] for start in range(3)]
    params = [GREEDY, SamplingParams(seed=5, n=2, max_tokens=12), SamplingParams(seed=6, max_tokens=9, repetition_penalty=1.3)]
    taken: list[int] = []
    short = NativeStep.draw_each

    def seen(self: NativeStep, feeds: Any, lives: Any) -> bool:
        done = short(self, feeds, lives)
        taken.append(len(feeds) if done else 0)
        return done

    def drawn(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
        return [each.token_ids for output in llm.generate(prompts, params) for each in output.outputs]

    llm = open_tiny(tiny, speculate=None)
    monkeypatch.setattr(NativeStep, "draw_each", seen)
    quick = drawn(llm, params)
    assert max(taken) == 4
    assert quick[1] != quick[2]  # each child draws with its own key
    taken.clear()
    assert drawn(llm, [each.replace(logprobs=0) for each in params]) == quick
    assert not any(taken)
