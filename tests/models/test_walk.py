"""The walk: one layer in memory at a time, stopped and gone on with to the same bytes; what is measured and folded on it."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.compress import texts as own_texts
from headrace.compress.base import Inputs, Matrix, ScaleMapping, Visit
from headrace.compress.calibration_pass import plan_of
from headrace.compress.folding import SmoothQuant
from headrace.compress.judge import judge
from headrace.compress.layer_pass import LayerPass, scale_mappings
from headrace.compress.pipeline import Pipeline
from headrace.compress.report import report_path
from headrace.compress.rounding import Rounding
from headrace.compress.texts import check_apart, draw_texts, passage_hashes
from headrace.compress.work_folder import PLAN, STATE, TEXTS, WorkFolder
from headrace.compress.write import compress, predict, work_path
from headrace.data.params import SamplingParams
from headrace.data.progress import Progress
from headrace.kv.pool import KVPool
from headrace.llm import LLM
from headrace.models.layers import Linear
from headrace.ops.context import FeedRows, build
from headrace.runner.record import record
from headrace.startup.opening import open_files
from headrace.text.tokenizer import Tokenizer
from headrace.weights.atomic_file import file_lock
from headrace.weights.gguf import GGUFFile
from headrace.weights.imatrix import read_imatrix
from headrace.weights.loader import load_model, read_tensor
from headrace.weights.source import WeightError
from tests.killed import killed_at
from tests.places import data_path, model_file
from tests.tiny import tiny_config, tiny_model
from tests.tiny_files import Sizes, write_tiny_gguf

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 32 and 64: whole blocks of every kind with 32 numbers."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", sizes=Sizes(ffn=64))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words in no order: some 5,000 tokens, no 32 of them twice."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("etaoinshrdlu"), rng.integers(1, 9))) for _ in range(1800)]
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(" ".join(words))
    return path


def pipeline(book: Path, **changes: Any) -> Pipeline:
    return Pipeline(**{"method": ("gptq",), "format": "Q4_0", "calibrate": str(book), "tokens": 1024, "threads": 1, **changes})


def texts(count: int = 9, length: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, length).tolist() for _ in range(count)]


def test_rows_and_moments_equal_those_of_the_full_model(model: Path, tmp_path: Path) -> None:
    """Of the eight texts measured, and of the one held out; after the walk no layer is in memory."""
    source, read = GGUFFile(model), texts()
    whole = load_model(source)
    walk = LayerPass(source, read, WorkFolder(tmp_path), {})
    order = [*read[:7], read[8], read[7]]
    seen: dict[str, list[torch.Tensor]] = {}
    for path, holder in whole.holders():
        if isinstance(holder, Linear):
            holder.method = Seen(seen.setdefault(path, []))
    outs = [whole.norm.weight.new_empty(0)] * 0
    for text in order:
        context = build(KVPool(whole.config, 2, 16), [FeedRows(text, [0, 1])])
        x = whole.embed(context)
        for number in range(2):
            x = whole.layer(number, x, context)
        outs.append(x)
    for visit in walk:
        for matrix in visit.matrices.values():
            rows = seen[matrix.path]
            expected, held = torch.cat(rows[:8]), rows[8]
            torch.testing.assert_close(matrix.inputs.hessian, expected.t() @ expected / len(expected), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(matrix.inputs.held, held.t() @ held / len(held), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(matrix.inputs.mean, expected.abs().mean(0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(matrix.inputs.largest, expected.abs().amax(0))
            assert (matrix.inputs.count, matrix.inputs.held_count) == (160, 20)
    found = np.fromfile(WorkFolder(tmp_path).rows(2), np.float32).reshape(-1, 32)
    np.testing.assert_allclose(found, torch.cat(outs).numpy(), rtol=1e-4, atol=1e-4)
    assert all(holder.weight is None for path, holder in walk.model.holders() if path.startswith("layers."))  # type: ignore[attr-defined]


class Seen:
    """A LinearMethod that keeps what it multiplies."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows = rows

    def create(self, layer: Any, n_in: int, n_out: int, allocator: Any) -> None: ...

    def finish(self, layer: Any) -> None: ...

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.rows.append(x)
        return torch.nn.functional.linear(x, layer.weight, bias)


