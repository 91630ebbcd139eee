"""The comparison with other engines: turns, medians, ratios with their intervals, worker processes, what is left out."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import comparison, engines
from benchmarks.peers.engines import ENGINES, WORKERS, PeerEngine, PeerError
from headrace.bench import interleave
from headrace.bench.competitors import SERVE
from headrace.bench.interleave import CELLS, Cell, MachineState, Variant, judge, measure
from headrace.bench.machine import BandwidthProbe, commit, machine, others_share
from headrace.bench.worker import EngineProcess
from headrace.host import cores
from headrace.stats.paired_ratio import ratio
from tests.tiny_files import write_tiny_gguf

FAKE = Path(__file__).with_name("fake_engine.py")
TASK = {"model": "a.gguf", "threads": 2, "kv_bytes": 1e6}
CELL = Cell("b2", 2, 5, 4)


# -- cells -------------------------------------------------------------------------------------------------------------
def test_the_cells_equal_the_planned_cells() -> None:
    assert list(CELLS) == "pp512 pp2048 b1 b2 b4 b8 b16 b32 b1_4k".split()
    assert all(cell.new_tokens >= 32 for name, cell in CELLS.items() if name.startswith("b"))
    assert [CELLS[name].new_tokens for name in ("pp512", "pp2048")] == [0, 0]
    assert [cell.prompt for cell in CELLS.values()] == [512, 2048, *[128] * 6, 4000]
    assert [cell.batch for cell in CELLS.values()] == [1, 1, 1, 2, 4, 8, 16, 32, 1]


def test_prompts_are_random_equal_for_a_seed_and_never_repeated() -> None:
    assert CELL.prompts(100, 1) == CELL.prompts(100, 1)
    made = [tuple(prompt) for seed in range(20) for prompt in CELL.prompts(100, seed)]
    assert len(set(made)) == len(made) == 40
    assert {len(prompt) for prompt in made} == {5}
    assert {token for prompt in made for token in prompt} <= set(range(100))
    assert CELL.prompts(100, 1) != Cell("b2x", 2, 5, 4).prompts(100, 1)


def test_cells_and_engines_are_picked_by_name() -> None:
    assert interleave.pick("") == list(CELLS.values())
    assert interleave.pick(" b4, pp512,b4") == [CELLS["b4"], CELLS["pp512"]]
    with pytest.raises(ValueError, match="no cell 'b3'; choose from pp512"):
        interleave.pick("b1,b3")
    assert [engine.name for engine in engines.pick("ort,llama.cpp,ort")] == ["ort", "llama.cpp"]
    with pytest.raises(PeerError, match="no engine 'mlx'; choose from llama.cpp"):
        engines.pick("mlx")


# -- ratios ------------------------------------------------------------------------------------------------------------
def test_a_ratio_is_the_median_over_pairs_and_not_of_medians() -> None:
    ours, theirs = [10.0, 20.0, 30.0], [10.0, 5.0, 10.0]
    assert ratio(ours, theirs).median == 3.0 != median(ours) / median(theirs)
    with pytest.raises(ValueError, match="argument 2"):
        ratio(ours, theirs[:2])


@pytest.mark.parametrize(
    ("count", "left_out", "confidence"),
    [(1, 0, 0.0), (2, 0, 0.5), (5, 0, 0.9375), (6, 0, 0.96875), (9, 1, 0.9609375), (15, 3, 0.96484375)],
)
def test_the_interval_has_the_ranks_of_the_tables(count: int, left_out: int, confidence: float) -> None:
    """Ranks and confidence of the sign test's interval for a median, as tables of order statistics have them."""
    found = ratio([float(i) for i in range(1, count + 1)], [1.0] * count)
    assert (found.low, found.high) == (1 + left_out, count - left_out)
    assert found.confidence == confidence


@pytest.mark.parametrize("count", [5, 9, 15])
def test_the_interval_covers_the_median_at_its_confidence(count: int) -> None:
    rng = np.random.default_rng(count)
    draws = rng.lognormal(mean=math.log(1.3), sigma=0.4, size=(4000, count))  # skewed, with the median 1.3
    found = [ratio(row, [1.0] * count) for row in draws.tolist()]
    held = sum(one.low <= 1.3 <= one.high for one in found) / len(found)
    spread = 4 * math.sqrt(0.05 * 0.95 / len(found))
    assert abs(held - found[0].confidence) < spread
    assert sum(one.low <= 1.5 <= one.high for one in found) / len(found) < held - spread  # and no other value


