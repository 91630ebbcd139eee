"""Models that were cut, as files: each is the model that was masked, runs on both back ends, and is made in steps from which a
stopped run goes on."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.compress import cutting
from headrace.compress.base import Compressor
from headrace.compress.cutting import Neurons
from headrace.compress.kv_heads import KVHeads
from headrace.compress.layer_pass import LayerPass
from headrace.compress.pipeline import Pipeline
from headrace.compress.report import Report
from headrace.compress.structure import Cut, pruned_config
from headrace.compress.texts import draw_texts
from headrace.compress.work_folder import WorkFolder
from headrace.compress.write import compress, predict, work_path
from headrace.data.params import SamplingParams
from headrace.data.progress import Progress
from headrace.kv.pool import KVPool
from headrace.llm import LLM
from headrace.models.registry import read_config
from headrace.ops.context import FeedRows, build
from headrace.startup.opening import open_files
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from headrace.weights.source import WeightSource
from tests.models.gates import generate, program_of
from tests.models.llama2c import read_checkpoint
from tests.models.test_compress import write_folder
from tests.models.test_cut_layers import step_of
from tests.models.test_walk import book, model, pipeline
from tests.places import data_path
from tests.tiny_files import write_tiny_gguf

__all__ = ["book", "model"]  # fixtures


def cut_file(source: Path, book: Path, out: Path, *method: str, **more: Any) -> Report:
    return compress(source, out, pipeline(book, method=method, **({"format": "F32"} | more)), None, True)


def hidden(source: WeightSource, texts: list[list[int]], folder: Path, step: Compressor | None = None) -> np.ndarray:
    """Rows after the last layer, of a model that a method changes on the way."""
    work = WorkFolder(folder)
    walk = LayerPass(source, texts, work, {})
    for visit in walk:
        if step is not None:
            step.visit(visit)
    return np.fromfile(work.rows(walk.model.config.num_layers), np.float32)


@pytest.mark.parametrize(
    ("changes", "cut"),
    [
        ({"method": "neurons", "keep_neurons": 0.5}, Cut("neurons", 0.5)),
        ({"method": "heads", "keep_heads": 0.5}, Cut("heads", 0.5)),
        ({"method": "kv-heads", "kv_heads": 1}, Cut("kv-heads", 1, "aligned")),
    ],
)
def test_a_file_that_was_cut_is_the_masked_model(
    changes: dict[str, Any], cut: Cut, model: Path, book: Path, tmp_path: Path
) -> None:
    """Through all layers; repair lowers the error on texts held out; the file runs on both back ends."""
    out = tmp_path / "out.gguf"
    method = changes.pop("method")
    report = cut_file(model, book, out, method, **changes, tokens=2048)
    written = GGUFFile(out)
    config = read_config(written)
    assert config == pruned_config(read_config(GGUFFile(model)), cut)
    assert report.bytes == out.stat().st_size == predict(model, pipeline(book, method=(method,), format="F32", **changes)).bytes
    (told,) = report.cuts
    assert told.method == method
    held, repaired = told.mean("held"), told.mean("held_repaired")
    assert held is not None
    assert repaired is not None
    assert repaired < held
    read = draw_texts(open_files(model), str(book), 2048, 0, Progress())
    masked = hidden(GGUFFile(model), read, tmp_path / "masked", step_of(cut, config))
    np.testing.assert_allclose(hidden(written, read, tmp_path / "cut"), masked, rtol=1e-4, atol=1e-4)
    assert not work_path(out).exists()
    for backend in ("torch", "native"):
        made = LLM(str(out), backend=backend, max_model_len=64).generate(["the water of"], SamplingParams(max_tokens=3))
        assert len(made[0].outputs[0].token_ids) == 3


def test_layers_that_move_rows_least_are_dropped(book: Path, tmp_path: Path) -> None:
    """A planted one goes; the others are the same bytes, in their order, and the model is that without it."""

    def planted(tensors: dict[str, np.ndarray]) -> None:
        for name in ("attn_output", "ffn_down"):
            tensors[f"blk.1.{name}.weight"] *= 1e-3

    plain = write_tiny_gguf(tmp_path / "plain.gguf", layers=4, edit=planted)
    compress(plain, tmp_path / "tiny.gguf", Pipeline(format="Q8_0"))
    source, out = GGUFFile(tmp_path / "tiny.gguf"), tmp_path / "out.gguf"
    report = cut_file(tmp_path / "tiny.gguf", book, out, "layers", drop_layers=1, format="Q8_0")
    assert report.cuts[0].dropped == [1]
    assert (report.cuts[0].before, report.cuts[0].after) == (4, 3)
    written = GGUFFile(out)
    assert written.metadata["llama.block_count"] == 3
    for name in written.names():
        before = re.sub(r"blk\.([12])", lambda found: f"blk.{int(found[1]) + 1}", name)
        assert written.raw(name).tobytes() == source.raw(before).tobytes()
    whole, cut = load_model(source), load_model(written)
    ids = list(range(40))
    rows = []
    for one, layers in ((whole, (0, 2, 3)), (cut, (0, 1, 2))):
        context = build(KVPool(one.config, 3, 16), [FeedRows(ids, [0, 1, 2])])
        x = one.embed(context)
        for number in layers:
            x = one.layer(number, x, context)
        rows.append(one.head(x))
    assert torch.equal(*rows)


ALL: dict[str, Any] = {"keep_neurons": 0.5, "drop_layers": 1, "kv_heads": 1}


def test_cuts_run_in_order_and_resume(model: Path, book: Path, tmp_path: Path) -> None:
    """Each measures what the one before left. Stopped within the second cut, and before its file has its name, the same command
    goes on to the same bytes."""
    method = ("neurons", "kv-heads", "layers", "gptq")
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    report = cut_file(model, book, whole, *method, **ALL, format="Q4_0")
    done = [(cut.method, cut.before, cut.after) for cut in report.cuts]
    assert done == [("neurons", 64, 32), ("kv-heads", 2, 1), ("layers", 2, 1)]
    assert len(report.outputs) == 7
    assert all(told.error < told.nearest for told in report.outputs.values())
    written = GGUFFile(whole)
    assert written.info("blk.0.ffn_down.weight").shape == (32, 32)
    assert written.info("blk.0.attn_k.weight").shape == (8, 32)
    assert "blk.1.attn_k.weight" not in written.names()
    assert written.metadata["headrace.compress"] == "neurons,kv-heads,layers,gptq Q4_0"
    right = os.replace
    for name in ("layer_0001.safetensors", "1-kv-heads.gguf", "state.json"):
        seen: list[str] = []

        def stop(old: Any, new: Any, name: str = name, seen: list[str] = seen) -> None:
            seen.append(Path(new).name)
            if seen[-1] == name and seen.count(name) == 1:
                raise KeyboardInterrupt
            right(old, new)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", stop)
            with pytest.raises(KeyboardInterrupt):
                cut_file(model, book, out, *method, **ALL, format="Q4_0")
    cut_file(model, book, out, *method, **ALL, format="Q4_0")
    assert out.read_bytes() == whole.read_bytes()


def test_a_folder_is_cut(book: Path, tmp_path: Path) -> None:
    """Biases and a tied head (qwen2); thirds of one tensor, a plain MLP (gpt2)."""
    for name, method, changes in (
        ("qwen2-tied", ("neurons", "kv-heads"), {"keep_neurons": 0.6, "kv_heads": 1}),
        ("gpt2", ("heads", "neurons", "layers"), {"keep_heads": 0.5, "keep_neurons": 0.5, "drop_layers": 1}),
    ):
        folder = write_folder(tmp_path / name, name)
        out = tmp_path / f"{name}.gguf"
        report = cut_file(folder, book, out, *method, **changes, tokens=512)
        config = read_config(GGUFFile(out))
        layer = config.layers[0]
        sizes = {"neurons": layer.ffn, "layers": config.num_layers, "heads": layer.kv_heads, "kv-heads": layer.kv_heads}
        assert [cut.after for cut in report.cuts] == [sizes[one] for one in method]
        load_model(GGUFFile(out))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"method": ("gptq", "neurons"), "keep_neurons": 0.5}, "gptq,neurons cannot be: neurons makes matrices smaller before"),
        ({"method": ("heads", "heads"), "keep_heads": 0.5}, "heads,heads cannot be: heads is there twice"),
        ({"method": ("neurons", "gptq", "awq"), "keep_neurons": 0.5}, "awq scales what is neither scaled nor rounded yet"),
        ({"method": ("neurons",)}, "neurons needs --keep-neurons, as in 0.75"),
        ({"kv_heads": 1}, "--kv-heads needs the method kv-heads: --method kv-heads"),
        ({"method": ("neurons",), "keep_neurons": 1.5}, "--keep-neurons is the share that stays, above 0 and below 1, not 1.5"),
        ({"method": ("neurons",), "keep_neurons": 0.9}, "0.9 of 64 neurons, in whole 32s, are all of them; keep fewer"),
        ({"method": ("heads",), "keep_heads": 0.9}, "0.9 of this model's 2 are all of them"),
        (
            {"method": ("kv-heads",), "kv_heads": 3},
            "this model has 2 K/V heads, and 3 is not a proper divisor of that: choose 1",
        ),
        ({"method": ("kv-heads",), "kv_heads": 1, "pool": "sum"}, "--pool is aligned, mean, first"),
        ({"method": ("layers",), "drop_layers": 2}, "this model has 2 layers; drop fewer than 2"),
        ({"method": ("layers",), "drop_layers": 1, "imatrix": Path("i.dat")}, "--imatrix is for rtn alone"),
    ],
)
def test_an_invalid_cut_is_a_one_line_error(
    changes: dict[str, Any], line: str, model: Path, book: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as found:
        compress(model, tmp_path / "out.gguf", pipeline(book, **changes))
    assert "\n" not in str(found.value)
    assert list(tmp_path.iterdir()) == []


def test_measured_cuts_preserve_more_of_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows after the last layer: aligned heads beside their mean and the first; neurons beside some drawn by chance."""
    source = read_checkpoint(data_path("stories260K") / "stories260K.bin")
    program = program_of(source, threads=1)
    read = [[1, first, *generate(program, [1, first], 80)] for first in range(260, 276)]
    plain, config = hidden(source, read, tmp_path / "plain"), read_config(source)

    def lost(name: str, step: Compressor) -> float:
        return float(np.square(hidden(source, read, tmp_path / name, step) - plain).sum() / np.square(plain).sum())

    one = pruned_config(config, Cut("kv-heads", 1)).layers
    aligned, mean, first = (lost(pool, KVHeads(one, pool)) for pool in ("aligned", "mean", "first"))
    assert aligned < 0.85 * first
    assert aligned < 0.7 * mean
    fewer = pruned_config(config, Cut("neurons", 0.75)).layers
    scored = lost("scored", Neurons(fewer))
    rng = torch.Generator().manual_seed(0)
    monkeypatch.setattr(cutting, "top_indices", lambda scores, n: torch.randperm(len(scores), generator=rng)[:n].sort().values)
    assert scored < 0.85 * lost("drawn", Neurons(fewer))
