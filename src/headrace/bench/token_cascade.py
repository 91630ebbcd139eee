"""Compare the ways in which a smaller model can write tokens for a larger one: agreement with the larger model, and speed.

Three ways: a cascade by token (the smaller model writes a token if its confidence passes the threshold), a speculative cascade
(it drafts, and its logits replace the larger model's by a deferral rule), and a draft that the larger model verifies. The draft
changes no token, so the other two must be faster than it.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from headrace.bench.figures import Column, Line, percent
from headrace.bench.machine import machine
from headrace.bench.speculation import timed
from headrace.data.outputs import CompletionOutput
from headrace.data.params import SamplingParams
from headrace.drafting.speculation import Speculation
from headrace.llm import LLM
from headrace.runner.early_exit import MOST_BEHIND
from headrace.stats.paired_ratio import rouge_l

PLAIN, DRAFT = "plain", "draft"
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
DEFER = (0.1, 0.3, 0.5, 0.7)
CRITERIA: tuple[Literal["max_prob", "margin"], ...] = ("max_prob", "margin")
RULES: tuple[Literal["chow", "opt"], ...] = ("chow", "opt")
COLUMNS = (
    Column("method", "{name}"),
    Column("by smaller model", lambda row: percent(row["smaller"])),
    Column("larger model's choice", "{agrees:.1%}"),
    Column("ROUGE-L", "{likeness:.3f}"),
    Column("passes per token", "{passes:.2f}"),
    Column("tokens/s", "{speed:.1f}"),
    Column("speed-up", "{ratio:.2f}x"),
    Column("rounds", lambda row: f"{min(row['ratios']):.2f}..{max(row['ratios']):.2f}"),
)


@dataclass(frozen=True, slots=True)
class DecodingMethod:
    """One way to decode. `kind`: plain, draft, a criterion or a rule; `at`: its threshold; `drafts`: whether it speculates."""

    kind: str
    at: float | None
    params: SamplingParams
    drafts: bool

    @property
    def name(self) -> str:
        return self.kind if self.at is None else f"{self.kind} {self.at:g}"


@dataclass(slots=True)
class MethodFigures:
    """Figures of one method.

    `smaller`: share of tokens written by the smaller model (None if unknown). `agrees`: share of tokens that are the larger
    model's first choice. `likeness`: ROUGE-L of the tokens with the larger model's answer. `passes`: passes of the larger model
    per token. `speeds`: tokens/s of each round; `ratios`: to plain decoding in the same round.
    """

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


def methods(max_tokens: int, thresholds: Sequence[float] = THRESHOLDS, defer: Sequence[float] = DEFER) -> list[DecodingMethod]:
    """Greedy methods: plain, draft, cascades by token at `thresholds`, speculative cascades at `defer`. Raises ParamError."""
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
    cases = [DecodingMethod(PLAIN, None, plain, False), DecodingMethod(DRAFT, None, plain, True)]
    for criterion in CRITERIA:
        params = plain.replace(cascade_criterion=criterion)
        cases += [DecodingMethod(criterion, at, params.replace(cascade_threshold=at), False) for at in thresholds]
    for rule in RULES:
        cases += [DecodingMethod(rule, at, plain.replace(defer_rule=rule, defer_at=at), True) for at in defer]
    return cases


def measure(
    llm: LLM,
    prompts: Sequence[list[int]],
    methods: Sequence[DecodingMethod],
    *,
    batch: int = 1,
    rounds: int = 3,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Figures of all methods, of which the first is plain decoding.

    llm: has the smaller model as draft, amateur and cascade. Its engine's speculation is restored at the end.
    Texts come from one run of each method. Then all methods are timed in alternation, every second round in reverse order.
    Raises RuntimeError if a request fails or a lossless draft changes a token.
    """
    ours = llm.engine.speculation
    assert ours is not None, "it has a draft"
    limit = llm.memory_plan.max_model_len
    # Each method learns the cost of its own steps: steps with two models cost more.
    speculations = {method.name: Speculation(ours.drafters, limit, ours.gamma) if method.drafts else None for method in methods}
    groups = [list(prompts[at : at + batch]) for at in range(0, len(prompts), batch)]
    rows: list[MethodFigures] = []
    texts: list[list[list[int]]] = []
    for method in methods:
        answers = _answers(llm, prompts, method.params)
        texts.append([answer.token_ids for answer in answers])
        agrees = _agrees(llm, prompts, texts[-1])
        alike = [rouge_l(*pair) for pair in zip(texts[-1], texts[0], strict=True)]
        figures = _smaller(answers), agrees, sum(alike) / len(alike), _passes(answers)
        rows.append(MethodFigures(method.name, method.kind, method.at, *figures))
        say(f"{method.name}: {agrees:.1%} of the tokens are the larger model's choice")
    if any(mine != texts[0] for method, mine in zip(methods, texts, strict=True) if method.kind == DRAFT):
        raise RuntimeError("a draft changed a token; please report this")
    order = list(zip(methods, rows, strict=True))
    for number in range(rounds):
        for method, row in order if number % 2 == 0 else reversed(order):
            runs = [timed(llm, group, [method.params] * len(group), speculations[method.name])[0] for group in groups]
            row.speeds.append(sum(run.tokens for run in runs) / sum(run.seconds for run in runs))
            if method.drafts:
                row.passes = sum(run.steps for run in runs) / sum(run.tokens for run in runs)
        for row in rows:
            row.ratios.append(row.speeds[-1] / rows[0].speeds[-1])
        say(f"round {number + 1} of {rounds}: a draft is {next(row.ratios[-1] for row in rows if row.kind == DRAFT):.2f}x")
    tokens = sum(map(len, texts[0]))
    records = [{**asdict(row), "speed": row.speed, "ratio": row.ratio} for row in rows]
    return {"machine": machine(), "backend": llm.backend, "n": len(prompts), "tokens": tokens, "batch": batch, "rows": records}


