"""Static W8A8: int8 inputs with the scales that a folder has, on both back ends; SmoothQuant where a few inputs are large."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from headrace import core
from headrace.backends.eager.rounded import round_inputs
from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.models.layers import Embedding, Linear
from headrace.startup.opening import open_files
from headrace.weights.describe import describe
from headrace.weights.loader import input_scales, load_model, weight_kinds
from headrace.weights.parts import plan
from headrace.weights.source import WeightError
from tests.models.feeding import feed
from tests.models.gates import program_of
from tests.models.test_compress import write_folder
from tests.native_reference import Faked, bfloat16_attention, rounded
from tests.tiny_files import write_tiny_gguf
from tests.tiny_native import Feeder

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(3, 256, 60).tolist() for _ in range(6)]
JUDGED = [RNG.integers(3, 256, 40).tolist() for _ in range(3)]


class Largest:
    """A LinearMethod that keeps the largest size of what it multiplies."""

    def __init__(self) -> None:
        self.found = 0.0

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.found = max(self.found, float(x.abs().max()))
        return linear(x, layer.weight, bias)


def with_scales(folder: Path, texts: list[list[int]]) -> Path:
    """The folder with the scales that cover all inputs of some texts."""
    source = open_files(folder).source
    model = load_model(source)
    watched = {path: Largest() for path, holder in model.holders() if isinstance(holder, Linear)}
    for path, holder in model.holders():
        if path in watched:
            holder.method = watched[path]  # type: ignore[attr-defined]
    feed(model, texts, "whole")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for path, parts in plan(model, source).items():
        for part in parts:
            name = part.source.removesuffix(".weight")
            if f"{name}.weight_scale" in tensors:
                tensors[f"{name}.input_scale"] = torch.tensor([watched[path.removesuffix(".weight")].found / 127])
    source.close()
    save_file(tensors, file)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("static")
    compress(write_folder(at / "whole", "llama-gqa"), at / "w8a8", Pipeline(format="w8a8", threads=1))
    return with_scales(at / "w8a8", TEXTS)


def scales_of(folder: Path) -> dict[str, float]:
    source = open_files(folder).source
    return input_scales(load_model(source), source)


def changed(folder: Path, to: Path, times: Callable[[str], float]) -> Path:
    """A copy with some scales so many times as large; 0: without them."""
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    scales = {name: x * times(name) for name, x in tensors.items() if name.endswith(".input_scale")}
    save_file({name: x for name, x in {**tensors, **scales}.items() if name not in scales or x.any()}, to / "model.safetensors")
    return to


def rounded_model(folder: Path, activations: str) -> Model:
    source = open_files(folder).source
    model = load_model(source)
    integers = {path: tuple(kind == "C8" for kind in kinds) for path, kinds in weight_kinds(model, source).items()}
    round_inputs(model, integers, activations, input_scales(model, source))
    return model


class Static:
    """LinearMethod: what the core multiplies, its input rounded with a scale that is given, or (0) with a row's own."""

    def __init__(self, scale: float) -> None:
        self.scale = float(np.float32(scale))

    def apply(self, layer: Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scale = self.scale or x.abs().amax(-1, keepdim=True) / 127
        return linear((x / scale).clamp(-127, 127).round() * scale, layer.weight, bias)


def distance(folder: Path, patch: pytest.MonkeyPatch, times: float = 1.0) -> float:
    """The median over rows of the largest difference of a logit of the core and of a model in float64 with `times` the scales,
    relative to the row's spread."""
    source = open_files(folder).source
    model, scales = load_model(source, torch.float64), scales_of(folder)
    kinds = weight_kinds(model, source)
    for path, holder in model.holders():
        if set(kinds.get(path, ())) == {"C8"}:
            holder.method = Static(scales.get(path, 0.0) * times)  # type: ignore[attr-defined]
        elif isinstance(holder, Embedding | Linear):
            holder.weight, holder.method = rounded(holder.weight), Faked("bf16")
    (ours,) = Feeder(program_of(source, activations="tensor"), [JUDGED[0]]).whole()
    with bfloat16_attention(patch):
        (wanted,) = feed(model, [JUDGED[0]], "whole", torch.float64)
    return float(np.median((np.abs(ours - wanted.numpy()) / wanted.numpy().std(-1, keepdims=True)).max(-1)))


@pytest.mark.skipif(not core.available(), reason=core.reason())
def test_the_core_rounds_by_the_folders_scales(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition in float64; each text as alone. The control: scales a little larger."""
    assert distance(folder, monkeypatch) < 1e-5
    assert distance(folder, monkeypatch, 1.1) > 1e-3
    some = changed(folder, tmp_path / "some", lambda name: 0.0 if "mlp" in name else 1.0)
    assert {path.rpartition(".")[2] for path in scales_of(some)} == {"qkv", "out"}
    assert distance(some, monkeypatch) < 1e-5, "layers without a scale: by token"
    larger = changed(folder, tmp_path / "larger", lambda name: 1.5 if "k_proj" in name else 1.0)
    for path, scale in scales_of(larger).items():
        assert scale / scales_of(folder)[path] == pytest.approx(1.5 if "qkv" in path else 1.0), "the largest of q, k and v"
    source = open_files(folder).source
    whole = Feeder(program_of(source, activations="tensor"), JUDGED).whole()
    for number, text in enumerate(JUDGED):
        (alone,) = Feeder(program_of(source, activations="tensor"), [text]).whole()
        assert np.array_equal(alone.view(np.uint32), whole[number].view(np.uint32))


@pytest.mark.parametrize("backend", ["torch", *(["native"] if core.available() else [])])
def test_an_engine_takes_them(backend: str, folder: Path) -> None:
    """What is drawn has the probability that the rounded model gives it, and not the one that inputs by token give."""
    text, found = TEXTS[0][:20], []
    for activations in ("tensor", "token"):
        if backend == "torch":
            (row,) = feed(rounded_model(folder, activations), [text], "whole")
        else:
            (row,) = map(
                torch.from_numpy, Feeder(program_of(open_files(folder).source, activations=activations), [text]).whole()
            )
        found.append(float(row[-1].log_softmax(-1).max()))
    dtype = "auto" if backend == "native" else "float32"
    llm = LLM(str(folder), backend=backend, dtype=dtype, activations="tensor", max_model_len=64)
    output = llm.generate([text], GREEDY)[0].outputs[0]
    assert output.logprobs is not None
    assert output.logprobs[0].logprob == pytest.approx(found[0], abs=1e-4)
    assert abs(found[1] - found[0]) > 1e-3


def test_smoothquant_pays_where_a_few_inputs_are_large(tmp_path: Path) -> None:
    """Two channels sixty times as large as the others take most of a static scale; part of that range moves over."""

    def planted(tensors: dict[str, np.ndarray]) -> None:
        for layer in range(2):
            for norm, names in (("ffn_norm", ("ffn_gate", "ffn_up")), ("attn_norm", ("attn_q", "attn_k", "attn_v"))):
                tensors[f"blk.{layer}.{norm}.weight"][[3, 17]] *= 60
                for name in names:
                    tensors[f"blk.{layer}.{name}.weight"][:, [3, 17]] /= 60

    source, book = write_tiny_gguf(tmp_path / "tiny.gguf", edit=planted), tmp_path / "book.txt"
    words = ["".join(RNG.choice(list("etaoinshrdlu"), RNG.integers(1, 9))) for _ in range(1200)]
    book.write_text(" ".join(words))
    whole = [made.numpy() for made in feed(load_model(open_files(source).source), JUDGED, "whole")]
    lost, reads = {}, {"calibrate": str(book), "tokens": 1024}
    for method in ("rtn", "smoothquant"):
        out = tmp_path / method
        if method == "rtn":
            compress(source, out, Pipeline(format="w8a8", threads=1))
        else:
            compress(source, out, Pipeline(format="w8a8-static", method=(method,), threads=1, **reads))
            written = scales_of(out)
        with_scales(out, TEXTS)
        made = [one.numpy() for one in feed(rounded_model(out, "tensor"), JUDGED, "whole")]
        lost[method] = float(np.mean([np.square(one - other).mean() for one, other in zip(made, whole, strict=True)]))
    assert lost["smoothquant"] <= 0.1 * lost["rtn"]
    measured = scales_of(tmp_path / "smoothquant")
    assert written.keys() == measured.keys()
    assert all(0.4 < written[path] / measured[path] < 2.5 for path in measured), "by other texts: near"
    assert describe(tmp_path / "smoothquant")["quantised"] == "compressed-tensors, 8 bits, a scale a row, one scale of inputs"


def test_invalid_scales_are_a_one_line_error(folder: Path, tmp_path: Path) -> None:
    """Scales that are none, and folders without any; one with a zero point, or of float8, is no scale of int8."""
    plain = tmp_path / "plain"
    compress(write_folder(tmp_path / "whole", "llama-gqa"), plain, Pipeline(format="w8a8", threads=1))
    with pytest.raises(ValueError, match="takes the scales of inputs that a folder .*plain has none: choose token"):
        LLM(str(plain), activations="tensor")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".input_scale"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**tensors, name: torch.tensor([0.0])}, other / "model.safetensors")
    with pytest.raises(WeightError, match="has an input_scale of 0.0; the file is damaged"):
        open_files(other)
    shifted = {name.replace("input_scale", "input_zero_point"): torch.tensor([3], dtype=torch.int8)}
    save_file({**tensors, **shifted}, other / "model.safetensors")
    source = open_files(other).source
    known = set(scales_of(folder))
    assert 0 < len(known - set(input_scales(load_model(source), source))) < len(known)
