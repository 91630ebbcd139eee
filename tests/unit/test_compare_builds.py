"""Two builds beside each other: who is asked when, what is called slower, and which environments are refused."""

import json
import shutil
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.bench import compare_builds as module
from headrace.bench.compare_builds import FLOOR, PAIRS, check, compare_builds, verdict
from headrace.bench.competitors import Build, Competitors
from headrace.bench.interleave import Cell, Variant
from headrace.bench.machine import BandwidthProbe
from tests.tiny_files import write_tiny_gguf

CELLS = [Cell("b1", 1, 5, 4), Cell("pp9", 1, 9, 0)]
SOURCE = Path(headrace.__file__).parents[1]
BUILDS = {"headrace": {"file": headrace.__file__}, "other": {"file": "/other/headrace/__init__.py"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def environment(folder: Path, *paths: object) -> Path:
    """A virtual environment that finds what lies in the paths."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "all.pth").write_text("".join(f"{path}\n" for path in paths))
    return folder


def installed() -> list[str]:
    return [path for path in sys.path if "site-packages" in path]


# -- turns and statistics, of workers that answer from a list --------------------------------------------------------------
class Scripted:
    """Says that it is so fast, times what the round was like; writes down when it was asked."""

    def __init__(self, name: str, speeds: Sequence[float], asked: list[tuple[str, str, Any]]) -> None:
        self.name, self.asked = name, asked
        self.speeds: Iterator[float] = iter(speeds)

    def ask(self, cell: str, prompts: Any, new_tokens: int) -> dict[str, Any]:
        self.asked.append((self.name, cell, prompts))
        return {"tokens_per_s": next(self.speeds), "first": [0], "others_cpu": 0.0}


@pytest.fixture
def paired(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str) -> Any:
    """`paired(ours, theirs)`: the comparison of two such workers, and who was asked what, in order."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()

    class Probe:
        def gb_per_s(self) -> float:
            return 20.0

    def run(ours: list[float], theirs: list[float], pairs: int = PAIRS) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
        asked: list[tuple[str, str, Any]] = []

        def load_competitors(stack: ExitStack, path: Path, engines: list[Build], *more: object) -> Competitors:
            assert [engine.python for engine in engines] == [tmp_path / "bin" / "python"]
            made = [Variant(name, "", Scripted(name, each, asked)) for name, each in (("headrace", ours), ("other", theirs))]
            return Competitors(made, {name: {"about": name, "build": build} for name, build in BUILDS.items()})

        monkeypatch.setattr(module, "load_competitors", load_competitors)
        monkeypatch.setattr(module, "BandwidthProbe", Probe)
        return compare_builds(model, tmp_path, CELLS, pairs=pairs), asked

    return run


def test_the_builds_alternate_on_the_same_prompts(paired: Any) -> None:
    _, asked = paired([1.0] * 22, [1.0] * 22)
    pairs = [asked[i : i + 2] for i in range(0, len(asked), 2)]
    assert len(pairs) == 2 * (1 + PAIRS + 1)  # each cell has a round to warm up, and an even number of measured ones
    assert [pair[0][0] for pair in pairs] == 2 * ["other", *["headrace", "other"] * 5]  # every second round goes the other way
    assert all(one[0] != other[0] and one[1:] == other[1:] for one, other in pairs)
    assert len({str(pair[0][2]) for pair in pairs}) == len(pairs)


def test_figures_are_medians_and_the_interval_is_the_ratios(paired: Any) -> None:
    """A machine that slows down from round to round moves both, and no ratio."""
    weather = [100.0, *(90.0 - 5 * number for number in range(10))]
    theirs = weather * 2
    result, _ = paired([1.1 * speed for speed in weather] + [0.5 * speed for speed in weather], theirs)
    decode, prefill = result["cells"].values()
    assert (decode["tokens_per_s"], decode["peers"]["other"]["tokens_per_s"]) == (pytest.approx(74.25), 67.5)
    assert [decode["ratio"], *decode["interval"]] == pytest.approx([1.1] * 3)
    assert [prefill["ratio"], *prefill["interval"]] == pytest.approx([0.5] * 3)
    assert decode["confidence"] > 0.95
    assert decode["bandwidth_gb_s"] == 20.0
    assert result["verdict"] == {"geometric_mean": pytest.approx((1.1 * 0.5) ** 0.5), "below": ["pp9"], "not_slower": False}
    json.dumps(result)


def test_one_outlier_at_each_end_is_left_out_of_an_interval(paired: Any) -> None:
    ours = [1.0, 0.1, 9.0, *[1.0] * 8]
    result, _ = paired(ours * 2, [1.0] * 22)
    assert result["cells"]["b1"]["interval"] == [1.0, 1.0]
    assert result["verdict"]["not_slower"]


def test_the_place_in_a_round_favours_no_build(paired: Any) -> None:
    """Next to another process the first build of a round may be faster, whichever it is."""
    ahead, behind = [1.0, *[1.29, 1.0] * 5], [1.0, *[1.0, 1.29] * 5]
    result, _ = paired(ahead * 2, behind * 2)
    assert [cell["ratio"] for cell in result["cells"].values()] == pytest.approx([1.0, 1.0])


def test_too_few_pairs_are_refused(paired: Any) -> None:
    with pytest.raises(ValueError, match="8 pairs of a cell say too little; measure 9 or more"):
        paired([1.0] * 20, [1.0] * 20, pairs=8)


@pytest.mark.parametrize(
    ("cells", "below", "not_slower"),
    [
        ([(1.0, 0.98, 1.02), (0.985, 0.95, 1.0)], [], True),
        ([(1.2, 1.1, 1.3), (0.98, 0.97, 0.9899)], ["c1"], False),  # one is surely slower, whatever the others gain
        ([(0.98, 0.9, 1.1), (0.98, 0.9, 1.1)], [], False),  # none is surely, and all together are
        ([(FLOOR, FLOOR, FLOOR)], [], True),
    ],
)
def test_the_verdict(cells: list[tuple[float, float, float]], below: list[str], not_slower: bool) -> None:
    found = verdict({f"c{i}": {"ratio": ratio, "interval": [low, high]} for i, (ratio, low, high) in enumerate(cells)})
    assert (found["below"], found["not_slower"]) == (below, not_slower)


# -- environments ------------------------------------------------------------------------------------------------------
def test_an_environment_without_a_build_is_refused(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))  # ours, which the other must not see
    with pytest.raises(ValueError, match=r"^/nowhere is not a virtual environment, it has no bin/python; name one"):
        compare_builds(model, Path("/nowhere"), CELLS)
    empty = environment(tmp_path / "empty")
    with pytest.raises(ValueError, match=rf"^{empty} has no Headrace; install the other build there: {empty}/bin/python -m "):
        compare_builds(model, empty, CELLS)


def test_one_build_is_not_compared_with_itself(tmp_path: Path) -> None:
    check(BUILDS, tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} imports .*, which is this build"):
        check({**BUILDS, "other": BUILDS["headrace"]}, tmp_path)
    with pytest.raises(ValueError, match="/other/headrace/__init__.py is imported in place of"):
        check({**BUILDS, "headrace": BUILDS["other"]}, tmp_path)


def test_two_builds_of_a_tiny_model(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is a copy of this tree, in an environment of its own: each process imports its own."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "BandwidthProbe", partial(BandwidthProbe, size=4 << 20))
    copy = tmp_path / "copy"
    shutil.copytree(SOURCE / "headrace", copy / "headrace")
    other = environment(tmp_path / "other", copy, *installed())
    after: list[dict[str, Any]] = []
    small = [Cell("b1", 1, 5, 2), Cell("v5", 1, 5, 2, fed=5)]
    result = compare_builds(model, other, small, threads=1, done=lambda found: after.append(dict(found["verdict"])))
    assert result["builds"]["headrace"]["file"] == headrace.__file__
    assert result["builds"]["other"]["file"] == str(copy / "headrace" / "__init__.py")
    assert all({"version", "commit", "file"} == set(build) for build in result["builds"].values())
    assert len(after) == len(result["cells"]) == 2
    for figures in result["cells"].values():
        assert len(figures["samples"]) == len(figures["peers"]["other"]["samples"]) == PAIRS + 1
        assert figures["peers"]["other"]["same_first_token"] == 1.0
        assert figures["interval"][0] <= figures["ratio"] <= figures["interval"][1]
        assert figures["bandwidth_gb_s"] > 0
    assert result["verdict"] == verdict(result["cells"])
