"""What a model, what its layers see, and a number format take: a toy of each, with its control."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headrace import LLM, core
from headrace.data.frames import frames_of
from headrace.data.params import SamplingParams
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.models.families import FAMILIES, llama
from headrace.models.family import Family
from headrace.models.registry import MODELS, describe
from headrace.ops.context import FeedRows, build
from headrace.ops.registry import OPS
from headrace.runner.record import record
from headrace.weights import decode
from headrace.weights.decode import DECODERS
from headrace.weights.gguf import TYPE_NAMES, GGUFFile
from headrace.weights.kinds import KINDS
from headrace.weights.loader import load_model, read_tensor
from headrace.weights.source import WeightError
from tests.house.adapter import adapted
from tests.house.listener import FAMILY as LISTENER
from tests.house.listener import Listener
from tests.house.loud_llama import FAMILY as LOUD
from tests.house.parallel import Parallel
from tests.models.zoo import MemorySource
from tests.tiny import VOCAB, finish, run_alone, tiny_config, tiny_engine, tiny_model, tokens_of
from tests.tiny_native import as_bfloat16, native_alone, native_engine, native_model, source_of
from tests.tiny_whisper import EOT, frames, write_folder

needs_core = pytest.mark.skipif(not core.available(), reason=core.reason())
BACKENDS = ["torch", pytest.param("native", marks=needs_core)]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SETTINGS = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
TABLE = "model.embed_tokens.weight"


def tokens(model: Model, backend: str) -> list[int]:
    return run_alone(model, PROMPT, GREEDY) if backend == "torch" else native_alone(model, PROMPT, GREEDY)


# -- an architecture by numbers: one file, and its row in FAMILIES -----------------------------------------------------------


def folder(**settings: Any) -> MemorySource:
    return MemorySource(
        "safetensors", dict(source_of(native_model("llama", tied_head=False)).tensors), {**SETTINGS, **settings}
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_architecture_by_numbers_is_one_file(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what a llama says whose table of tokens holds the products."""
    monkeypatch.setitem(FAMILIES, "loud_llama", LOUD)
    loud = load_model(folder(model_type="loud_llama", embedding_multiplier=4.0), torch.float64)
    plain, product = folder(), folder()
    product.tensors[TABLE] = product.tensors[TABLE] * 4.0
    expected = tokens(load_model(product, torch.float64), backend)
    assert tokens(loud, backend) == expected != tokens(load_model(plain, torch.float64), backend)


def test_an_architecture_without_a_row_is_refused() -> None:
    with pytest.raises(WeightError, match="unknown architecture 'loud_llama'; known are arcee"):
        load_model(folder(model_type="loud_llama", embedding_multiplier=4.0))


def test_its_config_numbers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "loud_llama", LOUD)
    with pytest.raises(WeightError, match=r"config\.json must have embedding_multiplier as a number above 0, not None"):
        load_model(folder(model_type="loud_llama"))
    with pytest.raises(WeightError, match="loud llamas are read from safetensors"):
        load_model(MemorySource("gguf", {"token_embd.weight": torch.ones(1)}, {"general.architecture": "loud_llama"}))


# -- by a new order of ops: a model file and its row in MODELS as well -------------------------------------------------------


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setitem(FAMILIES, "parallel", Family("parallel", "parallel", llama.FAMILY.hf, "is read from safetensors"))
    monkeypatch.setitem(MODELS, "parallel", Parallel)
    return as_bfloat16(tiny_model(tiny_config("parallel")))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_order_of_ops_is_a_file_more(parallel: Model, backend: str) -> None:
    """Fed in chunks beside others it says what it says alone, and not what a llama of the same weights says."""
    engine = (tiny_engine if backend == "torch" else native_engine)(parallel, budget=5)
    requests = [engine.add(prompt, GREEDY) for prompt in (PROMPT, [7, 7, 2], PROMPT[::-1])]
    finish(engine)
    alone = tokens(parallel, backend)
    assert tokens_of(requests[0])[0] == alone != tokens(native_model("llama"), backend)


def test_an_order_of_ops_without_its_rows_is_refused() -> None:
    with pytest.raises(WeightError, match="unknown architecture 'parallel'"):
        describe(tiny_config("parallel"))


# -- a source of frames: a model file, and its rows in MODELS and FAMILIES ----------------------------------------------------


