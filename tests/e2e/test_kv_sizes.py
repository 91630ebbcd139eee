"""Layers with a window whose K/V have another number of heads and another head size than those of the other layers: numbers of
a hand-written reference, window blocks freed and kept, the memory plan, `headrace fit`, and what is refused.

`tests/e2e/test_windows.py` runs such a model under batches, prefix hits, preemption and forks, with freed blocks poisoned.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, core
from headrace.backends.recipe import Recipe
from headrace.bench.synthetic import write_synthetic
from headrace.data.config import ModelConfig
from headrace.data.params import SamplingParams
from headrace.kv.layout import all_kv_shapes, kv_places, kv_shape, kv_shapes
from headrace.kv.pool import FreshPool, KVPool
from headrace.models.base import Model
from headrace.models.families import FAMILIES
from headrace.models.family import FileFormat
from headrace.models.reader import Reader
from headrace.ops.context import FeedRows, build
from headrace.runner.record import record
from headrace.runner.streamed import Streamed
from headrace.training.sequence_forward import run_sequence
from headrace.weights.gguf import GGUFFile
from headrace.weights.kv_settings import FILE, kv_settings
from headrace.weights.source import WeightError
from tests.cli_shell import Shell
from tests.kv_reference import reference
from tests.parallel.test_windows import GEMMA
from tests.tiny import tiny_config, tiny_model
from tests.tiny_native import as_bfloat16, native_program

SOURCES = (None, None, None, 1)
TEXT = [(7 * at) % 97 for at in range(60)]


def two_sizes(window: int = 12, sources: tuple[int | None, ...] = SOURCES) -> ModelConfig:
    """A Llama of four layers: full, window, full, window. A layer with a window has 1 K/V head of 24, others 2 of 8."""
    full = tiny_config().layers[0]
    sliding = replace(full, kv_heads=1, head_dim=24, window=window)
    layers = (replace(layer, kv_from=at) for layer, at in zip((full, sliding) * 2, sources, strict=True))
    return replace(tiny_config(), layers=tuple(layers))


def by_torch(model: Model, chunk: int, window: int) -> torch.Tensor:
    """Logits of TEXT in chunks, over pools for `window` tokens whose window table gives nothing up."""
    table = [3, 0, 2, 1]
    pool = KVPool(model.config, 4, 16, torch.float64, window=window, window_blocks=4)
    rows = []
    for start in range(0, len(TEXT), chunk):
        feed = FeedRows(TEXT[start : start + chunk], table, start, window_table=table[::-1])
        with torch.no_grad():
            rows.append(model(build(pool, [feed])))
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [60, 7, 1])
def test_torch_equals_the_reference(chunk: int) -> None:
    """The last layer reads layer 1; the control is a reference whose last layer reads its own."""
    model = tiny_model(two_sizes())
    wanted = reference(model, TEXT, SOURCES)
    assert (by_torch(model, chunk, 12) - wanted).abs().max() < 1e-10
    assert (by_torch(model, chunk, 100) - wanted).abs().max() < 1e-10
    whole = tiny_model(two_sizes(window=len(TEXT)))  # the same weights: the window counts
    assert (reference(whole, TEXT, SOURCES) - wanted).abs().max() > 0.1


def test_whole_texts_with_gradients_equal_the_reference() -> None:
    model = tiny_model(two_sizes(sources=(None,) * 4))
    wanted = reference(model, TEXT, (None,) * 4)
    with torch.no_grad():
        ctx = build(FreshPool(model.config, 4, 16, torch.float64), [FeedRows(TEXT, range(4))])
        assert (model(ctx) - wanted).abs().max() < 1e-10
        watched = run_sequence(model, TEXT, recording=record(model, embeds=False))
        assert (model.head(watched.rows) - wanted).abs().max() < 1e-10
    assert [tuple(each.shape) for each in watched.maps] == [(4, 60, 60)] * 4


def by_core(model: Model, chunk: int, window: int, *others: list[int]) -> np.ndarray:
    """Logits of TEXT in chunks on the native core, fed together with `others`."""
    program = native_program(model, kv_dtype="float32", window=window, window_blocks=64)
    module, made = core.module(), []
    sequences = [module.Sequence(list(text), module.SampleParams()) for text in (TEXT, *others)]
    for number, sequence in enumerate(sequences):
        table = list(range(8 * number, 8 * number + 8))
        sequence.set_table(0, 0, table)
        sequence.set_table(2, 0, table[::-1])
    for start in range(0, len(TEXT), chunk):
        step, asked = module.Step(), []
        for sequence, text in zip(sequences, (TEXT, *others), strict=True):
            count = min(chunk, len(text) - start)
            if count <= 0:
                continue
            step.feed(sequence, start, count, count if text is TEXT else 0)
            if text is TEXT:
                asked = [step.logits(row) for row in range(count)]
        program.core.run(step)
        made += [np.frombuffer(step.row_of_logits(at), "<f4").copy() for at in asked]
    return np.stack(made)


@pytest.mark.parametrize("window", [12, 50, 600])
def test_the_core_has_the_same_bits_in_any_chunk_and_batch(window: int) -> None:
    """Also with a window that no sequence is longer than, which is a pool of its own still."""
    model = as_bfloat16(tiny_model(two_sizes(window)))
    whole = by_core(model, 60, window)
    for chunk, others in ((7, ()), (1, ()), (60, (TEXT[::-1], TEXT[:9])), (16, (TEXT[5:],))):
        assert np.array_equal(by_core(model, chunk, window, *others), whole), chunk
    assert np.array_equal(by_core(model, 60, window + 1), whole)
    wanted = reference(model, TEXT, SOURCES).numpy()  # inputs are rounded to bfloat16
    assert np.abs(whole - wanted).mean() < 0.05
    other = as_bfloat16(tiny_model(two_sizes(8 if window == 12 else 12)))
    assert not np.array_equal(by_core(other, 60, 12), whole)


# -- pools ------------------------------------------------------------------------------------------------------------------


def test_pools_have_shapes_of_their_own() -> None:
    config = two_sizes(sources=(None,) * 4)
    assert kv_shapes(config, 12) == [(2, 2, 8), (2, 1, 24)]
    assert sorted(all_kv_shapes(config)) == [(2, 1, 24), (2, 2, 8)]
    assert kv_shapes(two_sizes(), 12) == [(2, 2, 8), (1, 1, 24)]
    assert [tuple(place) for place in kv_places(two_sizes(), 12)] == [(0, 0), (1, 0), (0, 1), (1, 0)]
    assert [config.shared_window(context) for context in (500, 12, 5)] == [12] * 3
    equal = replace(tiny_config(), layers=tuple(replace(tiny_config().layers[0], window=window) for window in (12, None)))
    assert [equal.shared_window(context) for context in (500, 12, 5)] == [12, 0, 0]
    with pytest.raises(
        ValueError, match=r"and this llama has \[\(1, 24\), \(2, 8\)\] \(heads, head size\) in one; only layers"
    ):
        kv_shape(config)
    crossed = replace(config, layers=(*config.layers, replace(config.layers[0], window=12)))
    with pytest.raises(ValueError, match="a pool holds K and V of one shape"):
        kv_shapes(crossed, 12)


# -- a file -----------------------------------------------------------------------------------------------------------------


def sized(config: ModelConfig) -> ModelConfig:
    """Gemma's config with 2 K/V heads of 64 in layers with a window, and 4 of 32 in the others, all turned whole."""
    layers = []
    for layer in config.layers:
        heads, dim = (4, 32) if layer.window is None else (2, 64)
        assert layer.rope is not None
        layers.append(replace(layer, kv_heads=heads, head_dim=dim, rope=replace(layer.rope, dim=None)))
    return replace(config, layers=tuple(layers))


