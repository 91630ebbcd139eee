"""What speculation gains, and why: acceptance, tokens per step, what drafting and verifying cost, predicted and measured."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.drafting.speculation import Speculation
from headrace.llm import LLM
from headrace.params import SamplingParams

AUTO = 0  # a gamma: the controller's own choice, step by step


@dataclass(slots=True)
class Row:
    """One task at one batch size and gamma. Times are in plain steps of that batch."""

    task: str
    batch: int
    gamma: int
    acceptance: float  # accepted / drafted
    tokens: float  # a sequence's tokens per step
    c: float  # a draft step
    v: float  # a verification step, as wide as they were on average
    predicted: float  # tokens / (gamma c + v)
    measured: float  # median over rounds of plain seconds / speculative seconds
    worst: float

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Timed:
    seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int


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
    try:
        for task, prompts in tasks.items():
            for batch in batches:
                groups = [prompts[at : at + batch] for at in range(0, len(prompts) - batch + 1, batch)]
                if not groups:
                    say(f"{task}: fewer than {batch} prompts, so batch {batch} is left out")
                    continue
                for gamma in gammas:
                    made = Speculation(ours.drafters, llm.memory_plan.max_model_len, gamma or None)
                    rows.append(row := _row(llm, task, batch, gamma, groups, made, params, rounds))
                    say(f"{task}, batch {batch}, gamma {gamma or 'auto'}: {row.measured:.2f}x")
    finally:
        llm.engine.speculation = ours
    return rows


def _row(
    llm: LLM, task: str, batch: int, gamma: int, groups: list[Any], made: Speculation, params: SamplingParams, rounds: int
) -> Row:
    plain, drafted, ratios = [], [], []
    for group in groups:
        _run(llm, group, None, params)  # prompts into the cache
        for _ in range(rounds):
            before, expected = _run(llm, group, None, params)
            after, got = _run(llm, group, made, params)
            if got != expected:
                raise RuntimeError(f"{task}: speculation changed an output; please report this")
            plain.append(before)
            drafted.append(after)
            ratios.append(before.seconds / after.seconds)
    steps = sum(one.steps for one in drafted)
    sequence_steps = max(1, steps)
    drafts = sum(one.drafted for one in drafted)
    tokens = sum(one.tokens for one in drafted) / sequence_steps
    base = statistics.median(one.seconds / (one.steps / batch) for one in plain)
    per_step = drafts / sequence_steps
    c = made.costs.draft(batch) / base
    v = (made.costs.step(batch + round(per_step * batch)) or base) / (made.costs.step(batch) or base)
    return Row(
        task,
        batch,
        gamma,
        sum(one.accepted for one in drafted) / max(1, drafts),
        tokens,
        c,
        v,
        tokens / (per_step * c + v),
        statistics.median(ratios),
        min(ratios),
    )


def _run(
    llm: LLM, prompts: list[Any], speculation: Speculation | None, params: SamplingParams
) -> tuple[Timed, list[list[int]]]:
    llm.engine.speculation = speculation
    began = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    metrics = [output.metrics for output in outputs]
    tokens = [output.outputs[0].token_ids for output in outputs]
    totals = (sum(getattr(one, name) for one in metrics) for name in ("steps", "drafted", "accepted"))
    return Timed(seconds, sum(map(len, tokens)), *totals), tokens


def svg(rows: Sequence[Row], width: int = 640, height: int = 360) -> str:
    """Gamma against speed-up as a drawing: measured a line, what card F2 predicts a dashed one, per task at batch 1."""
    rows = [row for row in rows if row.gamma and row.batch == min(each.batch for each in rows)]
    if not rows:
        raise ValueError("nothing to draw: measure some gamma of 1 or more")
    most = max(row.gamma for row in rows)
    top = max(1.5, 1.1 * max(max(row.measured, row.predicted) for row in rows))
    colours = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700", "#57606a")

    def at(gamma: float, gain: float) -> str:
        return f"{50 + gamma / most * (width - 180):.1f},{height - 40 - gain / top * (height - 70):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<polyline points="{at(0, top)} {at(0, 0)} {at(most, 0)}" fill="none" stroke="#57606a"/>',
        f'<polyline points="{at(0, 1)} {at(most, 1)}" stroke="#d0d7de" stroke-dasharray="2 3"/>',
        f'<text x="{width / 2 - 60}" y="{height - 8}">tokens drafted (gamma)</text>',
        '<text x="8" y="18">speed-up; dashed: predicted</text>',
    ]
    for gamma in sorted({row.gamma for row in rows}):
        x, y = at(gamma, 0).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 16:.1f}" text-anchor="middle">{gamma}</text>')
    for step in range(1, int(top) + 1):
        x, y = at(0, step).split(",")
        parts.append(f'<text x="{float(x) - 8:.1f}" y="{float(y) + 4:.1f}" text-anchor="end">{step}</text>')
    for number, task in enumerate(dict.fromkeys(row.task for row in rows)):
        colour = colours[number % len(colours)]
        mine = sorted((row for row in rows if row.task == task), key=lambda row: row.gamma)
        for name, dash in (("measured", ""), ("predicted", ' stroke-dasharray="5 4"')):
            points = " ".join([at(0, 1), *(at(row.gamma, getattr(row, name)) for row in mine)])
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{width - 120}" y="{30 + 18 * number}" fill="{colour}">{task}</text>')
    return "\n".join([*parts, "</svg>\n"])
