"""What speculation gains, and why: acceptance, tokens per step, what drafting and verifying cost, predicted and measured."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from headrace.bench.plots import Line, draw
from headrace.data.params import SamplingParams
from headrace.data.types import Request
from headrace.drafting.controller import expected
from headrace.drafting.speculation import Speculation
from headrace.llm import LLM

AUTO = 0  # a gamma: the controller's own choice, step by step


@dataclass(slots=True)
class Row:
    """One task at one batch size and gamma. Times are in plain steps of that batch."""

    task: str
    batch: int
    gamma: int
    acceptance: float  # accepted / drafted
    drafted: float  # a sequence's drafted tokens per step
    tokens: float  # and those that came out
    c: float  # a draft step
    v: float  # a verification step, as wide as they were on average
    predicted: float  # tokens / (gamma c + v)
    measured: float  # median over rounds of the speculative tokens/s over the plain ones
    worst: float

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Timed:
    """A run, while its batch was whole."""

    seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int

    @property
    def speed(self) -> float:
        """Tokens/s. Raises RuntimeError where there are none: no answer went beyond its first token."""
        if not self.tokens:
            raise RuntimeError("answers of one token cannot be measured; give other prompts")
        return self.tokens / self.seconds


def measure(
    llm: LLM,
    tasks: dict[str, list[list[int]]],
    *,
    gammas: Sequence[int] = (AUTO, 1, 2, 4, 8),
    batches: Sequence[int] = (1,),
    rounds: int = 3,
    max_tokens: int = 96,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Alternate plain decoding with each gamma, in one process, prompts in the prefix cache. Ends with the engine as it was.

    Raises ValueError where the LLM speculates in no way, RuntimeError should an output change.
    """
    ours = llm.engine.speculation
    if ours is None:
        raise ValueError(
            "this model does not speculate here; say who drafts, with speculate (--speculate ngram) or draft (--draft MODEL)"
        )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
    rows = []
    for task, prompts in tasks.items():
        for batch in batches:
            groups = _groups(prompts, batch)
            for gamma in gammas:
                made = Speculation(ours.drafters, llm.memory_plan.max_model_len, gamma or None)
                rows.append(row := _row(llm, task, batch, gamma, groups, made, params, rounds))
                say(f"{task}, batch {batch}, gamma {gamma or 'auto'}: {row.measured:.2f}x")
    return rows


def _groups(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    """All prompts in batches; where there are fewer than a batch holds, some come twice."""
    count = max(1, len(prompts) // batch)
    return [[prompts[(number * batch + at) % len(prompts)] for at in range(batch)] for number in range(count)]


def _row(
    llm: LLM, task: str, batch: int, gamma: int, groups: list[Any], made: Speculation, params: SamplingParams, rounds: int
) -> Row:
    plain, drafted, ratios = [], [], []
    for group in groups:
        each = [params] * len(group)
        timed(llm, group, each, None)  # prompts into the cache
        for _ in range(rounds):
            before, expected = timed(llm, group, each, None)
            after, got = timed(llm, group, each, made)
            if got != expected:
                raise RuntimeError(f"{task}: speculation changed an output; please report this")
            plain.append(before)
            drafted.append(after)
            ratios.append(after.speed / before.speed)
    steps = sum(one.steps for one in drafted)
    sequence_steps = max(1, steps)
    drafts = sum(one.drafted for one in drafted)
    tokens = sum(one.tokens for one in drafted) / sequence_steps
    base = median(one.seconds / max(1.0, one.steps / batch) for one in plain)
    per_step = drafts / sequence_steps
    c = made.costs.draft(batch) / base
    v = (made.costs.step(batch + round(per_step * batch)) or base) / (made.costs.step(batch) or base)
    return Row(
        task,
        batch,
        gamma,
        sum(one.accepted for one in drafted) / max(1, drafts),
        per_step,
        tokens,
        c,
        v,
        tokens / (per_step * c + v),
        median(ratios),
        min(ratios),
    )


def timed(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], speculation: Speculation | None
) -> tuple[Timed, list[list[int]]]:
    """Decode these prompts together, with this speculation or none, on an idle engine.

    Returns the cost of the steps while all of them ran, from the last first token to the first end, and all tokens. Raises
    RuntimeError if a request fails.
    """
    engine = llm.engine
    requests = [engine.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}

    def step() -> None:
        for delta in engine.step():
            if delta.error:
                raise RuntimeError(delta.error)
            outputs[delta.request_id] += delta.token_ids

    with llm.speculating(speculation):
        while not all(outputs.values()):
            step()
        before = _counts(requests, outputs)
        began = time.perf_counter()
        whole = len(engine.requests) == len(requests)  # else one has ended by now, and what is left is measured
        while engine.busy and (not whole or len(engine.requests) == len(requests)):
            step()
        seconds = time.perf_counter() - began
        counts = [now - then for now, then in zip(_counts(requests, outputs), before, strict=True)]
        while engine.busy:
            step()
    return Timed(seconds, *counts), list(outputs.values())


def _counts(requests: Sequence[Request], outputs: dict[str, list[int]]) -> tuple[int, ...]:
    """Tokens, steps of sequences, drafted and accepted tokens so far."""
    metrics = [request.metrics for request in requests]
    totals = (sum(getattr(one, name) for one in metrics) for name in ("steps", "drafted", "accepted"))
    return sum(map(len, outputs.values())), *totals


def theory(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """What drafts should pay of one task at one batch size: gamma and speed-up, for each gamma from 0 to the largest measured.

    A share s of the steps has a draft, whose tokens are accepted with probability alpha: both are those of the least gamma that
    was measured. A step then gives 1 + s (E(alpha, gamma) - 1) tokens and costs s gamma c + v; v as measured, and on a straight
    line in between.
    """
    rows = sorted((row for row in rows if row.gamma), key=lambda row: row.gamma)
    least, c = rows[0], median(row.c for row in rows)
    share = min(1.0, least.drafted / least.gamma)
    known = [(0, 1.0), *((row.gamma, row.v) for row in rows)]
    line = [(0, 1.0)]
    for gamma in range(1, rows[-1].gamma + 1):
        (low, below), (high, above) = next(pair for pair in pairwise(known) if pair[1][0] >= gamma)
        v = below + (above - below) * (gamma - low) / (high - low)
        line.append((gamma, (1 + share * (expected(least.acceptance, gamma) - 1)) / (share * gamma * c + v)))
    return line


def svg(rows: Sequence[Row], remark: str = "") -> str:
    """Gamma against speed-up as a drawing: what was measured and, dashed, the theory, of each task at the least batch size."""
    rows = [row for row in rows if row.gamma and row.batch == min(each.batch for each in rows)]
    if not rows:
        raise ValueError("nothing to draw: measure some gamma of 1 or more")
    lines = []
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        measured, predicted = [(0.0, 1.0), *sorted((float(row.gamma), row.measured) for row in mine)], theory(mine)
        lines += [_line(task, measured), _line(task, predicted, dashed=True)]
    return draw("Speed-up by drafting; dashed: theory", "tokens drafted (gamma)", "times as fast", lines, remark)


def _line(name: str, points: Sequence[tuple[float, float]], dashed: bool = False) -> Line:
    return Line(name, [x for x, _ in points], [y for _, y in points], dashed)