# -- turns -------------------------------------------------------------------------------------------------------------
class Scripted:
    """A worker that answers from a list, and writes down who was asked what."""

    def __init__(self, name: str, speeds: list[float], asked: list[tuple[str, Any]], first: int = 1) -> None:
        self.name, self.speeds, self.asked, self.first = name, iter(speeds), asked, first

    def ask(self, **question: Any) -> dict[str, Any]:
        self.asked.append((self.name, question))
        first = [self.first] * len(question["prompts"])
        return {"tokens_per_s": next(self.speeds), "first": first, "others_cpu": 0.25}


def variants(asked: list[tuple[str, Any]]) -> list[Variant]:
    return [
        Variant("headrace", "", Scripted("ours", [1, 30, 20, 10], asked)),
        Variant("a", "one", Scripted("a1", [99, 10, 10, 10], asked)),
        Variant("a", "two", Scripted("a2", [99, 5, 12, 20], asked, first=2)),
        Variant("b", "only", Scripted("b", [99, 8, 8, 8], asked)),
    ]


def test_rounds_alternate_and_every_variant_gets_the_same_prompts() -> None:
    asked: list[tuple[str, Any]] = []
    probes = iter([40.0, 50.0, 60.0, 70.0])
    state = measure(variants(asked), CELL, 3, 100, lambda: next(probes))
    names = [name for name, _ in asked]
    there, back = ["ours", "a1", "a2", "b"], ["b", "a2", "a1", "ours"]
    assert names == back + there + back + there
    prompts = [question["prompts"] for _, question in asked]
    for number in range(4):
        assert all(prompts[4 * number + i] == prompts[4 * number] for i in range(4))
    assert len({str(one) for one in prompts}) == 4
    assert all((question["cell"], question["new_tokens"]) == ("b2", 4) for _, question in asked)
    assert state == MachineState([40.0, 50.0, 60.0, 70.0], [0.25] * 12)


def test_the_warm_up_round_is_excluded_and_the_best_setting_counts() -> None:
    ours, *others = made = variants([])
    state = measure(made, CELL, 3, 100, lambda: 50.0)
    figures = judge(ours, others, CELL, state)
    assert figures["tokens_per_s"] == 20
    assert figures["samples"] == [30, 20, 10]
    assert set(figures["peers"]) == {"a", "b"}
    assert figures["peers"]["a"]["settings"] == {"one": 10, "two": 12}
    assert figures["peers"]["a"]["setting"] == "two"
    assert figures["peers"]["a"]["samples"] == [5, 12, 20]
    assert figures["best_peer"] == "a"
    assert figures["ratio"] == pytest.approx(20 / 12)  # of 6, 1.67 and 0.5
    assert figures["interval"] == [0.5, 6.0]
    assert figures["confidence"] == 0.75
    assert figures["peers"]["b"]["ratio"] == 2.5
    assert (figures["peers"]["a"]["same_first_token"], figures["peers"]["b"]["same_first_token"]) == (0.0, 1.0)
    assert (figures["bandwidth_gb_s"], figures["others_cpu"]) == (50.0, 0.25)


def test_without_another_engine_there_is_no_ratio() -> None:
    ours = variants([])[0]
    figures = judge(ours, [], CELL, measure([ours], CELL, 3, 100, lambda: 50.0))
    assert figures["peers"] == {}
    assert "ratio" not in figures


