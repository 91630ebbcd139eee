"""Token cascades compared with a draft by the same smaller model: correct figures, and a wrong draft is detected."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import token_cascade as bench
from headrace.bench.token_cascade import DRAFT, PLAIN, DecodingMethod, measure, methods
from headrace.data.outputs import CompletionOutput
from headrace.data.params import SamplingParams
from headrace.data.plan import Exited
from headrace.llm import LLM
from tests.cli_shell import Shell
from tests.e2e.test_token_cascade import CASCADES, GREEDY, case_of, engine_of, rows_of
from tests.early_exits import LAYERS, collect_exits
from tests.tiny_files import write_tiny_gguf

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8], [40, 41, 42]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("turns")
    return write_tiny_gguf(place / "large.gguf", layers=LAYERS), write_tiny_gguf(place / "small.gguf", layers=1, seed=3)


@pytest.fixture(scope="module")
def llm(files: tuple[Path, Path]) -> LLM:
    large, small = files
    return LLM(large, draft=small, amateur=small, cascade=small, speculate="draft", threads=1, device="cpu")


def test_a_file_in_several_roles_is_packed_once(llm: LLM) -> None:
    """Whoever drafts, is the amateur and writes first has one copy of the weights; the larger model has its own."""
    packed = [program.weights for program in llm.runner.programs]  # type: ignore[attr-defined]
    assert [one.source.path.name for one in packed] == ["large.gguf", "small.gguf", "small.gguf", "small.gguf"]
    assert len(set(map(id, packed))) == 2


def silent(line: str) -> None:
    assert line


def test_the_ends_of_every_curve_are_known(llm: LLM) -> None:
    """A threshold nobody reaches and a rule that never defers are the larger model; 0 and 1 are the smaller one, of a cascade
    after the first token."""
    ours = llm.engine.speculation
    found = measure(llm, PROMPTS, methods(10, (0.0, 1.01), (-1.0, 1.0)), batch=2, rounds=2, say=silent)
    assert llm.engine.speculation is ours
    rows = {row["name"]: row for row in found["rows"]}
    own = ("plain", "draft", "max_prob 1.01", "margin 1.01", "chow -1", "opt -1")
    assert [(rows[name]["agrees"], rows[name]["likeness"]) for name in own] == [(1.0, 1.0)] * len(own)
    for name in ("max_prob 0", "margin 0", "chow 1", "opt 1"):
        assert rows[name]["agrees"] < 1
        assert rows[name]["likeness"] < 1
    assert rows["max_prob 0"]["smaller"] == pytest.approx(1 - 1 / 10)
    assert (rows["max_prob 1.01"]["smaller"], rows["plain"]["smaller"]) == (0, None)
    assert (rows["plain"]["passes"], rows["max_prob 1.01"]["passes"], rows["max_prob 0"]["passes"]) == (1, 1, 1 / 9)
    assert all(len(row["ratios"]) == 2 for row in found["rows"])
    assert rows["plain"]["ratios"] == [1, 1]
    assert {line.name for line in bench.lines(found)} == {"plain", "draft", "max_prob", "margin", "chow", "opt"}


def test_a_draft_that_changes_a_token_is_an_error(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    lying = [DecodingMethod(PLAIN, None, plain, False), DecodingMethod(DRAFT, None, plain.replace(cascade_threshold=0.0), True)]
    with pytest.raises(RuntimeError, match="a draft changed a token"):
        measure(llm, PROMPTS, lying, rounds=1, say=silent)


@pytest.mark.parametrize("params", [CASCADES, GREEDY.replace(cascade_threshold=0.0), GREEDY.replace(cascade_threshold=1.01)])
def test_passes_equal_the_steps_of_the_larger_model(params: SamplingParams) -> None:
    """Counted in the larger model's steps; that of the prompt, which gives the first token, is none of them."""
    side, _, _ = case_of("native")
    tokens, exits = collect_exits(engine_of(side), [7] * 20, params)
    large, _ = rows_of(engine_of(side, drafts=False), [7] * 20, params)
    made = CompletionOutput(0, "", tokens, exits=list(exits))
    assert bench._passes([made]) == pytest.approx((len(large) - 1) / (len(tokens) - 1))


def test_passes_by_hand() -> None:
    """Eight tokens of the smaller model are one pass; one of the larger is one, and pays what lagged."""
    whole, small = Exited(LAYERS), Exited(0, 0.9)

    def passes(*exits: Exited) -> float:
        return bench._passes([CompletionOutput(0, "", [1] * len(exits), exits=list(exits))])

    assert passes(whole, *[small] * 8) == 1 / 8
    assert passes(whole, *[small] * 7) == 0
    assert passes(whole, *[small] * 5, whole, *[small] * 6) == 1 / 12
    assert passes(whole, whole, whole) == 1


def test_the_verdict_names_methods_faster_than_the_draft() -> None:
    def verdict_of(**ratios: float) -> str:
        rows = [{"name": name, "kind": name, "ratio": ratio, "agrees": 1 - ratio / 10} for name, ratio in ratios.items()]
        return bench.verdict({"rows": rows})

    assert "1.50 times as fast as plain decoding: nothing here is faster" in verdict_of(plain=1, draft=1.5, opt=1.4)
    assert "of what is faster opt agrees most: 84.0%, 1.60 times" in verdict_of(plain=1, draft=1.5, opt=1.6, chow=2)


def test_the_command(shell: Shell, files: tuple[Path, Path]) -> None:
    large, small = files
    prompts, report, plot = (shell.folder / name for name in ("in.txt", "told.json", "curve.svg"))
    prompts.write_text("The mill\nstands by a river\nwheels\n")
    command: tuple[Any, ...] = ("bench", "token-cascade", large, "-i", prompts, "--threads", "1")
    more = ("--prompts", "2", "--rounds", "1", "-m", "6", "--threshold", "0.02", "--defer", "0.3")
    code, out, err = shell(*command, "--cascade", small, *more, "--json", report, "--plot", plot)
    assert code == 0, err
    rows = [line.split("\t")[0] for line in out.splitlines()]
    assert rows[:7] == ["method", "plain", "draft", "max_prob 0.02", "margin 0.02", "chow 0.3", "opt 0.3"]
    assert "a draft by the same model, which changes no token, is" in out
    found = json.loads(report.read_text())
    assert (found["n"], found["batch"], len(found["rows"])) == (2, 1, 6)
    assert "Cascade by token" in plot.read_text()
    drafts = ("--cascade", small, "--draft", small)
    for arguments, why in (((), "needs a smaller model"), (drafts, "leave --draft and --amateur out")):
        code, _, err = shell(*command, *arguments)
        assert code == 2
        assert why in " ".join(err.split())
