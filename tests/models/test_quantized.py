"""Folders that others have compressed: what is read is what their formats' arithmetic says, bit for bit, and it runs packed."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import native
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.models import registry
from headrace.models.base import Model
from headrace.native.weights import packed_bytes
from headrace.weights.dequant import read_floats
from headrace.weights.describe import describe
from headrace.weights.loader import load_model
from headrace.weights.parts import plan
from headrace.weights.quantized.folder import QuantizedFolder, open_folder
from headrace.weights.source import WeightError
from tests.models.feeding import feed
from tests.models.gates import program_of
from tests.native_reference import Faked, bfloat16_attention, int8_groups
from tests.quantized import DATA, LAYER, MATRICES, VOCAB, Made, awq, gptq
from tests.tiny_native import Feeder
from tests.unit.gguf_bytes import damaged

TEXT = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
FORMATS: dict[str, tuple[Callable[[], Made], set[str], str]] = {
    "gptq": (gptq, {"Q4_0"}, "GPTQ, 4 bits, groups of 32"),
    "gptq by row": (lambda: gptq(group=-1), {"Q4_0"}, "GPTQ, 4 bits, a scale a row"),
    "gptq v2": (lambda: gptq(version=2, sym=False), {"Q5_0"}, "GPTQ, 4 bits, groups of 32"),
    "gptq with zeros": (lambda: gptq(sym=False), {"Q5_0"}, "GPTQ, 4 bits, groups of 32"),
    "gptq in act-order": (lambda: gptq(act_order=True), {"Q4_0"}, "GPTQ, 4 bits, groups of 32, act-order"),
    "gptq in act-order with zeros": (
        lambda: gptq(act_order=True, sym=False, version=2), {"Q5_0"}, "GPTQ, 4 bits, groups of 32, act-order"
    ),
    "gptq int8": (lambda: gptq(8), {"Q8_0"}, "GPTQ, 8 bits, groups of 32"),
    "gptq int8 in act-order": (lambda: gptq(8, act_order=True), {"Q8_0"}, "GPTQ, 8 bits, groups of 32, act-order"),
    "gptq int2": (lambda: gptq(2, sym=False), {"Q4_0"}, "GPTQ, 2 bits, groups of 32"),
    "awq": (awq, {"Q5_0"}, "AWQ, 4 bits, groups of 32"),
    "awq without zeros": (lambda: awq(zeros=False), {"Q4_0"}, "AWQ, 4 bits, groups of 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_are_what_the_format_says(name: str, tmp_path: Path) -> None:
    """Bit for bit, in a source, in torch and by their kinds; nothing is left over."""
    make, kinds, said = FORMATS[name]
    made = make()
    source = open_folder(made.write(tmp_path))
    assert isinstance(source, QuantizedFolder)
    assert source.scheme.said == said
    assert {source.info(f"{matrix}.weight").kind for matrix in MATRICES} == kinds
    for matrix, values in made.values.items():
        assert np.array_equal(read_floats(source, f"{matrix}.weight").view(np.uint32), values.view(np.uint32)), matrix
    told = describe(tmp_path)
    assert told["quantised"] == said
    assert told["bytes"] == sum(x.nbytes for x in made.tensors.values()), "what the file has, not what it becomes"
    q_proj = load_model(source).layers[0].qkv.weight[: len(values := made.values[f"{LAYER}.self_attn.q_proj"])]
    assert np.array_equal(q_proj.numpy(), values)


def by_bits(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


# What other projects wrote, and how it is read; exact, or with a bound of the largest number of a block.
KEPT: dict[str, tuple[set[str], str]] = {
    "gptq-asym": ({"Q5_0"}, "GPTQ, 4 bits, groups of 32"),
    "awq": ({"Q5_0"}, "AWQ, 4 bits, groups of 32"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_other_projects_wrote_has_their_numbers(name: str, tmp_path: Path) -> None:
    """Bit for bit those of their own arithmetic."""
    kinds, said = KEPT[name]
    source, expected = open_folder(DATA / name), json.loads((DATA / name / "expected.json").read_text())["sha256"]
    assert isinstance(source, QuantizedFolder)
    assert source.scheme.said == said
    assert {source.info(f"{matrix}.weight").kind for matrix in expected} == kinds
    assert {matrix: by_bits(read_floats(source, f"{matrix}.weight")) for matrix in expected} == expected
    model = load_model(source)
    assert sum(parameter.numel() for parameter in model.parameters()) > sum(n * k for n, k in MATRICES.values())


class Ordered:
    """LinearMethod: what the core multiplies, its input's columns taken part by part in orders of their own."""

    def __init__(self, parts: list[tuple[int, np.ndarray | None]]) -> None:
        self.parts = parts  # rows, order

    def apply(self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made, start = [], 0
        for rows, order in self.parts:
            columns = torch.arange(x.shape[1]) if order is None else torch.from_numpy(order).long()
            made.append(int8_groups(x[:, columns]) @ layer.weight[start : start + rows, columns].T)
            start += rows
        return torch.cat(made, -1)


def reference(source: QuantizedFolder, ordered: bool = True) -> Model:
    """The model in float64 with activations as the core rounds them; in the columns' order if `ordered`."""
    model = load_model(source, torch.float64)
    plans = plan(model, source)
    for path, holder in model.holders():
        if isinstance(holder, Embedding):
            holder.method = Faked("bf16")
        elif isinstance(holder, Linear):
            orders = [(part.shape[0], source.columns(part.source) if ordered else None) for part in plans[f"{path}.weight"]]
            holder.method = Ordered(orders)
    return model


def distance(source: QuantizedFolder, model: Model, patch: pytest.MonkeyPatch) -> float:
    """The median over rows of the largest difference of a logit of the core and of a model, relative to the row's spread."""
    (ours,) = Feeder(program_of(source), [TEXT]).whole()
    with bfloat16_attention(patch):
        (wanted,) = feed(model, [TEXT], "whole", torch.float64)
    return float(np.median((np.abs(ours - wanted.numpy()) / wanted.numpy().std(-1, keepdims=True)).max(-1)))


@pytest.mark.skipif(not native.available(), reason=native.reason())
@pytest.mark.parametrize("name", FORMATS)
def test_the_core_multiplies_them_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, _, _ = FORMATS[name]
    source = open_folder(make().write(tmp_path))
    assert isinstance(source, QuantizedFolder)
    program = program_of(source)
    assert program.weights.bytes <= packed_bytes(registry.describe(program.model.config), source) * 1.02
    assert distance(source, reference(source), monkeypatch) < 1e-5
    if "act-order" in name:
        apart = distance(source, reference(source, ordered=False), monkeypatch)
        assert apart > 1e-3, "the control: activations in groups of other columns are noticed"


UP = f"{LAYER}.mlp.up_proj"
Edit = Callable[[Made], object]
Tensor = torch.Tensor


def without(field: str) -> Edit:
    return lambda made: made.tensors.pop(f"{UP}.{field}")


def changed(field: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda made: made.tensors.update({f"{UP}.{field}": change(made.tensors[f"{UP}.{field}"])})


# Of a matrix: what is done to its tensors, and what is said before anything is loaded.
DAMAGED: dict[str, tuple[Callable[[], Made], Edit, str]] = {
    "gptq without scales": (gptq, without("scales"), "has no scales; the file is incomplete"),
    "gptq without zeros": (gptq, without("qzeros"), "has no qzeros; the file is incomplete"),
    "gptq without g_idx": (lambda: gptq(act_order=True), without("g_idx"), "has no g_idx, which desc_act needs"),
    "gptq with a g_idx of nothing": (gptq, changed("g_idx", lambda x: x * 0), "is none of groups of 32; the file is damaged"),
    "gptq with a g_idx beyond": (gptq, changed("g_idx", lambda x: x + 1), "is none of groups of 32"),
    "gptq with a short g_idx": (gptq, changed("g_idx", lambda x: x[:-1]), "g_idx of I32 63 and needs I32 64"),
    "gptq with a g_idx of floats": (gptq, changed("g_idx", lambda x: x.float()), "g_idx of F32 64 and needs I32"),
    "gptq of fewer words": (gptq, changed("qweight", lambda x: x[:-1]), "has 2 groups of 56 columns"),
    "gptq of fewer rows": (gptq, changed("qweight", lambda x: x[:, :-8]), "scales of F16 2 x 96 and needs F16 2 x 88"),
    "gptq of words in a row": (gptq, changed("qweight", torch.ravel), "has tensors that are no matrices"),
    "gptq with scales of integers": (
        gptq,
        changed("scales", lambda x: x.int()),
        "scales of I32 2 x 96 and needs F16",
    ),
    "gptq of 3 bits": (gptq, changed("qzeros", lambda x: x[:, :9]), "has 3 bits; 2, 4, 8 are read: take another checkpoint"),
    "gptq of groups of 16": (lambda: gptq(group=16), lambda made: None, "groups of a multiple of 32 are read"),
    "gptq of 8 bits with zeros": (lambda: gptq(8, sym=False), lambda made: None, "no packed kind holds; take a symmetric"),
    "awq without zeros": (awq, without("qzeros"), "has no qzeros; the file is incomplete"),
    "awq of fewer words": (awq, changed("qweight", lambda x: x[:-1]), "has 2 groups of 63 columns"),
    "awq of fewer outputs": (awq, changed("qweight", lambda x: x[:, 1:]), "bits or is damaged; 4 are read"),
    "awq of zeros of another shape": (awq, changed("qzeros", lambda x: x[:, 1:]), "qzeros of I32 2 x 11 and needs I32 2 x 12"),
    "awq of groups of 16": (lambda: awq(16), lambda made: None, "groups of a multiple of 32 are read"),
    "awq of another layout": (lambda: awq(version="gemv"), lambda made: None, "layout 'gemv'; take one of gemm"),
    "gptq of another layout": (
        lambda: gptq(checkpoint_format="marlin"),
        lambda made: None,
        "layout 'marlin'; take one of gptq",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_or_not_read_is_one_line(name: str, tmp_path: Path) -> None:
    make, edit, said = DAMAGED[name]
    made = make()
    edit(made)
    with pytest.raises(WeightError, match=said) as caught:
        load_model(open_folder(made.write(tmp_path)))
    assert len(str(caught.value).splitlines()) == 1
    assert str(tmp_path) in str(caught.value)


def nan(x: Tensor) -> Tensor:
    flat = x.flatten().clone()
    flat[len(flat) // 2] = torch.nan
    return flat.reshape(x.shape)


@pytest.mark.skipif(not native.available(), reason=native.reason())
@pytest.mark.parametrize("make", [gptq, awq])
def test_scales_that_are_no_numbers_are_refused(make: Callable[[], Made], tmp_path: Path) -> None:
    """By torch and by the core, which names the matrix."""
    made = make()
    field = next(name for name in made.tensors if name.startswith(f"{UP}.") and "scale" in name).rpartition(".")[2]
    changed(field, nan)(made)
    for load in (load_model, program_of):
        with pytest.raises(WeightError, match=rf"tensor '{UP}.weight' has .*NaN or infinite"):
            load(open_folder(made.write(tmp_path)))


def test_damaged_files_give_one_line(tmp_path: Path) -> None:
    """Seeded damage to header and settings: opened and read, or refused in one line."""
    gptq(act_order=True, sym=False).write(tmp_path)
    file, settings = (tmp_path / "model.safetensors", tmp_path / "config.json")
    content, said = file.read_bytes(), settings.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    messages = []
    for seed in range(60):
        rng = random.Random(seed)
        for path in (file, settings):
            path.unlink()
        file.write_bytes(damaged(content[:header], rng) + content[header:] if seed % 2 else content)
        settings.write_bytes(said if seed % 2 else damaged(said, rng))
        try:
            with open_folder(tmp_path) as source:
                load_model(source)
        except WeightError as error:
            messages.append(str(error))
    assert 30 < len(messages) < 60
    assert all(len(message.splitlines()) == 1 for message in messages)
