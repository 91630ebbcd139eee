"""Figures of a load: percentiles of latencies, throughput, goodput."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.bench.load.client import Target, TimedAnswer, cached_so_far
from headrace.bench.load.drive import LoadRun, drive
from headrace.bench.load.workload import ScheduledRequest

SHARES = (50, 75, 90, 95, 99)  # percent
SLO = ("ttft", "tpot", "e2e")


def times(answers: Sequence[TimedAnswer]) -> dict[str, list[float]]:
    """Latencies of all answers in seconds.

    ttft, e2e: from the due time to the first and last token. itl: between two events. tpot: per token after the first.
    """
    values: dict[str, list[float]] = {"ttft": [], "itl": [], "tpot": [], "e2e": []}
    for answer in answers:
        for name, value in _times_of(answer).items():
            values[name].append(value)
        values["itl"] += np.diff(answer.times).tolist()
    return values


def _times_of(answer: TimedAnswer) -> dict[str, float]:
    if not answer.times:
        return {}
    by_name = {"ttft": answer.times[0] - answer.due, "e2e": answer.times[-1] - answer.due}
    if answer.output_tokens > 1:
        by_name["tpot"] = (answer.times[-1] - answer.times[0]) / (answer.output_tokens - 1)
    return by_name


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50 to p99 and maximum; None without values."""
    if not values:
        return None
    ranks = np.percentile(values, SHARES)
    named = {f"p{share}": float(value) for share, value in zip(SHARES, ranks, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(max(values))}


def parse_slo(text: str) -> dict[str, float]:
    """Limits in seconds by name, from a text like "ttft:0.5,tpot:0.05". Raises ValueError."""
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


def meets_limits(answer: TimedAnswer, limits: dict[str, float]) -> bool:
    """Whether an answer is complete and within the limits."""
    seconds = _times_of(answer)
    return answer.error is None and all(seconds.get(name, 0.0) <= limit for name, limit in limits.items())


def summary(run: LoadRun, limits: dict[str, float]) -> dict[str, Any]:
    """Figures of a load for the JSON file, times in seconds."""
    good = [answer for answer in run.answers if answer.error is None]
    tokens = sum(answer.output_tokens for answer in good)
    figures: dict[str, Any] = {
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
        figures[name] = percentiles(values)
    if limits:
        kept = sum(meets_limits(answer, limits) for answer in run.answers)
        figures["slo"] = {"limits": limits, "share": kept / len(run.answers), "goodput_requests_per_s": kept / run.seconds}
    return figures


def measure(
    target: Target,
    requests: Sequence[ScheduledRequest],
    at_once: int | None,
    watch: Sequence[int],
    limits: dict[str, float],
    done: Callable[[int], None],
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Send a load; returns its figures and the latencies of all complete answers in seconds.

    at_once, watch, done: see `drive`. limits: seconds by name, as `parse_slo` returns them.
    """
    before = cached_so_far(target)
    run = drive(target, requests, at_once, watch, done=done)
    figures = summary(run, limits)
    # The usage of an answer may lack cached tokens.
    if before is not None and (after := cached_so_far(target)) is not None:
        figures["cached_tokens"] = max(figures["cached_tokens"], int(after - before))
    return figures, times([answer for answer in run.answers if answer.error is None])