# -- programs that a person has built -----------------------------------------------------------------------------------
TABLE = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     32 |    4 |    640 |    0.512 |  1000.00 |    0.640 |   200.00 |    1.152 |   555.56 |
llama_print_timings: load time = 1.0 ms
"""
JSON = '{"n_kv_max": 1024, "pp": 128, "tg": 32, "pl": 4, "t_pp": 0.512, "speed_pp": 1000.0, "t_tg": 0.64, "speed_tg": 200.0}'


def program(folder: Path, prints: str, status: int = 0) -> Path:
    """A llama-batched-bench that measures nothing: it says what it was asked for, and what `prints` has."""
    file = folder / "llama-batched-bench"
    (folder / "prints").write_text(prints)
    file.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\necho "version: 4 (abc)" >&2\ncat {folder}/prints\nexit {status}\n'
    )
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("prints", [TABLE, JSON])
def test_a_custom_program_is_an_engine(tmp_path: Path, prints: str) -> None:
    engine, *none = engines.built([f"ik={program(tmp_path, prints)} -fa -rtr 1"])
    assert (engine.name, none, list(engine.settings)) == ("ik", [], ["-fa -rtr 1"])
    worker = EngineProcess(engine.command, tmp_path / "log")
    try:
        about = worker.ask(**TASK, setting=engine.settings["-fa -rtr 1"])
        decode = worker.ask(cell="b4", prompts=[[1] * 128] * 4, new_tokens=32)
        prefill = worker.ask(cell="pp", prompts=[[1] * 128] * 4, new_tokens=0)
    finally:
        worker.close()
    assert about["about"] == "llama-batched-bench 4 (abc)"
    assert (decode["tokens_per_s"], decode["prefill_s"], decode["first"]) == (4 * 32 / 0.64, 0.512, [])
    assert prefill["tokens_per_s"] == 4 * 128 / 0.512
    asked = (tmp_path / "asked").read_text().splitlines()[-2:]
    assert asked[0].startswith("-fa -rtr 1 -m a.gguf -c 1024 -b 2048 -t 2 -npp 128 -ntg 32 -npl 4")
    assert "-ntg 1 " in asked[1]


def test_a_failed_program_is_reported(tmp_path: Path) -> None:
    engine = engines.built([f"own={program(tmp_path, 'no such model', 1)}"])[0]
    worker = EngineProcess(engine.command, tmp_path / "log")
    try:
        worker.ask(**TASK, setting=engine.settings["its defaults"])
        with pytest.raises(ValueError, match="llama-batched-bench failed: version: 4"):
            worker.ask(cell="b4", prompts=[[1]], new_tokens=1)
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("ik", "'ik' is not NAME=COMMAND"),
        ("=sh", "is not NAME=COMMAND"),
        ("ort=sh", "with a name of its own"),
        ("ik=/no/such/program", "/no/such/program is no program"),
    ],
)
def test_an_invalid_program_is_refused(given: str, says: str) -> None:
    with pytest.raises(PeerError, match=says):
        engines.built([given])


def test_settings_of_one_program_are_one_engine() -> None:
    made = engines.built(["ik=sh -fa", "ik=sh -fa -rtr 1", "mine=sh"])
    assert [(engine.name, list(engine.settings)) for engine in made] == [
        ("ik", ["-fa", "-fa -rtr 1"]),
        ("mine", ["its defaults"]),
    ]


def test_an_engine_with_its_own_prompts_is_not_compared_by_tokens() -> None:
    ours, theirs, _, _ = made = variants([])
    state = measure(made, CELL, 3, 100, lambda: 50.0)
    theirs.first[CELL.name] = []
    assert judge(ours, [theirs], CELL, state)["peers"]["a"]["same_first_token"] is None


# -- worker processes --------------------------------------------------------------------------------------------------
@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts workers, and ends them."""
    made = []

    def start() -> EngineProcess:
        command = [sys.executable, "-S", "-P", str(SERVE), str(FAKE)]
        made.append(EngineProcess(command, tmp_path / f"{len(made)}.log"))
        return made[-1]

    yield start
    for worker in made:
        worker.close()


def states(worker: EngineProcess) -> set[str]:
    """The states of its threads: T is stopped by a signal."""
    tasks = Path(f"/proc/{worker.pid}/task").glob("*/stat")
    return {path.read_text().rpartition(")")[2].split()[0] for path in tasks}


def test_a_worker_measures_prefill_and_decode(started: Any) -> None:
    worker = started()
    assert worker.ask(**TASK, setting={"seconds": 0.5})["about"] == "fake of a.gguf, 2 threads"
    prompts = [[1, 2, 3], [4, 5, 6]]
    decode = worker.ask(cell="b2", prompts=prompts, new_tokens=10)
    assert (decode["tokens_per_s"], decode["seconds"], decode["tokens"]) == (20.0, 1.0, 20)
    prefill = worker.ask(cell="pp3", prompts=prompts, new_tokens=0)
    assert (prefill["tokens_per_s"], prefill["seconds"], prefill["tokens"]) == (12.0, 0.5, 6)
    assert prefill["first"] == [6, 1]
    assert 0 <= prefill["others_cpu"] <= 1
    assert prefill["peak_rss_mb"] > 1