def heard(path: Path, backend: str) -> tuple[list[list[int]], list[list[int]]]:
    """Outputs of windows of sound, each alone and all together."""
    dtype = {"dtype": "float64"} if backend == "torch" else {}
    windows = [frames_of(frames(seed=seed)) for seed in range(3)]
    with LLM(path, backend=backend, threads=1, **dtype) as llm:  # type: ignore[arg-type]
        each = []
        for group in (*([window] for window in windows), windows):
            requests = [llm.engine.add([EOT + 1, EOT + 2, 40], GREEDY, source=window) for window in group]
            finish(llm.engine)
            each += [tokens_of(request)[0] for request in requests]
    return each[: len(windows)], each[len(windows) :]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_source_of_frames_is_a_file_and_its_rows(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine, runner and both back ends run an encoder that they do not know."""
    path = write_folder(tmp_path)
    plain, _ = heard(path, backend)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "model_type": "listener"}))
    with pytest.raises(WeightError, match="listener"):
        LLM(path, backend=backend)
    monkeypatch.setitem(FAMILIES, "listener", LISTENER)
    monkeypatch.setitem(MODELS, "listener", Listener)
    alone, together = heard(path, backend)
    assert alone == together
    assert len({tuple(one) for one in alone}) == 3, "each window has its own text"
    assert all(mine != theirs for mine, theirs in zip(alone, plain, strict=True))


# -- what a linear layer sees of the step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [True, False])
def test_an_implementation_of_linear_sees_the_feed_of_each_row(row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of one feed's rows is the model with that update in its weights, for that feed and for nobody else."""
    plain, merged = tiny_model(), tiny_model()
    down, up = torch.randn(2, 32, dtype=torch.float64), torch.randn(32, 2, dtype=torch.float64)
    merged.layers[0].out.weight += up @ down
    if row:
        monkeypatch.setitem(OPS["linear"].implementations, "cpu", adapted)

    def logits(model: Model, adapter: bool = False) -> torch.Tensor:
        ctx = build(KVPool(model.config, 4, 8, torch.float64), [FeedRows(PROMPT, [0]), FeedRows(PROMPT, [1])])
        if adapter:
            ctx.memo["adapter"] = (torch.arange(len(PROMPT)), {model.layers[0].out: (down, up)})
        rows: torch.Tensor = model(ctx)
        return rows

    (mine, theirs), without, within = logits(plain, adapter=True).chunk(2), logits(plain)[:8], logits(merged)[:8]
    torch.testing.assert_close(theirs, without, rtol=0, atol=1e-12)
    assert torch.allclose(mine, within, rtol=0, atol=1e-9) == row
    assert torch.allclose(mine, without, rtol=0, atol=1e-9) != row


def test_a_recording_holds_no_step_settings() -> None:
    nodes = [node for layer in record(tiny_model()).layers for node in layer.nodes if node.op == "linear"]
    assert nodes
    assert [node for node in nodes if node.settings.keys() != {"w"} or node.inputs.keys() != {"x"}] == []


# -- a number format: its size, its name in files, its decoder; and the core's own tables ------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(str(tmp_path / "q8.gguf"), "llama")
    rows = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    writer.add_tensor("q8", gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "q8.gguf"


def test_a_number_format_is_three_rows_and_the_core(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_tensor(GGUFFile(file), "q8")
    code = next(code for code, name in TYPE_NAMES.items() if name == "Q8_0")
    monkeypatch.setitem(TYPE_NAMES, code, "Q8_TOO")
    with pytest.raises(WeightError, match="has the type Q8_TOO, which is not read"):
        GGUFFile(file)
    monkeypatch.setitem(KINDS, "Q8_TOO", KINDS["Q8_0"])
    monkeypatch.setitem(DECODERS, "Q8_TOO", DECODERS["Q8_0"])
    source = GGUFFile(file)
    if core.available():
        with pytest.raises(ValueError, match="Q8_TOO"):
            read_tensor(source, "q8")
        with pytest.raises(ValueError, match="no native kernels for weights of type Q8_TOO"):
            core.module().packed_bytes("Q8_TOO", 3, 64)
    monkeypatch.setattr(decode.core, "available", lambda: False)
    assert torch.equal(read_tensor(source, "q8"), expected)
