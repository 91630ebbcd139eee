"""Arithmetic of pipelines: when each stage works on each batch, and which share of the time stages idle (bubbles).

Source: Huang et al., "GPipe", arXiv 1811.06965. Inference has no backward pass, so only the forward half is here.
"""

from collections.abc import Sequence
from typing import TypeVar

Time = TypeVar("Time", int, float)


def one_shot_bubble(stages: int, batches: int) -> float:
    """Share of the stages' time that is idle when `batches` equal batches pass once: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (batches + stages - 1)


def chunk_speedup(stages: int, chunks: int) -> float:
    """Speed of a prompt in equal chunks, over one process with the threads of one stage: C p / (C + p - 1)."""
    return chunks * stages / (chunks + stages - 1)


def decode_utilisation(stages: int, lanes: int) -> float:
    """Share of the stages' time in use when `lanes` batches decode in turns: min(k, p) / p. The next token of a sequence
    depends on its last one, so that one lane keeps one stage busy."""
    return min(lanes, stages) / stages


def schedule(durations: Sequence[Sequence[Time]]) -> list[list[tuple[Time, Time]]]:
    """Begin and end of each batch on each stage, from durations [stage][batch]: a batch begins when the stage before has ended
    it and this stage has ended the batch before."""
    ends: list[Time] = [type(durations[0][0])()] * len(durations[0])
    times = []
    for stage in durations:
        spans: list[tuple[Time, Time]] = []
        for batch, duration in enumerate(stage):
            begin = max(ends[batch], spans[-1][1]) if spans else ends[batch]
            spans.append((begin, begin + duration))
        ends = [end for _, end in spans]
        times.append(spans)
    return times


def decode_schedule(durations: Sequence[Time], lanes: int, steps: int) -> list[list[tuple[Time, Time]]]:
    """Begin and end of each step on each stage, when `lanes` batches take turns for `steps` steps each. durations: of a step on
    each stage. A lane's step begins when the lane's step before has left the last stage."""
    free: list[Time] = [type(durations[0])()] * len(durations)
    left: list[Time] = [type(durations[0])()] * lanes
    times: list[list[tuple[Time, Time]]] = [[] for _ in durations]
    for number in range(lanes * steps):
        lane, at = number % lanes, left[number % lanes]
        for stage, duration in enumerate(durations):
            begin = max(at, free[stage])
            at = free[stage] = begin + duration
            times[stage].append((begin, at))
        left[lane] = at
    return times


def idle_share(times: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Share of the stages' time, between the first begin and the last end, in which they do nothing."""
    first = min(begin for stage in times for begin, _ in stage)
    last = max(end for stage in times for _, end in stage)
    busy = sum(end - begin for stage in times for begin, end in stage)
    return 1 - busy / (len(times) * (last - first))