def test_the_cpu_share_of_others_is_at_most_one() -> None:
    assert others_share(0.5 * cores(), 1.0) == 0.5
    assert others_share(0.02 * cores(), 0.001) == 1  # a tick that ended just now
    assert others_share(-0.01, 0.5) == 0  # a tick of ours that was counted late


def test_a_worker_is_stopped_between_requests(started: Any) -> None:
    """Its own thread spins for ever, and uses no time while it is not asked."""
    worker = started()
    worker.ask(**TASK, setting={"seconds": 0.5, "spin": True})
    deadline = time.monotonic() + 600
    while states(worker) != {"T"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    used = worker.cpu_seconds
    time.sleep(0.3)
    assert worker.cpu_seconds == used
    assert worker.ask(cell="b1", prompts=[[1]], new_tokens=1)["tokens"] == 1


def test_errors_of_a_worker_are_one_line(started: Any) -> None:
    refusing, dying, failing = started(), started(), started()
    with pytest.raises(ValueError, match="^ValueError: this file has a type I do not know$"):
        refusing.ask(**TASK, setting={"load": "refuse"})
    with pytest.raises(ValueError, match=r"^the process ended: nothing in its log \(exit status 3; "):
        dying.ask(**TASK, setting={"load": "die"})
    failing.ask(**TASK, setting={"run": "fail"})
    with pytest.raises(ValueError, match="RuntimeError: no memory left"):
        failing.ask(cell="b1", prompts=[[1]], new_tokens=1)


def test_a_closed_worker_has_ended(started: Any) -> None:
    worker = started()
    worker.ask(**TASK, setting={"seconds": 1, "spin": True})
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


# -- the whole comparison ----------------------------------------------------------------------------------------------
def fake_engine(settings: dict[str, dict[str, Any]], name: str = "fake") -> PeerEngine:
    """An installed engine whose worker is the fake one, run by this Python."""
    engine = PeerEngine(name, str(FAKE), ("fake==1",), settings)
    engine.python.parent.mkdir(parents=True)
    engine.python.symlink_to(sys.executable)
    (engine.folder / "requirements.txt").write_text("fake==1\n")
    return engine


@pytest.fixture
def peers_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    return tmp_path


def test_a_comparison_from_the_file_to_the_figures(peers_home: Path) -> None:
    """Ours on a real (tiny) model, an engine with two settings, one that cannot load the file: said and listed."""
    model = write_tiny_gguf(peers_home / "tiny.gguf")
    good = fake_engine({"slow": {"seconds": 1.0}, "fast": {"seconds": 0.5}}, "good")
    bad = fake_engine({"only": {"load": "refuse"}}, "bad")
    said: list[str] = []
    after: list[list[str]] = []
    wanted = [CELL, Cell("pp9", 1, 9, 0), Cell("long", 1, 500, 4)]
    result = comparison.compare(
        str(model), [good, bad], wanted, rounds=2, threads=1, say=said.append, done=lambda r: after.append(list(r["cells"]))
    )
    assert list(result["cells"]) == ["b2", "pp9"]
    assert after == [["b2"], ["b2", "pp9"]]
    assert result["left_out"] == {"bad (only)": "ValueError: this file has a type I do not know"}
    assert list(result["engines"]) == ["headrace", "good (slow)", "good (fast)"]
    assert [line for line in said if "left out" in line] == [
        "long is left out: the model knows 256 positions",
        "bad (only) is left out: ValueError: this file has a type I do not know",
    ]
    decode, prefill = result["cells"].values()
    assert decode["peers"]["good"]["settings"] == {"slow": 4.0, "fast": 8.0}
    assert prefill["peers"]["good"]["settings"] == {"slow": 9.0, "fast": 18.0}
    for figures in (decode, prefill):
        assert figures["tokens_per_s"] == median(figures["samples"]) > 0
        assert figures["best_peer"] == "good"
        assert figures["interval"][0] <= figures["ratio"] <= figures["interval"][1]
        assert figures["bandwidth_gb_s"] > 0
    assert (result["threads"], result["rounds"]) == (1, 2)
    json.dumps(result)


def test_a_failure_in_the_middle_ends_every_worker(peers_home: Path) -> None:
    model = write_tiny_gguf(peers_home / "tiny.gguf")
    failing = fake_engine({"only": {"run": "fail"}})
    with pytest.raises(ValueError, match="no memory left"):
        comparison.compare(str(model), [failing], [CELL], rounds=1, threads=1)
    assert not [line for line in _commands() if str(FAKE) in line and str(peers_home) in line]


def _commands() -> list[str]:
    """Command lines of the processes that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_a_comparison_needs_a_gguf_file_and_a_cell_that_fits(peers_home: Path) -> None:
    model = write_tiny_gguf(peers_home / "tiny.gguf")
    with pytest.raises(ValueError, match="no cell fits the 256 positions"):
        comparison.compare(str(model), [], [CELLS["pp512"]])


# -- engines -----------------------------------------------------------------------------------------------------------
def test_an_engine_is_installed_when_its_pinned_versions_are(peers_home: Path) -> None:
    engine = fake_engine({})
    assert engine.installed
    engines.make_ready([engine], install=False, say=pytest.fail)
    newer = PeerEngine(engine.name, engine.worker, ("fake==2",), {})
    assert not newer.installed
    with pytest.raises(PeerError, match=f"fake is not installed under {peers_home}.*--install"):
        engines.make_ready([newer], install=False, say=print)


def test_installing_runs_pip_of_its_own_environment(peers_home: Path) -> None:
    """A stand-in for its Python writes down what it is asked; a pip that fails leaves nothing that counts as installed."""
    engine = PeerEngine("one", str(FAKE), ("a==1", "b==2"), {}, build={"CMAKE_ARGS": "-DX=1"}, without=("c",))
    engine.python.parent.mkdir(parents=True)
    engine.python.write_text(f'#!/bin/sh\necho "$CMAKE_ARGS $@" >> {peers_home}/asked\ntest ! -e {peers_home}/broken\n')
    engine.python.chmod(0o755)
    (peers_home / "broken").touch()
    said: list[str] = []
    with pytest.raises(PeerError, match="one cannot be installed here"):
        engines.make_ready([engine], install=True, say=said.append)
    assert not engine.installed
    (peers_home / "broken").unlink()
    (peers_home / "asked").unlink()
    engines.make_ready([engine], install=True, say=said.append)
    assert engine.installed
    asked = (peers_home / "asked").read_text().splitlines()
    assert asked[0] == "-DX=1 -m pip install --quiet --prefer-binary a==1 b==2"
    assert asked[1].endswith("-m pip uninstall --quiet --yes c")
    assert said[0] == f"installing one into {engine.folder}: a==1 b==2"


def test_every_version_is_pinned_and_no_address_is_named() -> None:
    for engine in ENGINES.values():
        assert all("==" in one for one in engine.requirements)
        assert (WORKERS / engine.worker).is_file()
        assert engine.settings
    files = (*WORKERS.parent.glob("*.py"), *WORKERS.glob("*.py"))
    text = "".join(path.read_text() for path in files)
    assert "://" not in text.replace("http://127.0.0.1:", ""), "an address other than this machine's"


def test_workers_need_nothing_beyond_the_standard_library_to_start() -> None:
    """`serve.py` runs in environments that Headrace knows nothing of."""
    names = {line.split()[1] for line in SERVE.read_text().splitlines() if line.startswith(("import", "from"))}
    assert names <= sys.stdlib_module_names


# -- the machine -------------------------------------------------------------------------------------------------------
def test_the_bandwidth_probe_reads_every_byte() -> None:
    """The byte it searches for is nowhere, so the search ends at the end."""
    probe = BandwidthProbe(threads=2, size=4 << 20)
    assert 0 < probe.gb_per_s(passes=3) < 10_000
    assert probe.found(1)
    assert not probe.found(0)


def test_the_machine_is_named() -> None:
    found = machine()
    assert found["cpu"]
    assert int(found["cores"]) >= 1
    assert commit() == "" or len(commit().rstrip("+")) == 12
