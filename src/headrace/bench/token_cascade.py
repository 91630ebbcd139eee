"""A smaller model that writes some of the tokens, beside the same one as a draft: how much of the text is still what the larger
model says, and what it gains, over thresholds.

Three ways to use it: a cascade by token (it writes where it is sure), a speculative cascade (its row of logits is taken where
it is good enough, and it drafts), and a draft that the larger model verifies, which changes no token: the bar for both.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from headrace.bench.machine import machine
from headrace.bench.plots import Line
from headrace.bench.speculation import timed
from headrace.data.outputs import CompletionOutput
from headrace.data.params import SamplingParams
from headrace.drafting.speculation import Speculation
from headrace.llm import LLM
from headrace.runner.early_exit import MOST_BEHIND
from headrace.stats.text_similarity import rouge_l

PLAIN, DRAFT = "plain", "draft"
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
DEFER = (0.1, 0.3, 0.5, 0.7)
CRITERIA: tuple[Literal["max_prob", "margin"], ...] = ("max_prob", "margin")
RULES: tuple[Literal["chow", "opt"], ...] = ("chow", "opt")


@dataclass(frozen=True, slots=True)
class Way:
    """A way to decode: by what (`kind`: plain, draft, a criterion, a rule), at which setting; whether drafts are verified."""

    kind: str
    at: float | None
    params: SamplingParams
    drafts: bool

    @property
    def name(self) -> str:
        return self.kind if self.at is None else f"{self.kind} {self.at:g}"


@dataclass(slots=True)
class Row:
    """What a way gives. `smaller`: the share of tokens that the smaller model wrote (None: not told); `agrees`: of those that
    are what the larger model itself would say there; `likeness`: ROUGE-L of the tokens with its own answer; `passes`: of the
    larger model, a token. `speeds`: tokens/s of each round, `ratios`: over plain decoding of the same round."""

    name: str
    kind: str
    at: float | None
    smaller: float | None
    agrees: float
    likeness: float
    passes: float
    speeds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return median(self.speeds)

    @property
    def ratio(self) -> float:
        return median(self.ratios)


def ways(max_tokens: int, thresholds: Sequence[float] = THRESHOLDS, defer: Sequence[float] = DEFER) -> list[Way]:
    """Plain decoding, a draft, cascades by token at the thresholds, speculative cascades; all greedy. Raises ParamError."""
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
    made = [Way(PLAIN, None, plain, False), Way(DRAFT, None, plain, True)]
    for criterion in CRITERIA:
        params = plain.replace(cascade_criterion=criterion)
        made += [Way(criterion, at, params.replace(cascade_threshold=at), False) for at in thresholds]
    for rule in RULES:
        made += [Way(rule, at, plain.replace(defer_rule=rule, defer_at=at), True) for at in defer]
    return made


def measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    each: Sequence[Way],
    *,
    batch: int = 1,
    rounds: int = 3,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The figures of all ways, the first of them plain decoding. `llm` has the smaller model as draft, amateur and cascade.
    What is written comes from one pass; then all ways are timed in turns, every second round backwards. Ends with the engine
    as it was.

    Raises RuntimeError where a request fails, or a lossless draft changes a token.
    """
    ours = llm.engine.speculation
    assert ours is not None, "it has a draft"
    limit = llm.memory_plan.max_model_len
    # Each way learns what its own steps cost: two models' are not one's.
    learnt = {way.name: Speculation(ours.drafters, limit, ours.gamma) if way.drafts else None for way in each}
    groups = [list(prompts[at : at + batch]) for at in range(0, len(prompts), batch)]
    rows: list[Row] = []
    texts: list[list[list[int]]] = []
    for way in each:
        answers = _written(llm, prompts, way.params)
        texts.append([one.token_ids for one in answers])
        agrees = _agrees(llm, prompts, texts[-1])
        alike = [rouge_l(*pair) for pair in zip(texts[-1], texts[0], strict=True)]
        figures = _smaller(answers), agrees, sum(alike) / len(alike), _passes(answers)
        rows.append(Row(way.name, way.kind, way.at, *figures))
        say(f"{way.name}: {agrees:.1%} of the tokens are the larger model's choice")
    if any(mine != texts[0] for way, mine in zip(each, texts, strict=True) if way.kind == DRAFT):
        raise RuntimeError("a draft changed a token; please report this")
    order = list(zip(each, rows, strict=True))
    for number in range(rounds):
        for way, row in order if number % 2 == 0 else reversed(order):
            found = [timed(llm, group, [way.params] * len(group), learnt[way.name])[0] for group in groups]
            row.speeds.append(sum(one.tokens for one in found) / sum(one.seconds for one in found))
            if way.drafts:
                row.passes = sum(one.steps for one in found) / sum(one.tokens for one in found)
        for row in rows:
            row.ratios.append(row.speeds[-1] / rows[0].speeds[-1])
        say(f"round {number + 1} of {rounds}: a draft is {next(one.ratios[-1] for one in rows if one.kind == DRAFT):.2f}x")
    tokens = sum(map(len, texts[0]))
    records = [{**asdict(row), "speed": row.speed, "ratio": row.ratio} for row in rows]
    return {"machine": machine(), "backend": llm.backend, "n": len(prompts), "tokens": tokens, "batch": batch, "rows": records}