def test_gptq_loses_less_than_rounding_to_nearest(model: Path, book: Path, tmp_path: Path) -> None:
    """In every matrix, on the texts measured; the file runs, and says what was done."""
    out = tmp_path / "out.gguf"
    report = compress(model, out, pipeline(book, tokens=2048))
    assert len(report.outputs) == 2 * 7
    assert all(told.error < 0.95 * told.nearest for told in report.outputs.values())
    assert sum(told.held for told in report.outputs.values()) < sum(told.held_nearest for told in report.outputs.values())
    assert not work_path(out).exists()
    written = GGUFFile(out)
    assert written.metadata["headrace.compress"] == "gptq Q4_0"
    assert {written.info(name).kind for name in written.names() if "blk" in name} == {"Q4_0", "F32"}
    said = json.loads((tmp_path / "out.gguf.report.json").read_text())
    assert said["outputs"]["layers.1.down.weight"] == report.outputs["layers.1.down.weight"].record()
    made = LLM(str(out), backend="torch", max_model_len=64).generate(["the water of"], SamplingParams(max_tokens=4))
    assert len(made[0].outputs[0].token_ids) == 4


def test_reported_errors_equal_those_of_the_written_file(model: Path, book: Path, tmp_path: Path) -> None:
    """The first layer's inputs do not depend on what is rounded: its errors again, from the two files and the texts alone."""
    out = tmp_path / "out.gguf"
    report = compress(model, out, pipeline(book))
    opened = open_files(model)
    read = draw_texts(opened, str(book), 1024, 0, Progress())
    first = next(iter(LayerPass(opened.source, read, WorkFolder(tmp_path / "again"), {})))
    before, after = (read_tensor(GGUFFile(path), "blk.0.ffn_up.weight") for path in (model, out))
    moments = first.matrices["gate_up"].inputs.hessian
    error = float(((after - before) @ moments * (after - before)).sum() / (before @ moments * before).sum())
    told = report.outputs["layers.0.gate_up.up.weight"]
    assert told.error == pytest.approx(error, rel=1e-3)
    blocks = GGUFFile(out).raw("blk.0.ffn_up.weight").reshape(-1, 18)  # Q4_0: a scale d, then codes of -8 d to 7 d
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float64)
    w, squares = before.reshape(-1, 32).double().numpy(), (after - before).reshape(-1, 32).double().numpy() ** 2
    outside = (w < np.minimum(-8 * scale, 7 * scale)) | (w > np.maximum(-8 * scale, 7 * scale))
    said, energy = told.record(), np.square(w).sum()
    assert said["clipping"] == pytest.approx(squares[outside].sum() / energy, rel=1e-5)
    assert said["rounding"] == pytest.approx(squares[~outside].sum() / energy, rel=1e-5)
    assert said["noise"] == pytest.approx(32 * np.square(scale).sum() / 12 / energy, rel=1e-5)
    assert said["sqnr"] == pytest.approx(10 * np.log10(energy / squares.sum()), rel=1e-5)
    assert min(said["clipping"], said["rounding"], said["seconds"], said["damping"]) > 0


CHILD = """
import os, signal, sys
from pathlib import Path
from headrace.compress.write import compress
from headrace.compress.pipeline import Pipeline
model, book, out = sys.argv[1:]
right = os.replace
def replace(old, new):
    if Path(new).name == "layer_0001.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    right(old, new)
os.replace = replace
compress(model, out, Pipeline(method=("awq", "gptq"), format="Q4_0", calibrate=book, tokens=1024, threads=1))
"""


