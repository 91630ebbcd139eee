"""Cascades of models: thresholds at the extremes give one model's answers; costs and scores agree with hand calculations."""

import json
import math
from pathlib import Path

import pytest

from headrace.bench.questions import read_questions
from headrace.cli.app import main
from headrace.cli.cascade_files import read_cascade
from headrace.data.outputs import CompletionOutput, RequestOutput
from headrace.data.params import SamplingParams
from headrace.data.plan import TokenLogprob
from headrace.data.types import RequestMetrics
from headrace.llm import LLM
from headrace.server.settings import SettingsError
from headrace.stats.confidence import auroc, deferrals, losses_against
from headrace.workflows.cascade import Tier, answer, confidence, text_of
from tests.tiny_files import write_tiny_gguf

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8], [40, 40, 40], [9, 8, 7, 6, 5, 4]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_gguf(tmp_path_factory.mktemp("small") / "small.gguf", seed=1), threads=1)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_gguf(tmp_path_factory.mktemp("large") / "large.gguf", seed=2), threads=1)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_the_extremes_are_the_models(small: LLM, large: LLM) -> None:
    """Threshold 0: the small one answers everything, 1.01: the large one. In between each answer is one of theirs."""
    alone = {0: tokens(small.generate(PROMPTS, PARAMS)), 1: tokens(large.generate(PROMPTS, PARAMS))}
    assert alone[0] != alone[1]
    for threshold, tier in ((0.0, 0), (1.01, 1)):
        found = answer([Tier(small, threshold), Tier(large)], PROMPTS, PARAMS)
        assert [one.tier for one in found] == [tier] * len(PROMPTS)
        assert tokens([one.output for one in found]) == alone[tier]
    scores = sorted(one.scores[0] for one in answer([Tier(small), Tier(large)], PROMPTS, PARAMS))
    mixed = answer([Tier(small, scores[2]), Tier(large)], PROMPTS, PARAMS)
    assert sorted(one.tier for one in mixed) == [0, 0, 1, 1]
    for at, one in enumerate(mixed):
        assert one.output.outputs[0].token_ids == alone[one.tier][at]
        assert (one.tier == 0) == (one.scores[0] >= scores[2])


def test_a_deferred_prompt_costs_the_tokens_of_every_tier(small: LLM, large: LLM) -> None:
    """By counted tokens; a bill that forgets the small model is another number."""
    found = answer([Tier(small, 1.01, cost=0.25), Tier(large, cost=2.0)], PROMPTS, PARAMS)
    for prompt, one in zip(PROMPTS, found, strict=True):
        both = len(prompt) + PARAMS.max_tokens  # type: ignore[operator]
        assert one.cost == both * 0.25 + both * 2.0
        assert one.cost != both * 2.0
    kept = answer([Tier(small, 0.0, cost=0.25), Tier(large, cost=2.0)], PROMPTS, PARAMS)
    assert [one.cost for one in kept] == [(len(prompt) + 6) * 0.25 for prompt in PROMPTS]


def test_a_vote_is_the_share_of_equal_answers(small: LLM, large: LLM) -> None:
    several = SamplingParams(n=4, seed=1, max_tokens=1, ignore_eos=True)
    tiers = [Tier(small, 1.01, "vote", params=several), Tier(large)]
    for one in answer(tiers, PROMPTS, PARAMS):
        assert one.scores[0] in {0.25, 0.5, 0.75, 1.0}
        assert len(one.output.outputs) == 1  # the large model's


