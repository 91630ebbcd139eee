"""Choice of a folder's scheme (layout) by the pipeline's options."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.compress.grids.spec import integers_named
from headrace.compress.mixes import check_folder_format
from headrace.compress.pipeline import LAYOUTS, Pipeline
from headrace.weights.mixes import MIXES
from headrace.weights.schemes.awq import AWQWriter
from headrace.weights.schemes.base import IntegerFormat, SchemeWriter
from headrace.weights.schemes.compressed_tensors import CompressedTensorsWriter, GroupWriter, SmallFloatsWriter, mixed_settings
from headrace.weights.schemes.gptq import BITS as GPTQ_BITS
from headrace.weights.schemes.gptq import GPTQWriter
from headrace.weights.schemes.small_floats import GROUPS
from headrace.weights.schemes.two_four import TwoFourWriter

NAMED: dict[str, type] = {"gptq": GPTQWriter, "awq": AWQWriter, "2:4": TwoFourWriter}
SPARSE = {IntegerFormat(4, 32): "S4", IntegerFormat(8, 32): "S8"}


def layout_of(pipeline: Pipeline) -> SchemeWriter:
    """The writer for a pipeline. Raises ValueError for formats and layouts that folders do not have."""
    name = pipeline.format
    if name.lower() in GROUPS:
        if pipeline.layout not in (None, LAYOUTS[0]):
            raise ValueError(f"the layout {pipeline.layout} has integers, and {name} has none: leave --layout out")
        return SmallFloatsWriter(name.lower())
    check_folder_format(name)
    integers = integers_named(name)
    two_four = pipeline.prunes is not None and str(pipeline.prunes[1]) == "2:4"
    if integers.static and not pipeline.walks:
        raise ValueError(f"{name} measures inputs on texts: choose a --method that reads them (smoothquant, gptq), or w8a8")
    wanted = pipeline.layout or ("2:4" if two_four and integers in SPARSE else LAYOUTS[0])
    if wanted == "2:4":
        if not two_four or integers not in SPARSE:
            raise ValueError(
                "the layout 2:4 holds two of each four weights: give --method magnitude --sparsity 2:4 and --format "
                "int4-g32-sym or int8-g32-sym"
            )
        return TwoFourWriter(SPARSE[integers])
    if wanted == "compressed":
        return CompressedTensorsWriter(integers)
    if integers.activations:
        raise ValueError(f"the layout {wanted} says nothing of activations, which w8a8 rounds: leave it out, or choose int8")
    if wanted == "awq" and integers.bits != 4:
        raise ValueError(f"the layout awq holds 4 bits, and {name} has {integers.bits}: leave it out, or choose int4-g128")
    if wanted == "gptq" and integers.bits not in GPTQ_BITS:
        bits = ", ".join(map(str, GPTQ_BITS))
        raise ValueError(f"the layout gptq holds {bits} bits, and {name} has {integers.bits}: leave it out, or choose int4")
    return AWQWriter(integers) if wanted == "awq" else GPTQWriter(integers)


def grouped(name: str) -> GroupWriter:
    """The compressed-tensors writer for a format, in any case. Raises ValueError as `integers_named` does."""
    return SmallFloatsWriter(name.lower()) if name.lower() in GROUPS else CompressedTensorsWriter(integers_named(name))


def check_mixed(layout: SchemeWriter, option: str) -> None:
    """Raise ValueError if the layout cannot hold several formats, which `option` needs."""
    if not isinstance(layout, CompressedTensorsWriter | SmallFloatsWriter):
        name = next(name for name, kind in NAMED.items() if isinstance(layout, kind))
        raise ValueError(f"the layout {name} holds integers of one format: leave {option} out, or take --layout compressed")


def settings_of_layouts(layouts: Mapping[str, SchemeWriter], whole: Sequence[str], by_name: bool) -> dict[str, Any]:
    """quantization_config of a folder. layouts: by tensor name. whole: modules that are not quantized. by_name: list modules by
    name.
    """
    if not by_name:
        return next(iter(layouts.values())).settings(whole)
    groups: dict[GroupWriter, list[str]] = {}
    for name, layout in layouts.items():
        assert isinstance(layout, CompressedTensorsWriter | SmallFloatsWriter)
        groups.setdefault(layout, []).append(name.removesuffix(".weight"))
    return mixed_settings(groups, whole)


def is_of_folders(name: str) -> bool:
    """True for a format of folders; MXFP4 in capitals is a GGUF kind."""
    if name in MIXES:
        return False
    try:
        grouped(name)
    except ValueError:
        return False
    return True