def _answers(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[CompletionOutput]:
    outputs = llm.generate(list(prompts), params)
    if failed := [output.error for output in outputs if output.error is not None]:
        raise RuntimeError(failed[0])
    return [output.outputs[0] for output in outputs]


def _agrees(llm: LLM, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """Share of the answers' tokens that are the larger model's first choice at their positions."""
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
    """Share of tokens that the smaller model wrote; None if the answers have no record of it."""
    exits = [exited for answer in answers for exited in answer.exits or ()]
    return sum(exited.layers == 0 for exited in exits) / len(exits) if exits else None


def _passes(answers: Sequence[CompletionOutput]) -> float:
    """Steps that read the larger model's weights, per token after the first."""
    count = tokens = 0
    for answer in answers:
        lag = 0
        for at in range(1, len(answer.token_ids)):
            by_smaller = answer.exits is not None and answer.exits[at].layers == 0
            lag = lag + 1 if by_smaller and lag < MOST_BEHIND else 0
            count += lag == 0
            tokens += 1
    return count / max(1, tokens)


def lines(result: dict[str, Any]) -> list[Line]:
    """Curves by kind: tokens that are the larger model's first choice (percent) over the speed-up."""
    kinds = dict.fromkeys(row["kind"] for row in result["rows"])
    of = {kind: sorted((row["ratio"], 100 * row["agrees"]) for row in result["rows"] if row["kind"] == kind) for kind in kinds}
    return [Line(kind, [x for x, _ in points], [y for _, y in points]) for kind, points in of.items()]


def verdict(result: dict[str, Any]) -> str:
    """One line: the fastest lossless draft, and the best method that is faster than it, if any."""
    rows = result["rows"]
    bar = next(row["ratio"] for row in rows if row["kind"] == DRAFT)
    faster = [row for row in rows if row["kind"] not in (PLAIN, DRAFT) and row["ratio"] > bar]
    line = f"a draft by the same model, which changes no token, is {bar:.2f} times as fast as plain decoding"
    if not faster:
        return f"{line}: nothing here is faster"
    best = max(faster, key=lambda row: row["agrees"])
    return f"{line}; of what is faster {best['name']} agrees most: {best['agrees']:.1%}, {best['ratio']:.2f} times"