@pytest.mark.parametrize(
    ("tier", "params", "says"),
    [
        ({"score": "vote"}, PARAMS, "a vote needs several different answers"),
        ({"score": "most"}, PARAMS, "no score 'most'; use min, mean, low, vote"),
        ({}, SamplingParams(n=2), "needs one answer"),
    ],
)
def test_scores_that_cannot_be(small: LLM, tier: dict[str, str], params: SamplingParams, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        answer([Tier(small, **tier), Tier(small)], PROMPTS[:1], params)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one model"):
        answer([], PROMPTS, PARAMS)


def output(*logprobs: float, texts: tuple[str, ...] = ("a",), error: str | None = None) -> RequestOutput:
    outputs = [
        CompletionOutput(i, text, logprobs=[TokenLogprob(0, p, 1, ()) for p in logprobs]) for i, text in enumerate(texts)
    ]
    return RequestOutput("r", None, [1], None, outputs, RequestMetrics(0.0), error=error)


def test_scores_by_hand() -> None:
    of = [math.log(p) for p in (0.9, 0.5, 0.8, 0.2)]
    assert confidence(output(*of), "min") == pytest.approx(0.2)
    assert confidence(output(*of), "mean") == pytest.approx((0.9 * 0.5 * 0.8 * 0.2) ** 0.25)
    assert confidence(output(*of * 5), "low") == pytest.approx(0.2)  # the worst two of twenty
    assert confidence(output(*of[:3], *of * 4), "low") == pytest.approx(0.2)
    vote = output(texts=("x", "y", "x", "z"))
    assert (confidence(vote, "vote"), text_of(vote, "vote"), text_of(vote, "min")) == (0.5, "x", "x")
    assert confidence(output(), "min") == confidence(output(0.0, error="broken"), "mean") == 0.0


def test_how_good_a_score_is() -> None:
    assert auroc([0.1, 0.4, 0.4, 0.9], [False, False, True, True]) == 0.875
    assert auroc([0.9, 0.1], [False, True]) == 0.0
    assert math.isnan(auroc([0.1, 0.2], [True, True]))


def test_deferring_by_score_is_held_against_chance() -> None:
    """Ten questions, of which the small model has the six of the highest scores right; the large one has nine."""
    scores, small, large = [i / 10 for i in range(10)], [i >= 4 for i in range(10)], [i != 9 for i in range(10)]
    curve = deferrals(scores, small, large, (1.0, 3.0), (0.0, 0.2, 0.4, 1.0))
    assert [one.accuracy for one in curve] == pytest.approx([0.6, 0.8, 1.0, 0.9])
    assert [one.by_chance for one in curve] == pytest.approx([0.6, 0.66, 0.72, 0.9])
    assert [one.cost for one in curve] == pytest.approx([1.0, 1.6, 2.2, 4.0])
    backwards = deferrals([-score for score in scores], small, large, (1.0, 3.0), (0.4,))[0]
    assert backwards.accuracy < backwards.by_chance  # control: a score that tells the opposite
    lost = losses_against(scores, small, large)
    assert (lost(1.01).sum(), lost(0.4).sum(), lost(0.2).sum(), lost(0.0).sum()) == (0, 0, 2, 4)


def test_w49_a_cascade_pays_while_few_are_passed_on() -> None:
    """Whoever is passed on pays for both, so a small model of a third of the price costs less than the large one alone while
    fewer than two in three are passed on: one less the ratio of the prices."""
    scores, shares = [i / 30 for i in range(30)], [i / 30 for i in range(31)]
    curve = deferrals(scores, [True] * 30, [True] * 30, (1.0, 3.0), shares)
    cheaper = [share for share, one in zip(shares, curve, strict=True) if one.cost < 3.0 - 1e-9]
    assert cheaper == [share for share in shares if share < 1 - 1 / 3 - 1e-9]
    assert curve[-1].cost == pytest.approx(1.0 + 3.0)


def lines(path: Path, count: int) -> Path:
    choices = ["the", "mill"]
    made = [{"prompt": f"{i} wheels", "answer": choices[i % 2], "choices": choices} for i in range(count)]
    path.write_text("".join(json.dumps(one) + "\n" for one in made))
    return path


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (write_tiny_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    told = tmp_path / "told.json"
    given = ["--input", str(lines(tmp_path / "q.jsonl", 12)), "--price", "0.3", "--json", str(told)]
    assert main(["bench", "cascade", str(small), str(large), *given]) == 0
    printed = capsys.readouterr().out
    assert "no threshold is guaranteed to lose at most 0.05 on 6 questions" in printed
    result = json.loads(told.read_text())
    assert (result["n"], result["score"], result["models"]) == (12, "min", [str(small), str(large)])
    with pytest.raises(SettingsError, match="found no threshold"):  # a server reads it
        read_cascade({"name": "auto", "tiers": ["small", "large"], "calibration": str(told)})
    assert result["curve"][0]["accuracy"] == result["small"]
    assert (
        result["curve"][-1]["accuracy"] == result["large"] == result["held_out"]["large"] or result["held_out"]["deferred"] == 1
    )
    assert main(["bench", "cascade", str(small), str(large), *given, "--score", "most"]) == 2
    assert "--score takes min, mean, low, vote" in capsys.readouterr().err


def test_a_line_ends_only_at_a_line_feed(tmp_path: Path) -> None:
    """JSON may hold other ends of lines as they are."""
    file = tmp_path / "q.jsonl"
    asked = [{"prompt": f"a{end}b", "answer": "x"} for end in ("\u2028", "\x85")]
    file.write_text("".join(json.dumps(one, ensure_ascii=False) + "\r\n" for one in asked), "utf-8", newline="")
    assert [one.prompt for one in read_questions(file)] == [one["prompt"] for one in asked]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "a"}, 'question 1 has no "answer"'),
        ({"prompt": "a", "answer": "x", "choices": ["y"]}, "one of its choices"),
        ({"answer": "x"}, 'line 1 has no text in "prompt"'),
    ],
)
def test_questions_that_cannot_be_judged(tmp_path: Path, line: dict[str, object], says: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=says):
        read_questions(file)
