"""Gain of speculation and its parts: acceptance, tokens per step, costs, predicted and measured speed-up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from headrace.bench.figures import Column, Line
from headrace.data.params import SamplingParams
from headrace.data.types import Request
from headrace.drafting.policy import expected_tokens
from headrace.drafting.speculation import Speculation
from headrace.llm import LLM

# A gamma: the controller chooses the draft length for each step.
AUTO = 0
COLUMNS = (
    Column("task", "{0.task}"),
    Column("batch", "{0.batch}"),
    Column("gamma", lambda row: row.gamma or "auto"),
    Column("accepted", "{0.acceptance:.0%}"),
    Column("tokens/step", "{0.tokens:.2f}"),
    Column("c", "{0.c:.2f}"),
    Column("v", "{0.v:.2f}"),
    Column("predicted", "{0.predicted:.2f}x"),
    Column("measured", "{0.measured:.2f}x"),
    Column("worst", "{0.worst:.2f}x"),
)


@dataclass(slots=True)
class SpeedUp:
    """Figures of one task at one batch size and gamma.

    `acceptance`: accepted / drafted tokens. `drafted`, `tokens`: drafted and emitted tokens of a sequence per step.
    `c`, `v`: cost of a draft step and of a verification step of the mean width, in plain steps of the same batch.
    `predicted`: tokens / (gamma c + v). `measured`, `worst`: median and least ratio of speculative to plain tokens/s.
    """

    task: str
    batch: int
    gamma: int
    acceptance: float
    drafted: float
    tokens: float
    c: float
    v: float
    predicted: float
    measured: float
    worst: float


@dataclass(slots=True)
class TimedRun:
    """One run, timed while all its sequences were running."""

    seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int

    @property
    def speed(self) -> float:
        """Tokens/s. Raises RuntimeError if no answer has more than one token."""
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
) -> list[SpeedUp]:
    """Alternate plain decoding with each gamma, in one process, with the prompts in the prefix cache.

    The engine's speculation is restored at the end. Raises ValueError if the LLM has no drafter, and RuntimeError if
    speculation changes an output.
    """
    ours = llm.engine.speculation
    if ours is None:
        raise ValueError(
            "this model was opened without a drafter; choose one with speculate (--speculate ngram) or draft (--draft MODEL)"
        )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
    rows = []
    for task, prompts in tasks.items():
        for batch in batches:
            groups = _groups(prompts, batch)
            for gamma in gammas:
                speculation = Speculation(ours.drafters, llm.memory_plan.max_model_len, gamma or None)
                rows.append(row := _row(llm, task, batch, gamma, groups, speculation, params, rounds))
                say(f"{task}, batch {batch}, gamma {gamma or 'auto'}: {row.measured:.2f}x")
    return rows


def _groups(prompts: list[list[int]], batch: int) -> list[list[list[int]]]:
    """All prompts in batches; prompts repeat if a batch is larger than their number."""
    count = max(1, len(prompts) // batch)
    return [[prompts[(number * batch + at) % len(prompts)] for at in range(batch)] for number in range(count)]


def _row(
    llm: LLM,
    task: str,
    batch: int,
    gamma: int,
    groups: list[Any],
    speculation: Speculation,
    params: SamplingParams,
    rounds: int,
) -> SpeedUp:
    plain, drafted, ratios = [], [], []
    for group in groups:
        params_of_group = [params] * len(group)
        # Fills the prefix cache.
        timed(llm, group, params_of_group, None)
        for _ in range(rounds):
            before, expected = timed(llm, group, params_of_group, None)
            after, got = timed(llm, group, params_of_group, speculation)
            if got != expected:
                raise RuntimeError(f"{task}: speculation changed an output; please report this")
            plain.append(before)
            drafted.append(after)
            ratios.append(after.speed / before.speed)
    steps = sum(run.steps for run in drafted)
    sequence_steps = max(1, steps)
    drafts = sum(run.drafted for run in drafted)
    tokens = sum(run.tokens for run in drafted) / sequence_steps
    base = median(run.seconds / max(1.0, run.steps / batch) for run in plain)
    per_step = drafts / sequence_steps
    c = speculation.costs.draft_seconds(batch) / base
    v = (speculation.costs.step_seconds(batch + round(per_step * batch)) or base) / (
        speculation.costs.step_seconds(batch) or base
    )
    return SpeedUp(
        task,
        batch,
        gamma,
        sum(run.accepted for run in drafted) / max(1, drafts),
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
) -> tuple[TimedRun, list[list[int]]]:
    """Decode prompts together on an idle engine, with this speculation or none.

    Returns the timed run, from the last first token to the first finished request, and all tokens by prompt.
    Raises RuntimeError if a request fails.
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
        # If a request has finished already, the remaining ones are timed.
        complete = len(engine.requests) == len(requests)
        while engine.busy and (not complete or len(engine.requests) == len(requests)):
            step()
        seconds = time.perf_counter() - began
        counts = [now - then for now, then in zip(_counts(requests, outputs), before, strict=True)]
        while engine.busy:
            step()
    return TimedRun(seconds, *counts), list(outputs.values())


def _counts(requests: Sequence[Request], outputs: dict[str, list[int]]) -> tuple[int, ...]:
    """Emitted tokens, steps of sequences, drafted and accepted tokens so far."""
    metrics = [request.metrics for request in requests]
    totals = (sum(getattr(metric, name) for metric in metrics) for name in ("steps", "drafted", "accepted"))
    return sum(map(len, outputs.values())), *totals


def theory(rows: Sequence[SpeedUp]) -> list[tuple[int, float]]:
    """Predicted speed-up of one task at one batch size: (gamma, speed-up) for each gamma from 0 to the largest measured one.

    A share s of the steps has a draft, whose tokens are accepted with probability alpha; both come from the least measured
    gamma. A step gives 1 + s (E(alpha, gamma) - 1) tokens and costs s gamma c + v, with v interpolated linearly.
    """
    rows = sorted((row for row in rows if row.gamma), key=lambda row: row.gamma)
    least, c = rows[0], median(row.c for row in rows)
    share = min(1.0, least.drafted / least.gamma)
    known = [(0, 1.0), *((row.gamma, row.v) for row in rows)]
    line = [(0, 1.0)]
    for gamma in range(1, rows[-1].gamma + 1):
        (low, below), (high, above) = next(pair for pair in pairwise(known) if pair[1][0] >= gamma)
        v = below + (above - below) * (gamma - low) / (high - low)
        line.append((gamma, (1 + share * (expected_tokens(least.acceptance, gamma) - 1)) / (share * gamma * c + v)))
    return line


def lines(rows: Sequence[SpeedUp]) -> list[Line]:
    """Curves of gamma against speed-up, measured and (dashed) predicted, of each task at the least batch size.

    Raises ValueError if no gamma of 1 or more was measured.
    """
    rows = [row for row in rows if row.gamma and row.batch == min(other.batch for other in rows)]
    if not rows:
        raise ValueError("nothing to draw: measure some gamma of 1 or more")
    curves = []
    for task in dict.fromkeys(row.task for row in rows):
        mine = [row for row in rows if row.task == task]
        measured, predicted = [(0.0, 1.0), *sorted((float(row.gamma), row.measured) for row in mine)], theory(mine)
        curves += [_line(task, measured), _line(task, predicted, dashed=True)]
    return curves


def _line(name: str, points: Sequence[tuple[float, float]], dashed: bool = False) -> Line:
    return Line(name, [x for x, _ in points], [y for _, y in points], dashed)
