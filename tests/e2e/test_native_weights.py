"""Weights that become packed layers: memory estimates, and gate and up projections that are stored in several ways."""

import tempfile
from typing import Any

import numpy as np
import pytest
import torch

from headrace import core
from headrace.backends.memory import check_weights_fit
from headrace.backends.native.program import NativeProgram
from headrace.backends.native.weights import packed_bytes, total_packed_bytes
from headrace.models.base import Model
from headrace.models.layers import Norm
from headrace.models.registry import describe
from headrace.weights.source import TensorInfo
from tests.models.zoo import MemorySource
from tests.native_blocks import random_rows
from tests.tiny import tiny_config
from tests.tiny_native import Feeder, native_model, source_of

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

TEXT = np.random.default_rng(3).integers(0, 97, (1, 21)).tolist()
SIZES: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "max_positions": 64, "threads": 1}


class Stored(MemorySource):
    """Some tensors as a file would hold them: kind, rows, and whether they lie in a mapped file."""

    def __init__(self, model: Model) -> None:
        super().__init__("safetensors", source_of(model).tensors, {})
        self.stored: dict[str, tuple[str, np.ndarray, bool]] = {}

    def store(self, end: str, kind: str, mapped: bool = False) -> None:
        for name in (name for name in self.tensors if name.endswith(end)):
            n, k = self.tensors[name].shape
            if kind == "F16":
                half = self.tensors[name].half()
                self.stored[name] = (kind, half.numpy().view(np.uint8), mapped)
            else:
                self.stored[name] = (kind, random_rows(kind, n, k, scales=np.array([0.001, 0.002])), mapped)

    def info(self, name: str) -> TensorInfo:
        if name not in self.stored:
            return super().info(name)
        kind, rows, _ = self.stored[name]
        return TensorInfo(name, tuple(self.tensors[name].shape), kind, rows.nbytes)

    def raw(self, name: str) -> np.ndarray:
        return self.stored[name][1] if name in self.stored else super().raw(name)

    def mapped(self, name: str) -> bool:
        return name in self.stored and self.stored[name][2]


def gated(program: NativeProgram) -> bool:
    """Whether gate and up were multiplied as one stream."""
    program.core.profiling = True
    Feeder(program, TEXT).whole()
    return "act_mul" not in {line["phase"] for line in program.core.profile}


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize(("gate", "up"), [("F16", "Q8_0"), ("Q8_0", "F16")])
def test_a_gate_and_an_up_of_other_classes_load_unfused(gate: str, up: str, quantize: str) -> None:
    model = native_model("llama", ffn=64)
    source = Stored(model)
    source.store("gate_proj.weight", gate)
    source.store("up_proj.weight", up)
    program = NativeProgram(model, source, quantize=quantize, **SIZES)
    assert not gated(program)
    assert np.isfinite(Feeder(program, TEXT).whole()[0]).all()


def test_a_gate_and_an_up_of_one_class_are_one_stream() -> None:
    """The control: floats with floats, integers with integers of another kind."""
    model = native_model("llama", ffn=64)
    for gate, up, quantize in (("F16", "F16", "int8"), ("Q8_0", "Q4_0", "int8"), ("Q8_0", "Q4_0", "")):
        source = Stored(model)
        source.store("gate_proj.weight", gate)
        source.store("up_proj.weight", up)
        assert gated(NativeProgram(model, source, quantize=quantize or "", **SIZES))


@pytest.mark.parametrize("mapped", ["gate", "up"])
def test_one_of_both_in_a_mapped_file(mapped: str) -> None:
    """The pages of the other are not let go: they are memory of this process."""
    model = native_model("llama", ffn=64)
    source = Stored(model)
    for name in ("gate", "up"):
        source.store(f"{name}_proj.weight", "Q8_0", mapped=name == mapped)
    before = {name: rows.copy() for name, (_, rows, _) in source.stored.items()}
    source.stored = {
        name: (kind, _in_a_file(rows) if on_disk else rows, on_disk) for name, (kind, rows, on_disk) in source.stored.items()
    }
    program = NativeProgram(model, source, **SIZES)
    assert not gated(program)
    assert all(np.array_equal(rows, before[name]) for name, (_, rows, _) in source.stored.items())


def _in_a_file(rows: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        file.write(rows.tobytes())
        file.flush()
        return np.memmap(file, np.uint8, "r", shape=rows.shape)


# -- the estimate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["", "int8", "int4"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_estimate_equals_the_packed_bytes(architecture: str, quantize: str, tied: bool) -> None:
    """To the byte, but for norms, which lie elsewhere."""
    model = native_model(architecture, tied_head=tied)
    source = source_of(model)
    norms = sum(
        -(-spec.elements // 16) * 64
        for _, holder in model.holders()
        if isinstance(holder, Norm)
        for spec in holder.params().values()
    )
    packed = NativeProgram(model, source, quantize=quantize, **SIZES).weights.bytes
    assert packed_bytes(model, source, quantize) - norms == packed


def test_a_layer_as_wide_as_the_vocabulary_is_not_packed_as_a_head() -> None:
    """It becomes int4, and is estimated so; a head would become int8."""
    model = native_model("gpt2", ffn=97)
    assert model.config.vocab_size == 97
    estimate = packed_bytes(model, source_of(model), "int4")
    norms = sum(-(-spec.elements // 16) * 64 for _, h in model.holders() if isinstance(h, Norm) for spec in h.params().values())
    assert estimate - norms == NativeProgram(model, source_of(model), quantize="int4", **SIZES).weights.bytes
    both = [(model, source_of(model), quantize) for quantize in ("", "int4")]
    assert total_packed_bytes(both) == (sum(packed_bytes(*one) for one in both), "weights in fewer bits (quantize='int8')")
    assert total_packed_bytes(both[1:]) == (estimate, "")  # nothing that they could become


def test_padding_counts() -> None:
    """A file of 260 MB whose table packs to 8 GiB is refused where 8 GB are free, before anything is packed."""
    tiny = {"hidden_size": 2, "num_layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 2, "ffn": 2}
    source = Stored(native_model("llama", **tiny))
    table = next(name for name in source.tensors if "embed_tokens" in name)
    source.tensors[table] = torch.empty((1, 1)).expand(2**26, 2)  # no memory
    source.stored[table] = ("F16", np.broadcast_to(np.zeros(1, np.uint8), (2**26, 4)), True)
    assert source.info(table).nbytes == 2**28
    need = packed_bytes(describe(tiny_config("llama", vocab_size=2**26, **tiny)), source)
    with pytest.raises(ValueError, match=r"needs 8\.00 GiB for its weights"):
        check_weights_fit(need, 8 * 10**9, "it")
