"""Figures of a load: percentiles of the times, throughput, goodput."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.bench.load.client import Answer
from headrace.bench.load.drive import Run

SHARES = (50, 75, 90, 95, 99)
SLO = ("ttft", "tpot", "e2e")


def times(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Seconds of all answers: to the first token (ttft) and to the last (e2e) from when the request was due, between two
    events (itl), and per token after the first (tpot)."""
    found: dict[str, list[float]] = {"ttft": [], "itl": [], "tpot": [], "e2e": []}
    for answer in answers:
        for name, value in _of(answer).items():
            found[name].append(value)
        found["itl"] += np.diff(answer.times).tolist()
    return found


def _of(answer: Answer) -> dict[str, float]:
    if not answer.times:
        return {}
    made = {"ttft": answer.times[0] - answer.due, "e2e": answer.times[-1] - answer.due}
    if answer.output_tokens > 1:
        made["tpot"] = (answer.times[-1] - answer.times[0]) / (answer.output_tokens - 1)
    return made


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50 to p99 and the largest; None of nothing."""
    if not values:
        return None
    ranks = np.percentile(values, SHARES)
    named = {f"p{share}": float(value) for share, value in zip(SHARES, ranks, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(max(values))}


def parse_slo(text: str) -> dict[str, float]:
    """Limits in seconds, as in "ttft:0.5,tpot:0.05". Raises ValueError."""
    limits = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition(":")
        if name not in SLO:
            raise ValueError(f"there is no limit {name!r}; give some of {', '.join(SLO)}, as in ttft:0.5,tpot:0.05")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"{part!r}: a limit is a number of seconds, as in ttft:0.5") from None
    return limits


def keeps(answer: Answer, limits: dict[str, float]) -> bool:
    """Whether an answer came whole and within the limits."""
    made = _of(answer)
    return answer.error is None and all(made.get(name, 0.0) <= limit for name, limit in limits.items())


def summary(run: Run, limits: dict[str, float]) -> dict[str, Any]:
    """Plain data of a load, times in seconds."""
    good = [answer for answer in run.answers if answer.error is None]
    tokens = sum(answer.output_tokens for answer in good)
    made: dict[str, Any] = {
        "requests": len(run.answers),
        "failed": len(run.answers) - len(good),
        "errors": sorted({answer.error for answer in run.answers if answer.error is not None})[:10],
        "seconds": run.seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in good),
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "output_tokens": tokens,
        "requests_per_s": len(good) / run.seconds,
        "output_tokens_per_s": tokens / run.seconds,
        "total_tokens_per_s": (tokens + sum(answer.prompt_tokens for answer in good)) / run.seconds,
        "events_per_token": sum(len(answer.times) for answer in good) / max(tokens, 1),
        "sent_late_max": max((answer.sent - answer.due for answer in run.answers if answer.sent), default=0.0),
        "client_cpu_s": run.client_cpu,
        "cpu_us_per_token": {str(pid): 1e6 * cpu / max(tokens, 1) for pid, cpu in run.watched_cpu.items()},
    }
    for name, values in times(good).items():
        made[name] = percentiles(values)
    if limits:
        kept = sum(keeps(answer, limits) for answer in run.answers)
        made["slo"] = {"limits": limits, "share": kept / len(run.answers), "goodput_requests_per_s": kept / run.seconds}
    return made
