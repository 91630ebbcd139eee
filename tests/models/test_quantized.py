"""Folders that others have compressed: what is read is what their formats' arithmetic says, bit for bit, and it runs packed."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace import core
from headrace.backends.native.weights import packed_bytes
from headrace.models import registry
from headrace.models.base import Model
from headrace.models.layers import Embedding, Linear
from headrace.weights.decode import read_floats
from headrace.weights.describe import describe
from headrace.weights.loader import load_model
from headrace.weights.parts import plan
from headrace.weights.schemes.folder import QuantizedFolder, open_folder
from headrace.weights.source import WeightError
from tests.models.feeding import feed
from tests.models.gates import program_of
from tests.native_reference import Faked, bfloat16_attention, int8_groups, rounded
from tests.quantized import (
    DATA,
    LAYER,
    MATRICES,
    VOCAB,
    Made,
    awq,
    fp8_blocks,
    fp8_whole,
    gptq,
    load_fixture,
    mxfp4,
    nvfp4,
    packed_integers,
    sparse,
)
from tests.tiny_native import Feeder
from tests.unit.gguf_bytes import damaged

TEXT = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
FORMATS: dict[str, tuple[Callable[[], Made], set[str], str]] = {
    "gptq": (gptq, {"Q4_0"}, "GPTQ, 4 bits, groups of 32"),
    "gptq by row": (lambda: gptq(group=-1), {"Q4_0"}, "GPTQ, 4 bits, a scale a row"),
    "gptq by row of 128": (lambda: gptq(group=-1, ffn=128), {"Q4_0", "G4_128"}, "GPTQ, 4 bits, a scale a row"),
    "gptq v2": (lambda: gptq(version=2, sym=False), {"G4_32"}, "GPTQ, 4 bits, groups of 32"),
    "gptq with zeros": (lambda: gptq(sym=False), {"G4_32"}, "GPTQ, 4 bits, groups of 32"),
    "gptq with zeros by row": (
        lambda: gptq(group=-1, sym=False, ffn=128), {"G4_32", "G4_128"}, "GPTQ, 4 bits, a scale a row"
    ),
    "gptq in act-order": (lambda: gptq(act_order=True), {"Q4_0"}, "GPTQ, 4 bits, groups of 32, act-order"),
    "gptq in act-order with zeros": (
        lambda: gptq(act_order=True, sym=False, version=2), {"G4_32"}, "GPTQ, 4 bits, groups of 32, act-order"
    ),
    "gptq int3": (lambda: gptq(3), {"Q4_0"}, "GPTQ, 3 bits, groups of 32"),
    "gptq int3 with zeros": (lambda: gptq(3, sym=False), {"Q4_0"}, "GPTQ, 3 bits, groups of 32"),
    "gptq int3 v2 in act-order": (
        lambda: gptq(3, sym=False, version=2, act_order=True), {"Q4_0"}, "GPTQ, 3 bits, groups of 32, act-order"
    ),
    "gptq int8": (lambda: gptq(8), {"Q8_0"}, "GPTQ, 8 bits, groups of 32"),
    "gptq int8 in act-order": (lambda: gptq(8, act_order=True), {"Q8_0"}, "GPTQ, 8 bits, groups of 32, act-order"),
    "gptq int8 with zeros": (lambda: gptq(8, sym=False), {"G8_32"}, "GPTQ, 8 bits, groups of 32"),
    "gptq int2": (lambda: gptq(2, sym=False), {"Q4_0"}, "GPTQ, 2 bits, groups of 32"),
    "awq": (awq, {"G4_32"}, "AWQ, 4 bits, groups of 32"),
    "awq without zeros": (lambda: awq(zeros=False), {"Q4_0"}, "AWQ, 4 bits, groups of 32"),
    "2:4": (sparse, {"S8"}, "compressed-tensors, 2:4, 8 bits, a scale a row"),
    "int3": (lambda: packed_integers(3, sym=False), {"Q4_0"}, "compressed-tensors, 3 bits, groups of 32"),
    "int3 in whole words": (lambda: packed_integers(3, padded=True), {"Q4_0"}, "compressed-tensors, 3 bits, groups of 32"),
    "int5": (lambda: packed_integers(5), {"Q5_0"}, "compressed-tensors, 5 bits, groups of 32"),
    "int6 in whole words with zeros": (
        lambda: packed_integers(6, padded=True, sym=False), {"Q8_0"}, "compressed-tensors, 6 bits, groups of 32"
    ),
    "int7 with zeros": (lambda: packed_integers(7, sym=False), {"Q8_0"}, "compressed-tensors, 7 bits, groups of 32"),
    "int7 in whole words": (lambda: packed_integers(7, padded=True), {"Q8_0"}, "compressed-tensors, 7 bits, groups of 32"),
    "int8 with zeros": (
        lambda: packed_integers(8, sym=False), {"G8_32"}, "compressed-tensors, 8 bits, groups of 32"
    ),
    "nvfp4": (nvfp4, {"F32"}, "compressed-tensors, NVFP4 as bfloat16"),
    "mxfp4": (mxfp4, {"MXFP4"}, "MXFP4"),
    "fp8": (fp8_blocks, {"F32"}, "FP8, E4M3 as bfloat16"),
    "fp8 in several blocks": (lambda: fp8_blocks(ffn=288), {"F32"}, "FP8, E4M3 as bfloat16"),
    "fp8 with one scale": (fp8_whole, {"F32"}, "FP8, E4M3 as bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_decode_to_their_values(name: str, tmp_path: Path) -> None:
    """Bit for bit, in a source, in torch and by their kinds; nothing is left over."""
    make, kinds, said = FORMATS[name]
    made = make()
    source = open_folder(made.write(tmp_path))
    assert isinstance(source, QuantizedFolder)
    assert source.scheme.summary == said
    assert {source.info(f"{matrix}.weight").kind for matrix in MATRICES} == kinds
    for matrix, values in made.values.items():
        assert np.array_equal(read_floats(source, f"{matrix}.weight").view(np.uint32), values.view(np.uint32)), matrix
    told = describe(tmp_path)
    assert told["quantised"] == said
    assert sum(f"packed as {kind}" in told["core"] for kind in kinds) == len(kinds - {"F32"})
    assert told["core"].endswith(" in bfloat16")
    assert told["bytes"] == sum(x.nbytes for x in made.tensors.values()), "what the file has, not what it becomes"
    q_proj = load_model(source).layers[0].qkv.weight[: len(values := made.values[f"{LAYER}.self_attn.q_proj"])]
    assert np.array_equal(q_proj.numpy(), values)


def by_bits(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


# What other projects wrote, and how it is read; exact, or with a bound of the largest number of a block.
KEPT: dict[str, tuple[set[str], str]] = {
    "gptq-asym": ({"G4_32"}, "GPTQ, 4 bits, groups of 32"),
    "awq": ({"G4_32"}, "AWQ, 4 bits, groups of 32"),
    "int4-asym": ({"G4_32"}, "compressed-tensors, 4 bits, groups of 32"),
    "int8": ({"C8"}, "compressed-tensors, 8 bits, a scale a row"),
    "fp8": ({"F32"}, "compressed-tensors, F8_E4M3 as bfloat16"),
    "mxfp4": ({"MXFP4"}, "compressed-tensors, MXFP4"),
    "int3-asym": ({"Q4_0"}, "compressed-tensors, 3 bits, groups of 32"),
    "nvfp4": ({"F32"}, "compressed-tensors, NVFP4 as bfloat16"),
    "int5-words": ({"Q5_0"}, "compressed-tensors, 5 bits, groups of 32"),
    "int8-2of4": ({"S8"}, "compressed-tensors, 2:4, 8 bits, a scale a row"),
}


@pytest.mark.parametrize("name", KEPT)
def test_files_of_other_projects_decode_to_their_values(name: str, tmp_path: Path) -> None:
    """Bit for bit those of their own arithmetic."""
    kinds, said = KEPT[name]
    source, expected = open_folder(DATA / name), json.loads((DATA / name / "expected.json").read_text())["sha256"]
    assert isinstance(source, QuantizedFolder)
    assert source.scheme.summary == said
    assert {source.info(f"{matrix}.weight").kind for matrix in expected} == kinds
    assert {matrix: by_bits(read_floats(source, f"{matrix}.weight")) for matrix in expected} == expected
    model = load_model(source)
    assert sum(parameter.numel() for parameter in model.parameters()) > sum(n * k for n, k in MATRICES.values())


# Of the largest of a block of 64, beside 2^-11 of the number for a scale in 16 bits.
BOUNDED = {"bnb-int8": ("Q8_0", "int8", 0.0), "bnb-nf4-nested": ("NF4", "NF4", 1 / 350), "bnb-fp4": ("FP4", "FP4", 1 / 190)}


@pytest.mark.parametrize("name", BOUNDED)
def test_files_of_bitsandbytes_decode_within_rounding(name: str) -> None:
    kind, said, most = BOUNDED[name]
    source = open_folder(DATA / name)
    assert isinstance(source, QuantizedFolder)
    assert source.scheme.summary == f"bitsandbytes, {said}"
    assert {matrix.info.kind for matrix in source.scheme.matrices.values()} == {kind}
    theirs = load_file(DATA / name / "expected.safetensors")["k_proj"].numpy()
    apart = np.abs(read_floats(source, f"{LAYER}.self_attn.k_proj.weight") - theirs)
    largest = np.abs(theirs.reshape(-1, 64)).max(1).repeat(64).reshape(theirs.shape)
    assert (apart <= np.abs(theirs) * 2.0**-10.9 + largest * most).all()
    for matrix in source.scheme.matrices:
        assert np.isfinite(read_floats(source, matrix)).all()
    neighbour = np.abs(read_floats(source, f"{LAYER}.self_attn.v_proj.weight") - theirs)
    assert (neighbour > largest * 0.02).mean() > 0.5, "the control: other numbers are beyond the bound"


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
        elif isinstance(holder, Linear) and source.info(plans[f"{path}.weight"][0].source).kind == "F32":
            holder.weight, holder.method = rounded(holder.weight), Faked("bf16")
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


@pytest.mark.skipif(not core.available(), reason=core.reason())
@pytest.mark.parametrize("name", [*FORMATS, *BOUNDED])
def test_the_core_multiplies_them_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_folder(DATA / name if name in BOUNDED else FORMATS[name][0]().write(tmp_path))
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
    "gptq with a g_idx of nothing": (
        gptq,
        changed("g_idx", lambda x: x * 0),
        "does not form groups of 32; the file is damaged",
    ),
    "gptq with a g_idx beyond": (gptq, changed("g_idx", lambda x: x + 1), "does not form groups of 32"),
    "gptq with a short g_idx": (gptq, changed("g_idx", lambda x: x[:-1]), "g_idx of I32 63 and needs I32 64"),
    "gptq with a g_idx of floats": (gptq, changed("g_idx", lambda x: x.float()), "g_idx of F32 64 and needs I32"),
    "gptq of fewer words": (gptq, changed("qweight", lambda x: x[:-1]), "has 2 groups of 56 columns"),
    "gptq of fewer rows": (gptq, changed("qweight", lambda x: x[:, :-8]), "scales of F16 2 x 96 and needs F16 2 x 88"),
    "gptq of words in a row": (gptq, changed("qweight", torch.ravel), "has tensors that are not matrices"),
    "gptq with scales that 16 bits lack": (
        gptq,
        changed("scales", lambda x: x.float() * 1e-7),
        "scales too large or too small for 16 bits",
    ),
    "awq with scales that 16 bits lack": (
        awq,
        changed("scales", lambda x: x.float() * 1e9),
        "scales too large or too small for 16 bits",
    ),
    "gptq with scales of integers": (
        gptq,
        changed("scales", lambda x: x.int()),
        "scales of I32 2 x 96 and needs F16",
    ),
    "gptq of 5 bits": (
        gptq,
        changed("qzeros", lambda x: x.repeat(1, 2)[:, :15]),
        "has 5 bits; 2, 3, 4, 8 are supported: use another",
    ),
    "gptq of groups of 16": (lambda: gptq(group=16), lambda made: None, "group sizes must be multiples of 32"),
    "awq without zeros": (awq, without("qzeros"), "has no qzeros; the file is incomplete"),
    "awq of fewer words": (awq, changed("qweight", lambda x: x[:-1]), "has 2 groups of 63 columns"),
    "awq of fewer outputs": (awq, changed("qweight", lambda x: x[:, 1:]), "bits or is damaged; 4 are supported"),
    "awq of zeros of another shape": (awq, changed("qzeros", lambda x: x[:, 1:]), "qzeros of I32 2 x 11 and needs I32 2 x 12"),
    "awq of groups of 16": (lambda: awq(16), lambda made: None, "group sizes must be multiples of 32"),
    "awq of another layout": (
        lambda: awq(version="gemv"),
        lambda made: None,
        "layout 'gemv' is not supported; use a checkpoint in gemm",
    ),
    "int4 without a shape": (
        lambda: load_fixture("int4-asym"),
        without("weight_shape"),
        "has no weight_shape; the file is incomplete",
    ),
    "int4 of another shape": (
        lambda: load_fixture("int4-asym"),
        changed("weight_shape", lambda x: x + 1),
        "has 96 x 8 words for 97 x 65 numbers",
    ),
    "int4 of 5 bits": (
        lambda: load_fixture("int4-asym"),
        changed("weight_packed", lambda x: x[:, :5].repeat(1, 2)),
        "has 96 x 10 words for 96 x 64 numbers of 4 bits; the file is damaged",
    ),
    "int4 of fewer scales": (
        lambda: load_fixture("int4-asym"),
        changed("weight_scale", lambda x: x[1:]),
        "weight_scale of BF16 95 x 2 and needs F16 96 x 2",
    ),
    "int4 of fewer zeros": (
        lambda: load_fixture("int4-asym"),
        changed("weight_zero_point", lambda x: x[1:]),
        "weight_zero_point of I32 11 x 2 and needs",
    ),
    "int8 of whole scales": (
        lambda: load_fixture("int8"),
        changed("weight_scale", lambda x: x.int()),
        "weight_scale of I32 96 x 1",
    ),
    "int8 of scales that 16 bits lack": (
        lambda: load_fixture("int8"),
        changed("weight_scale", lambda x: x * 1e-6),
        "a weight_scale too large or too small for 16 bits",
    ),
    "int8 in a row": (lambda: load_fixture("int8"), changed("weight", torch.ravel), "has a weight that is not a matrix"),
    "fp8 of fewer scales": (
        lambda: load_fixture("fp8"),
        changed("weight_scale", lambda x: x[1:]),
        "weight_scale of BF16 95 x 1",
    ),
    "fp8 without a weight": (lambda: load_fixture("fp8"), without("weight"), "has no weight; the file is incomplete"),
    "blocks of fp8 of whole scales": (fp8_blocks, changed("weight_scale_inv", lambda x: x.int()), "weight_scale_inv of I32"),
    "nvfp4 of powers": (
        lambda: load_fixture("mxfp4"),
        lambda made: made.tensors.update({f"{UP}.weight_global_scale": torch.ones(1)}),
        "weight_scale of U8 96 x 2 and needs F8_E4M3 96 x 4",
    ),
    "nvfp4 of fewer scales": (nvfp4, changed("weight_scale", lambda x: x[:, 1:]), "weight_scale of F8_E4M3 96 x 3 and needs"),
    "nvfp4 of half a group": (nvfp4, changed("weight_packed", lambda x: x[:, :-4]), "weight_scale of F8_E4M3 96 x 4 and needs"),
    "nvfp4 over 0": (nvfp4, changed("weight_global_scale", lambda x: x * 0), "NaN or infinite in float32"),
    "int3 of fewer words": (
        lambda: packed_integers(3),
        changed("weight_packed", lambda x: x[:, 1:]),
        "has 96 x 5 words for 96 x 64 numbers of 3 bits; the file is damaged",
    ),
    "mxfp4 of fewer scales": (mxfp4, changed("weight_scales", lambda x: x[1:]), "lacks scales or has odd blocks"),
    "mxfp4 of experts": (mxfp4, changed("weight_blocks", lambda x: x[None]), "belongs to experts, which are not supported"),
    "mxfp4 of a power beyond": (mxfp4, changed("weight_scales", lambda x: x * 0 + 255), "NaN or infinite in float32"),
    "2:4 of three in four": (
        sparse,
        changed("bitmask", lambda x: x | 1),
        "has a bitmask that does not keep two of four",
    ),
    "2:4 with zeros": (
        sparse,
        lambda made: made.tensors.update({f"{UP}.weight_zero_point": torch.full((96, 1), 3, dtype=torch.int8)}),
        "is 2:4 with zero points, which is not supported",
    ),
    "2:4 of fewer numbers": (sparse, changed("compressed", lambda x: x[1:]), "compressed of I8 95 x 32 and needs I8 96 x 32"),
    "nf4 of other blocks": (
        lambda: load_fixture("bnb-nf4-nested"),
        changed("weight.absmax", lambda x: x[1:]),
        "weight.absmax of U8 127 and needs U8 128",
    ),
    "nf4 with half a state": (
        lambda: load_fixture("bnb-nf4-nested"),
        changed("weight.quant_state.bitsandbytes__nf4", lambda x: x[:40]),
        "has a quant_state that cannot be read",
    ),
    "nf4 without its second scales": (
        lambda: load_fixture("bnb-nf4-nested"),
        without("weight.nested_absmax"),
        "weight.absmax of U8 128 and needs F32 128",
    ),
    "bitsandbytes int8 of fewer scales": (lambda: load_fixture("bnb-int8"), changed("SCB", lambda x: x[1:]), "SCB of F32 127"),
    "gptq of an older layout": (
        lambda: gptq(is_marlin_format=True),
        lambda made: None,
        "layout 'marlin' is not supported; use a checkpoint in gptq",
    ),
    "awq of a newer layout": (
        lambda: awq(version="gemv_fast"),
        lambda made: None,
        "layout 'gemv_fast' is not supported; use a checkpoint in gemm",
    ),
    "2:4 as one kernel reads it": (
        lambda: load_fixture("int4-asym"),
        lambda made: made.settings.update(format="marlin-24"),
        r"layout of one kernel \(marlin-24\), which is not read; take the same model pack-quantized",
    ),
    "some of it so": (
        lambda: load_fixture("int4-asym"),
        lambda made: made.settings["config_groups"]["group_0"].update(format="marlin-24"),
        r"layout of one kernel \(marlin-24\)",
    ),
    "gptq of another layout": (
        lambda: gptq(checkpoint_format="marlin"),
        lambda made: None,
        "layout 'marlin' is not supported; use a checkpoint in gptq",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_or_unsupported_files_are_a_one_line_error(name: str, tmp_path: Path) -> None:
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


@pytest.mark.skipif(not core.available(), reason=core.reason())
@pytest.mark.parametrize(
    "make", [gptq, awq, fp8_blocks, sparse, lambda: load_fixture("int4-asym"), lambda: load_fixture("bnb-fp4")]
)
def test_scales_that_are_nan_or_infinite_are_refused(make: Callable[[], Made], tmp_path: Path) -> None:
    """By torch and by the core, which names the matrix."""
    made = make()
    field = next(name for name in made.tensors if name.startswith(f"{UP}.") and ("scale" in name or "absmax" in name))
    field = field.removeprefix(f"{UP}.")
    changed(field, nan)(made)
    for load in (load_model, program_of):
        with pytest.raises(WeightError, match=rf"tensor '{UP}.weight' has .*NaN or infinite"):
            load(open_folder(made.write(tmp_path)))


def test_damaged_files_are_a_one_line_error(tmp_path: Path) -> None:
    """Seeded damage to header and settings of five schemes: opened and read, or refused in one line."""
    kinds: list[Callable[[], Made]] = [
        lambda: gptq(act_order=True, sym=False), sparse, fp8_blocks, lambda: load_fixture("int4-asym"),
        lambda: load_fixture("bnb-nf4-nested"),
    ]  # fmt: skip
    file, settings = (tmp_path / "model.safetensors", tmp_path / "config.json")
    messages = []
    for seed in range(75):
        kinds[seed % 5]().write(tmp_path)
        content, said, rng = file.read_bytes(), settings.read_bytes(), random.Random(seed)
        header = 8 + int.from_bytes(content[:8], "little")
        for path in (file, settings):
            path.unlink()
        file.write_bytes(damaged(content[:header], rng) + content[header:] if seed % 2 else content)
        settings.write_bytes(said if seed % 2 else damaged(said, rng))
        try:
            with open_folder(tmp_path) as source:
                load_model(source)
        except WeightError as error:
            messages.append(str(error))
    assert 40 < len(messages) < 75
    assert all(len(message.splitlines()) == 1 for message in messages)