def test_a_run_killed_at_three_points_resumes_to_the_same_bytes(model: Path, book: Path, tmp_path: Path) -> None:
    """One after the other, each going on where the one before was killed: a layer is written, not renamed (by the system's own
    signal); its rows are there, the state is not; the file is written, not renamed."""
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    asked = pipeline(book, method=("awq", "gptq"))
    compress(model, whole, asked)
    done = subprocess.run([sys.executable, "-c", CHILD, model, book, out], capture_output=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    for name in (STATE, "out.gguf"):
        assert WorkFolder(work_path(out)).done == 1
        killed_at(name, 1, lambda: compress(model, out, asked))
        assert not out.exists()
    assert WorkFolder(work_path(out)).done == 2
    compress(model, out, asked)
    assert out.read_bytes() == whole.read_bytes()


def stopped(model: Path, book: Path, out: Path) -> Path:
    """The work of a run that was stopped after its first layer."""
    right = WorkFolder.finish_layer

    def finish(self: WorkFolder, number: int, *rest: Any) -> None:
        if number == 1:
            raise KeyboardInterrupt
        right(self, number, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkFolder, "finish_layer", finish)
        with pytest.raises(KeyboardInterrupt):
            compress(model, out, pipeline(book))
    return work_path(out)


def test_damaged_or_foreign_work_is_a_one_line_error(model: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    work = stopped(model, book, out)
    assert WorkFolder(work).done == 1

    def refused(line: str, **changes: Any) -> None:
        with pytest.raises(WeightError, match=re.escape(line)) as found:
            compress(model, out, pipeline(book, **changes))
        assert "\n" not in str(found.value)
        assert not out.exists()

    refused("out.gguf.work was started with other settings (format: Q4_0 then, Q5_0 now); remove it", format="Q5_0")
    refused("(method: gptq then, awq,gptq now)", method=("awq", "gptq"))
    for name in (STATE, "rows.b", "layer_0000.safetensors"):
        right = (work / name).read_bytes()
        for wrong in (right[:-5], right[:-5] + bytes(byte ^ 1 for byte in right[-5:])):
            (work / name).write_bytes(wrong)
            refused(f"{name} is damaged; remove {work} to begin again")
        (work / name).write_bytes(right)
    right = (work / STATE).read_bytes()
    WorkFolder(work).write(
        STATE, {**json.loads(right), "layers": 2}
    )  # a run that says so before the layer is there, and is killed
    refused("state.json is damaged")
    (work / STATE).write_bytes(right)
    right = (work / TEXTS).read_bytes()
    for wrong in (b"{}", right.replace(b"1", b"2", 1)):
        (work / TEXTS).write_bytes(wrong)
        refused("texts.json is damaged")
    (work / TEXTS).write_bytes(right)
    (work / PLAN).unlink()
    refused("holds no work of compress; remove it, or name another OUT")


def test_resumed_work_equals_the_stopped_work(model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: without its sums a layer that changed on the disk is taken for what it was; and where rows were no files in
    turns, those of the next layer would be taken for those of a layer that is not done."""
    whole = tmp_path / "whole.gguf"
    compress(model, whole, pipeline(book))
    monkeypatch.setattr(WorkFolder, "check", lambda self, name, digest: None)
    out = tmp_path / "out.gguf"
    layer = stopped(model, book, out) / "layer_0000.safetensors"
    right = layer.read_bytes()
    layer.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    compress(model, out, pipeline(book))
    assert out.read_bytes() != whole.read_bytes()
    monkeypatch.setattr(WorkFolder, "rows", lambda self, number: self.folder / "rows.a")
    other = tmp_path / "other.gguf"
    killed_at(STATE, 2, lambda: compress(model, other, pipeline(book)))
    compress(model, other, pipeline(book))
    assert other.read_bytes() != whole.read_bytes()


def test_only_one_command_writes_a_file(model: Path, book: Path, tmp_path: Path) -> None:
    """The second is one line at once, of a file and of a folder; what a command leaves that was killed says nothing."""
    for out, number_format in ((tmp_path / "out.gguf", "Q4_0"), (tmp_path / "out", "int4-g32")):
        asked = pipeline(book, method=("rtn",), format=number_format)
        with (
            file_lock(out),
            pytest.raises(ValueError, match=f"^{re.escape(str(out))} is being written by another command; wait"),
        ):
            compress(model, out, asked)
        (tmp_path / f".{out.name}.lock").touch()
        compress(model, out, asked)
        assert not list(tmp_path.glob(".*"))


def test_work_is_of_one_plan_to_the_byte(model: Path, tmp_path: Path) -> None:
    """Kinds are chosen by the budget and by what the head takes of it: layers that are done have those of the other choice."""
    asked = pipeline(tmp_path, calibrate="self", budget=100_000_000)
    others = [replace(asked, **change) for change in ({"budget": 100_000_001}, {"head": "Q8_0"}, {"layout": "gptq"})]
    plans = [plan_of(open_files(model), one, "Q4_0") for one in (asked, *others)]
    WorkFolder(tmp_path / "work").begin(plans[0])
    for plan, name in zip(plans[1:], ("budget", "head", "layout"), strict=True):
        with pytest.raises(WeightError, match=rf"was started with other settings \({name}: "):
            WorkFolder(tmp_path / "work").begin(plan)
    assert WorkFolder(tmp_path / "work").begin(plans[0]) == 0


def test_stopped_before_its_plan_was_there_it_begins(tmp_path: Path) -> None:
    (tmp_path / f"{PLAN}.part").write_text("{")
    assert WorkFolder(tmp_path).begin({"model": "a"}) == 0
    assert WorkFolder(tmp_path).read(PLAN) == {"model": "a"}


@pytest.mark.parametrize(("name", "number_format"), [("out.gguf", "Q4_0"), ("out", "int4-g32")])
def test_a_run_stopped_during_evaluation_resumes(
    name: str, number_format: str, model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT is there then, and whole: the same command judges it, any other refuses to replace it. A report is of that OUT."""
    out, other = tmp_path / name, tmp_path / "other.txt"
    other.write_text(" ".join(reversed(book.read_text().split()[:500])))
    asked = pipeline(book, format=number_format, judge=str(other), tokens=256)

    def written() -> bytes:
        return (out if out.is_file() else out / "model.safetensors").read_bytes()

    def stop(*rest: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("headrace.compress.write.judge", stop)
        with pytest.raises(KeyboardInterrupt):
            compress(model, out, asked)
    before = written()
    with pytest.raises(ValueError, match="exists; give another name"):
        compress(model, out, replace(asked, method=("rtn",), calibrate=None))
    with pytest.raises(WeightError, match=r"\(act-order: True then, False now\)"):
        compress(model, out, replace(asked, act_order=False))
    assert compress(model, out, asked).judged is not None
    assert written() == before
    assert not work_path(out).exists()
    assert report_path(out).is_file()
    with pytest.raises(ValueError, match="exists; give another name"):
        compress(model, out, asked)
    if out.is_file():
        compress(model, out, Pipeline(format="Q4_0"), overwrite=True)
        assert not report_path(out).exists()


def test_predicted_memory_includes_the_generating_model(model: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_files(model)
    assert own_texts.writing_bytes(opened, 256) > sum(opened.source.info(name).nbytes for name in opened.source.names()) / 2
    monkeypatch.setattr("headrace.compress.calibration_pass.writing_bytes", lambda *_: 1 << 33)
    for changes in ({"calibrate": "self"}, {"judge": "self"}, {"calibrate": "self", "method": ("rtn",), "kv": "int8"}):
        assert predict(model, pipeline(book, **changes)).largest > 1 << 33
    assert predict(model, pipeline(book)).largest < 1 << 33


def test_a_long_file_is_encoded_piece_by_piece(
    model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer makes a hundred bytes and more of each: a piece is in memory at a time, and ends with a line if it can."""
    opened, long, encoded = open_files(model), tmp_path / "long.txt", Tokenizer.encode
    words = book.read_text().split()
    long.write_text(" ".join(words[:400]) + "".join(f"\n{' '.join(words[at : at + 9])}" for at in range(400, 1000, 9)))
    whole = draw_texts(opened, str(long), 10**6, 3, Progress(), 64)
    pieces: list[str] = []

    def spied(self: Tokenizer, text: str, **more: Any) -> list[int]:
        pieces.append(text)
        return encoded(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", spied)
    monkeypatch.setattr(own_texts, "PIECE", 500)
    assert draw_texts(opened, str(long), 10**6, 3, Progress(), 64) != []
    assert "".join(pieces) == long.read_text()
    assert max(map(len, pieces)) <= 1000
    assert sum(piece.endswith("\n") for piece in pieces) > 3
    monkeypatch.setattr(own_texts, "PIECE", 10**6)
    assert draw_texts(opened, str(long), 10**6, 3, Progress(), 64) == whole
    long.write_bytes(b"a" * (3 << 20))
    assert predict(model, pipeline(long)).largest > 140 * 2 << 20 > predict(model, pipeline(book)).largest


def test_a_full_disk_loses_nothing_that_was_done(
    model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    compress(model, whole, pipeline(book))
    right = os.replace

    def full(old: Path, new: Path) -> None:
        if Path(new).name == "layer_0001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        right(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(WeightError, match=r"the disk is full; what is done is kept: make room"):
            compress(model, out, pipeline(book))
    assert WorkFolder(work_path(out)).done == 1
    assert not list(work_path(out).glob("*.part"))
    compress(model, out, pipeline(book))
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"method": ("gptq", "awq")}, "gptq,awq cannot be: awq scales what is neither scaled nor rounded yet"),
        ({"method": ("rtn", "gptq")}, "rtn,gptq cannot be: what is rounded is not rounded again"),
        ({"method": ("obq",)}, "unknown method 'obq'; known are rtn, weighted, gptq, awq, smoothquant"),
        ({"imatrix": Path("i.dat")}, "--imatrix is for rtn alone"),
        ({"calibrate": "short"}, "short.txt has 3 tokens and a text needs 256"),
        ({"judge": "book"}, "passages of 32 tokens that were measured on"),
        ({"write_imatrix": "model"}, "tiny.gguf would replace that file; give another name"),
        ({"write_imatrix": "out"}, "out.gguf would replace that file; give another name"),
    ],
)
def test_invalid_options_are_a_one_line_error(
    changes: dict[str, Any], line: str, model: Path, book: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("abc")
    names = {"short": str(tmp_path / "short.txt"), "book": str(book), "model": model, "out": tmp_path / "out.gguf"}
    changes = {key: names.get(value, value) if isinstance(value, str) else value for key, value in changes.items()}
    with pytest.raises(ValueError, match=re.escape(line)) as found:
        compress(model, tmp_path / "out.gguf", pipeline(book, **changes))
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out.gguf").exists()


def test_texts_to_judge_by_were_not_measured_on() -> None:
    """Thirty-two tokens in a row, wherever they stand; thirty-one may be chance."""
    read = texts(4, 64)
    check_apart(passage_hashes(read), texts(4, 31))
    check_apart(passage_hashes(read), [[7, *read[2][32:63], 7]])
    with pytest.raises(ValueError, match="1 passages of 32 tokens that were measured on"):
        check_apart(passage_hashes(read), [[7, 7, *read[2][32:64], 7]])
    with pytest.raises(ValueError, match="1 passages of 32 tokens that a.gguf was measured on"):
        check_apart(passage_hashes(read), [read[2][32:64]], "a.gguf")


def test_few_texts_are_warned_of(model: Path, book: Path, tmp_path: Path) -> None:
    report = compress(model, tmp_path / "out.gguf", pipeline(book, tokens=100))
    assert "256 tokens are few" not in " ".join(report.warnings)  # a whole text, more than two for each input
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.compress.write.WINDOW", 100)
        patch.setattr("headrace.compress.calibration_pass.WINDOW", 100)
        few = compress(model, tmp_path / "few.gguf", pipeline(book, tokens=100))
    assert few.warnings[0].startswith("100 tokens are few to measure 64 inputs on")
    assert all(told.held is None for told in few.outputs.values())


def test_a_text_of_the_model_is_drawn_from_it(model: Path) -> None:
    opened = open_files(model)
    first, again, other = (draw_texts(opened, "self", 600, seed, Progress(), 200, 1) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert [len(text) for text in first] == [200, 200, 200]


class Layer:
    """A layer of a tiny model in float64, ready to be folded and run."""

    def __init__(self, architecture: str) -> None:
        self.model = tiny_model(tiny_config(architecture))
        self.block = self.model.layers[0]
        rng = torch.Generator().manual_seed(5)
        holders = dict(self.block.holders())
        for holder in holders.values():
            if getattr(holder, "bias", None) is not None:
                holder.bias.copy_(torch.randn(holder.bias.shape, generator=rng, dtype=torch.float64))
        matrices = {}
        for name, holder in holders.items():
            if isinstance(holder, Linear):
                parts = dict(zip([part for part, _ in holder.parts], holder.weight.split(holder.sizes), strict=True))
                matrices[name] = Matrix(f"layers.0.{name}", holder, parts, {}, self.empty(holder.n_in))
        found = scale_mappings(record(self.model, embeds=False).layers[0], holders)
        self.visit = Visit(0, self.model.config.layers[0], holders, matrices, found)

    @staticmethod
    def empty(k: int) -> Inputs:
        made = Inputs.empty(k)
        return Inputs(*(one.double() for one in (made.hessian, made.held, made.mean, made.largest)))

    def run(self) -> torch.Tensor:
        x = torch.randn(12, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        context = build(KVPool(self.model.config, 1, 16, torch.float64), [FeedRows(list(range(12)), [0])])
        return self.model.layer(0, x, context)

    def measure(self) -> None:
        for name, matrix in self.visit.matrices.items():
            rows: list[torch.Tensor] = []
            holder = self.visit.holders[name]
            holder.method = Seen(rows)
            self.run()
            holder.method, matrix.inputs = None, self.empty(holder.n_in)
            matrix.inputs.add(rows[0], False)
            matrix.inputs.finish()

    def factors(self, edge: ScaleMapping) -> torch.Tensor:
        k = self.visit.matrices[edge.consumers[0]].linear.n_in
        if edge.rule == "value":
            k = self.visit.layer.kv_heads * self.visit.layer.head_dim
        return torch.rand(k, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 3 + 0.2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_fold_leaves_the_model_unchanged(architecture: str) -> None:
    """In float64, over every edge of the layer; and the inputs of the folded model are those scaled."""
    layer = Layer(architecture)
    rules = [edge.rule for edge in layer.visit.edges]
    assert sorted(rules) == (["norm", "norm", "value"] if architecture == "gpt2" else ["gate", "norm", "norm", "value"])
    layer.measure()
    before = layer.run()
    for edge in layer.visit.edges:
        layer.visit.fold(edge, layer.factors(edge))
        torch.testing.assert_close(layer.run(), before, rtol=1e-12, atol=1e-12)
    scaled = {name: matrix.inputs for name, matrix in layer.visit.matrices.items()}
    layer.measure()
    for name, matrix in layer.visit.matrices.items():
        for field in ("hessian", "mean", "largest"):
            torch.testing.assert_close(getattr(matrix.inputs, field), getattr(scaled[name], field), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["norm", "gate", "value"])
def test_a_one_sided_fold_changes_the_model(rule: str) -> None:
    """The controls: what is divided is not multiplied; scales of values that differ between the queries of a head."""
    layer = Layer("llama")
    before = layer.run()
    edge = next(edge for edge in layer.visit.edges if edge.rule == rule)
    s = layer.factors(edge)
    for name in edge.consumers:
        if rule == "value":
            layer.visit.matrices[name].linear.weight *= torch.rand(32, dtype=torch.float64) + 0.5
            layer.visit.fold(edge, s)
        else:
            layer.visit.matrices[name].linear.weight *= s
    assert (layer.run() - before).abs().max() > 1e-3


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_w40_part_of_the_range_moves_and_products_stay(alpha: float) -> None:
    """The activations' range is theirs and the weights' theirs; SmoothQuant moves part of one into the other."""
    for place in range(4):
        layer = Layer("llama")
        layer.measure()
        before, edge = layer.run(), layer.visit.edges[place]
        layer.visit.edges = (edge,)
        SmoothQuant(alpha).visit(layer.visit)
        torch.testing.assert_close(layer.run(), before, rtol=1e-9, atol=1e-9)
        matrices = [layer.visit.matrices[name] for name in edge.consumers]
        columns = torch.stack([one.linear.weight.abs().amax(0) for one in matrices]).amax(0)
        x, w = (layer.visit.shared(edge, one).amax(1) for one in (matrices[0].inputs.largest, columns))
        reached = {0.0: w, 1.0: x}.get(alpha, x / w)
        torch.testing.assert_close(reached, torch.ones_like(reached))


def test_large_inputs_are_scaled_down_where_that_pays(book: Path, tmp_path: Path) -> None:
    """Two channels forty times as large as the others: awq loses less than rounding to nearest with the same importance, which
    is what is left of awq without its scales; and the model is the same."""

    def planted(tensors: dict[str, np.ndarray]) -> None:
        for layer in range(2):
            tensors[f"blk.{layer}.ffn_norm.weight"][[3, 17]] *= 40
            for name in ("gate", "up"):
                tensors[f"blk.{layer}.ffn_{name}.weight"][:, [3, 17]] /= 40

    source = write_tiny_gguf(tmp_path / "tiny.gguf", edit=planted)
    report = compress(source, tmp_path / "awq.gguf", pipeline(book, method=("awq",)))
    plain = compress(source, tmp_path / "weighted.gguf", pipeline(book, method=("weighted",)))
    names = [name for name in report.outputs if "gate_up" in name]
    assert sum(report.outputs[name].error for name in names) < 0.8 * sum(plain.outputs[name].error for name in names)
    judged = [[*range(1, 200)], [*range(100, 299)]]
    lost = [judge(GGUFFile(source), GGUFFile(tmp_path / f"{name}.gguf"), judged, "") for name in ("awq", "weighted")]
    assert lost[0].kl < lost[1].kl


def test_weighted_rounding_is_rtn_with_the_importance_of_its_texts(model: Path, book: Path, tmp_path: Path) -> None:
    """Typed as a method it gives the bytes of rtn on a walk, and others than rtn, whose scales know nothing of inputs."""
    made = {}
    for name, more in (("weighted", {}), ("rtn", {}), ("walk", {"method": ("rtn",), "write_imatrix": tmp_path / "i.gguf"})):
        out = tmp_path / f"{name}.gguf"
        texts = {} if name == "rtn" else {"calibrate": str(book), "tokens": 1024}
        compress(model, out, Pipeline(method=tuple(more.pop("method", (name,))), format="Q4_0", threads=1, **texts, **more))
        made[name] = read_tensor(GGUFFile(out), "blk.0.ffn_down.weight")
    assert torch.equal(made["weighted"], made["walk"])
    assert not torch.equal(made["weighted"], made["rtn"])


def test_importance_that_was_measured_is_written_and_read(model: Path, book: Path, tmp_path: Path) -> None:
    """The mean squares of the inputs of the unchanged model; used by rtn they give what the walk gave."""
    path, kinds = tmp_path / "i.gguf", {"tokens": 1024}
    compress(model, tmp_path / "one.gguf", pipeline(book, method=("rtn",), write_imatrix=path, **kinds))
    found = read_imatrix(path)
    assert sorted(found) == sorted(
        name for name in GGUFFile(model).names() if re.match(r"blk.*(attn_[qkvo]|ffn_[gud]).*", name) and "norm" not in name
    )
    opened = open_files(model)
    read = draw_texts(opened, str(book), 1024, 0, Progress())
    first = next(iter(LayerPass(opened.source, read, WorkFolder(tmp_path / "again"), {})))
    np.testing.assert_allclose(found["blk.0.attn_k.weight"], first.matrices["qkv"].inputs.hessian.diagonal().numpy(), rtol=1e-6)
    compress(model, tmp_path / "two.gguf", Pipeline(format="Q4_0", imatrix=path))
    one, two = (read_tensor(GGUFFile(tmp_path / f"{name}.gguf"), "blk.0.attn_k.weight") for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_w39_calibration_stores_no_activation_scales(model: Path, book: Path, tmp_path: Path) -> None:
    """What is written are weights: the same tensors and keys as before, with no number measured on texts beside them."""
    compress(model, tmp_path / "out.gguf", pipeline(book, method=("smoothquant", "gptq")))
    before, after = GGUFFile(model), GGUFFile(tmp_path / "out.gguf")
    assert after.names() == before.names()
    new = set(after.metadata) - set(before.metadata)
    assert new == {"general.quantization_version", "general.file_type", "headrace.compress"}


def test_a_byte_budget_is_respected_and_mixes_kinds(model: Path, book: Path, tmp_path: Path) -> None:
    least = predict(model, pipeline(book)).bytes
    budget = int(sum(one.nbytes for one in predict(model, pipeline(book)).matrices.values()) * 1.05)
    report = compress(model, tmp_path / "out.gguf", pipeline(book, method=("gptq",), budget=budget))
    assert sum(one.nbytes for one in report.matrices.values()) <= budget
    assert report.bytes > least
    assert len({one.kind for name, one in report.matrices.items() if "blk" in name and "norm" not in name}) > 1
    kinds = {GGUFFile(tmp_path / "out.gguf").info(name).kind for name in report.matrices}
    assert kinds == set(report.kinds)
    killed_at(STATE, 3, lambda: compress(model, tmp_path / "again.gguf", pipeline(book, method=("gptq",), budget=budget)))
    compress(model, tmp_path / "again.gguf", pipeline(book, method=("gptq",), budget=budget))  # both walks of it
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "out.gguf").read_bytes()
    with pytest.raises(ValueError, match="bytes are too few: with the fewest bits all tensors take"):
        compress(model, tmp_path / "no.gguf", pipeline(book, budget=1000))


def test_a_model_compared_with_itself_loses_nothing(model: Path, book: Path, tmp_path: Path) -> None:
    read = texts(4, 40)
    same = judge(GGUFFile(model), GGUFFile(model), read, "self")
    assert (same.kl, same.same_choice, same.tokens) == (0, 1, 80)
    assert same.perplexity == same.perplexity_before
    report = compress(model, tmp_path / "out.gguf", pipeline(book, format="Q4_1", judge="self", keep_work=True))
    assert report.judged is not None
    assert report.judged.kl > 0
    assert sum(map(len, own_texts.load_texts(WorkFolder(work_path(tmp_path / "out.gguf")), TEXTS))) == 1024
    whole = load_model(GGUFFile(model))
    context = build(KVPool(whole.config, 3, 16), [FeedRows(read[0], [0, 1, 2])])
    rows = whole(context)[19:39].double().log_softmax(-1)
    loss = -rows.gather(1, torch.tensor(read[0][20:])[:, None]).mean()
    file_lock = judge(GGUFFile(model), GGUFFile(model), read[:1], "self")
    assert file_lock.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)


MEASURED = """
import sys, torch
from headrace.compress.rounding import Rounding
from headrace.compress.write import compress, predict
from headrace.compress.pipeline import Pipeline
torch.set_num_threads(1)
pipeline = Pipeline(method=("gptq",), format="Q4_0", calibrate=sys.argv[2], tokens=1024, threads=1)
said = predict(sys.argv[1], pipeline).largest
def told(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
before = told("VmRSS:")
compress(sys.argv[1], sys.argv[3], pipeline)
print(said, told("VmHWM:") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_predicted_memory_equals_peak_memory(book: Path, tmp_path: Path) -> None:
    """A matrix of 3,072 inputs: its moments and what is made of them are nearly all of it."""
    wide = write_tiny_gguf(tmp_path / "wide.gguf", sizes=Sizes(ffn=3072))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, wide, book, tmp_path / "out.gguf"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"},  # what is given back is given back at once
    )
    assert done.returncode == 0, done.stderr
    said, taken = map(int, done.stdout.split())
    assert 0.7 * said < taken < 1.1 * said


@pytest.mark.weights
def test_every_matrix_of_two_layers_of_a_real_model_loses_less(tmp_path: Path) -> None:
    """SmolLM2 in 4 bits and groups of 32, of the tokens that are taken by default; a share of rows may lose more."""
    opened = open_files(model_file("SmolLM2-135M-Instruct.Q4_1.gguf"))
    read = draw_texts(opened, str(data_path("wikitext2/valid.txt")), 6144, 0, Progress())
    kinds = {
        f"layers.{layer}.{name}.weight": "Q4_0"
        for layer in range(2)
        for name in ("qkv.q", "qkv.k", "qkv.v", "out", "gate_up.gate", "gate_up.up", "down")
    }
    rounding, seen = Rounding(gptq=True), 0
    for visit in LayerPass(opened.source, read, WorkFolder(tmp_path), kinds):
        rounding.visit(visit)
        assert all(told.error < 0.8 * told.nearest for told in visit.outputs.values())
        assert all(told.held < 0.9 * told.held_nearest for told in visit.outputs.values())
        seen += len(visit.outputs)
        if visit.number == 1:
            break
    assert seen == 14