def changed(stored: FileFormat) -> FileFormat:
    def numbers(read: Reader) -> ModelConfig:
        return sized(stored.numbers(read))

    return replace(stored, numbers=numbers)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file of such a model. No family has one yet, so Gemma 3's reader is changed."""
    family = FAMILIES["gemma3_text"]
    assert isinstance(family.gguf, FileFormat)
    monkeypatch.setitem(FAMILIES, "gemma3_text", replace(family, hf=changed(family.hf), gguf=changed(family.gguf)))
    (tmp_path / "sized.json").write_text(json.dumps(GEMMA))
    return write_synthetic(str(tmp_path / "sized.json"), tmp_path / "sized.gguf", "BF16", seed=2).path


@pytest.fixture
def opened(model: Path) -> Callable[..., LLM]:
    def make(**settings: Any) -> LLM:
        given = {"threads": 1, "device": "cpu", "max_model_len": 256, "max_num_seqs": 4, "speculate": None}
        given["max_num_batched_tokens"] = 64
        return LLM(model, **{**given, **settings})

    return make


PROMPTS = [[(7 * i + j * (i + 3)) % 250 for j in range(count)] for i, count in enumerate((150, 60, 9))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_freed_equals_kept_and_the_plan_is_what_is_allocated(
    opened: Callable[..., LLM], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(backend=backend) as llm:
        plan = llm.memory_plan
        assert plan.window == 24
        assert plan.window_blocks < plan.num_blocks
        assert "of layers that see all tokens" in plan.summary
        assert llm.engine.executor.kv_bytes() == plan.kv_bytes
        freed = tokens(llm)
        assert llm.engine.blocks.used == 0
    monkeypatch.setattr(Recipe, "window", property(lambda self: 1 << 20))
    with opened(backend=backend) as llm:
        assert llm.memory_plan.window_blocks == llm.memory_plan.num_blocks
        assert tokens(llm) == freed


def test_a_context_within_the_window(opened: Callable[..., LLM]) -> None:
    """The window layers keep their pool, as their K/V do not fit the other."""
    prompt = PROMPTS[2]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = []
    for context in (256, 20):
        with opened(max_model_len=context) as llm:
            assert llm.memory_plan.window == 24
            assert llm.engine.executor.kv_bytes() == llm.memory_plan.kv_bytes
            found.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_fit_prints_the_bytes_of_both_pools(model: Path, opened: Callable[..., LLM], shell: Shell, kv_dtype: str) -> None:
    """They are those of the plan, and of the pools."""
    with opened(kv_dtype=kv_dtype) as llm:
        program: Any = llm.runner.programs[0]
        each = [int(pool.bytes) // int(pool.num_blocks) for pool in (program.kv, program.windows)]
        blocks, in_windows = 4 * 16, llm.memory_plan.window_blocks
    given = ("--context", 256, "--batch", 4, "--chunk", 64, "--kv-dtype", kv_dtype)
    code, out, said = shell("fit", model, *given, "--json")
    assert code == 0, said
    memory = json.loads(out)["memory"]
    assert memory["kv_windows"] == min(in_windows, blocks) * each[1]
    assert memory["kv"] - memory["kv_windows"] == blocks * each[0]
    code, out, said = shell("fit", model, *given)
    assert code == 0, said
    assert "of layers that see all tokens" in out
    assert "of layers with a window" in out


def test_what_one_pool_cannot_do_is_refused_in_one_line(model: Path, opened: Callable[..., LLM], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kv_store saves one pool, and layers of this model have K/V of other sizes; leave"):
        opened(kv_store=str(tmp_path / "store"))
    with pytest.raises(ValueError, match="a pool holds K and V of one shape") as refused:
        opened(draft=model)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="layers with K/V of other sizes do not go one by one; take a model of equal layers"):
        Streamed(GGUFFile(model))


def test_key_means_of_layers_of_two_sizes_are_refused(tmp_path: Path) -> None:
    folder: Any = SimpleNamespace(path=tmp_path)
    assert kv_settings(folder, two_sizes()) is None
    (tmp_path / FILE).write_text(json.dumps({"kv": {"format": "int4", "centre": [[0.0] * 16] * 3}}))
    with pytest.raises(WeightError, match="asks for K and V as this model cannot have them"):
        kv_settings(folder, two_sizes())
    one_size = replace(two_sizes(), layers=two_sizes().layers[:1] * 3)
    assert kv_settings(folder, one_size).by_layer([0, 1, 2])[2].shape == (16,)  # type: ignore[union-attr]
