"""The choice between direct kernels and panels: measured once for each processor and kept in a file; results do not change."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import core
from headrace.backends.native import tuning
from headrace.backends.native.lowering import FUSIONS
from headrace.backends.native.program import NativeProgram, thread_pool
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.sparse import ZEROS
from tests.tiny_native import Feeder, native_model, native_program

TEXT = [number % 97 for number in range(70)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, of which this process knows nothing."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def measured(monkeypatch: pytest.MonkeyPatch, rows: int, repeated: bool = True) -> list[str]:
    """The types that are measured from now on, each with the result `rows`. Kept files are read again."""
    asked: list[str] = []
    monkeypatch.setattr(tuning, "measure", lambda kind, pool: asked.append(kind) or (rows, repeated))
    tuning._known.cache_clear()
    return asked


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FLOATS and kind not in ZEROS])
def test_every_type_can_be_measured(kind: str) -> None:
    assert tuning.measure(kind, thread_pool(1))[0] in (tuning.FEWEST, *tuning.ROWS, tuning.ALWAYS)


def test_the_measurement_follows_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels are faster from 64 rows on; the control: never, and always."""

    def choice(from_rows: int) -> int:
        def times(layers: Any, x: np.ndarray, pool: Any, repeats: int, path: str) -> list[float]:
            return [1.0 if path == "direct" else 0.9 if len(x) >= from_rows else 1.1]

        monkeypatch.setattr(core.module(), "time_linears", times)
        rows, repeated = tuning.measure("Q8_0", thread_pool(1))
        assert repeated
        return rows

    assert [choice(rows) for rows in (64, 1000, 1)] == [32, tuning.ALWAYS, tuning.FEWEST]


def test_times_disturbed_by_other_work_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels are faster from 64 rows on, but each of their first measurements is disturbed, for a time of its own. Control:
    times that never repeat."""

    def measure(disturbed: int) -> tuple[tuple[int, bool], int]:
        calls: list[float] = []

        def times(layers: Any, x: np.ndarray, pool: Any, repeats: int, path: str) -> list[float]:
            calls.append(0)
            fast = path == "panels" and len(x) >= 64
            return [0.5 if not fast else 0.4 if len(calls) > disturbed * 8 else 1 + 0.1 * len(calls)]

        monkeypatch.setattr(core.module(), "time_linears", times)
        return tuning.measure("Q8_0", thread_pool(1)), len(calls) // 8

    assert measure(5) == ((32, True), 7)
    assert measure(0) == ((32, True), tuning.REPEATS[0])
    monkeypatch.setattr(tuning, "AGREE", -1.0)
    assert measure(0) == ((32, False), tuning.REPEATS[1])


def test_a_choice_whose_times_did_not_repeat_is_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):  # processes
        asked = measured(monkeypatch, 64, repeated=False)
        assert [tuning.direct_rows("Q8_0", None) for _ in range(2)] == [64, 64]
        assert asked == ["Q8_0"]
    assert not (home / tuning.FILE).exists()


def test_a_choice_is_kept_for_this_processor(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measured(monkeypatch, 64)
    assert [tuning.direct_rows(kind, None) for kind in ("Q8_0", "Q4_0", "Q8_0")] == [64] * 3
    assert asked == ["Q8_0", "Q4_0"]
    asked = measured(monkeypatch, 32)
    assert tuning.direct_rows("Q8_0", None) == 64
    assert asked == []
    # Another processor, or another version of Headrace, measures again and leaves the other entry alone.
    monkeypatch.setattr(tuning, "_processor", lambda: "another")
    asked = measured(monkeypatch, 32)
    assert tuning.direct_rows("Q8_0", None) == 32
    kept = json.loads((home / tuning.FILE).read_text())
    isa = core.module().cpu_info()["isa"]
    assert sorted(rows for by_isa in kept.values() for rows in by_isa[isa].items()) == [
        ("Q4_0", 64),
        ("Q8_0", 32),
        ("Q8_0", 64),
    ]


def kept(rows: object) -> bytes:
    """A file with this choice for the processor at hand."""
    return json.dumps({tuning._processor(): {core.module().cpu_info()["isa"]: {"Q8_0": rows}}}).encode()


@pytest.mark.parametrize("content", [b"", b"{", b'{"\xff": 1}', b'{"cpu": 3}', kept("many"), kept(-1), kept(0), kept(1 << 40)])
def test_an_invalid_file_is_replaced(home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    home.mkdir()
    (home / tuning.FILE).write_bytes(content)
    asked = measured(monkeypatch, 64)
    assert tuning.direct_rows("Q8_0", None) == 64
    assert asked == ["Q8_0"]
    assert json.loads((home / tuning.FILE).read_text())
    assert [file.name for file in home.iterdir()] == [tuning.FILE]


def test_a_home_that_cannot_be_written_costs_only_the_measurement(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_text("a file, where a folder should be")
    asked = measured(monkeypatch, 64)
    assert [tuning.direct_rows("Q8_0", None) for _ in range(2)] == [64, 64]
    assert asked == ["Q8_0"]


def test_without_a_home_directory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "find_home", lambda: None)
    asked = measured(monkeypatch, 64)
    assert [tuning.direct_rows("Q8_0", None) for _ in range(2)] == [64, 64]
    assert asked == ["Q8_0"]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_choice_changes_no_bit(home: Path, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the profile shows that other kernels ran."""
    logits, kernels = [], []
    for rows in (1, tuning.ALWAYS):
        measured(monkeypatch, rows)
        (home / tuning.FILE).unlink(missing_ok=True)
        program: NativeProgram = native_program(native_model("llama"), quantize=quantize, fuse=FUSIONS)
        program.core.profiling = True
        logits.append(Feeder(program, [TEXT]).feed((0, 0, len(TEXT)))[0])
        kernels.append({line["kernel"] for line in program.core.profile if line["phase"] in ("qkv", "out", "gate_up", "down")})
    assert np.array_equal(*logits)
    name = {"int8": "Q8_0", "int4": "Q4_0"}[quantize]
    assert kernels == [{f"{name} panels"}, {f"{name} direct"}]