def _written(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[CompletionOutput]:
    outputs = llm.generate(list(prompts), params)
    if failed := [output.error for output in outputs if output.error is not None]:
        raise RuntimeError(failed[0])
    return [output.outputs[0] for output in outputs]


def _agrees(llm: LLM, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """The share of the answers' tokens that the larger model finds the likeliest where they stand."""
    read = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)], read)
    ranks = [
        entry.rank
        for output, prompt in zip(outputs, prompts, strict=True)
        for entry in (output.prompt_logprobs or [])[len(prompt) :]
        if entry is not None
    ]
    return sum(rank == 1 for rank in ranks) / max(1, len(ranks))


def _smaller(answers: Sequence[CompletionOutput]) -> float | None:
    """The share of tokens that the smaller model wrote in the larger one's place."""
    exits = [one for answer in answers for one in answer.exits or ()]
    return sum(one.layers == 0 for one in exits) / len(exits) if exits else None


def _passes(answers: Sequence[CompletionOutput]) -> float:
    """Steps in which the larger model's weights are read, a token after the first."""
    count = tokens = 0
    for answer in answers:
        lag = 0
        for at in range(1, len(answer.token_ids)):
            by_smaller = answer.exits is not None and answer.exits[at].layers == 0
            lag = lag + 1 if by_smaller and lag < MOST_BEHIND else 0
            count += lag == 0
            tokens += 1
    return count / max(1, tokens)


def lines(found: dict[str, Any]) -> list[Line]:
    """Tokens that are the larger model's choice (percent) over the speed beside plain decoding, a line for each kind."""
    kinds = dict.fromkeys(row["kind"] for row in found["rows"])
    of = {kind: sorted((row["ratio"], 100 * row["agrees"]) for row in found["rows"] if row["kind"] == kind) for kind in kinds}
    return [Line(kind, [x for x, _ in points], [y for _, y in points]) for kind, points in of.items()]


def verdict(found: dict[str, Any]) -> str:
    """Whether giving up tokens buys more than the draft, which gives up none."""
    rows = found["rows"]
    bar = next(row["ratio"] for row in rows if row["kind"] == DRAFT)
    faster = [row for row in rows if row["kind"] not in (PLAIN, DRAFT) and row["ratio"] > bar]
    line = f"a draft by the same model, which changes no token, is {bar:.2f} times as fast as plain decoding"
    if not faster:
        return f"{line}: nothing here is faster"
    best = max(faster, key=lambda row: row["agrees"])
    return f"{line}; of what is faster {best['name']} agrees most: {best['agrees']:.1%}, {best['ratio']:.2f} times"
