"""Two claims about latency, measured on a server: prompts cost little time, greedy decoding is the fastest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import median

from headrace.bench.load.client import Answer, Target
from headrace.bench.load.drive import drive
from headrace.bench.load.summary import times
from headrace.bench.load.workload import Job

GREEDY = {"temperature": 0.0}
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True, slots=True)
class First:
    """Time to the first token of prompts of one length: seconds, medians; `step`: one more token of the answer."""

    length: int
    ttft: float
    step: float

    @property
    def steps(self) -> float:
        """How many tokens of an answer the first one costs; NaN where answers came in one piece."""
        return _ratio(self.ttft, self.step)


def first_tokens(target: Target, lengths: Sequence[int], rounds: int, say: Callable[[str], None]) -> list[First]:
    """One request at a time, no prompt twice. Raises ValueError where a request fails."""
    found = []
    for length in lengths:
        jobs = [Job(0.0, length, 16, seed=length * 1000 + number) for number in range(rounds)]
        made = times(_good(drive(target, jobs, at_once=1).answers))
        found.append(First(length, median(made["ttft"]), median(made["tpot"])))
        say(f"{length} tokens: {found[-1].ttft * 1000:.1f} ms")
    return found


@dataclass(frozen=True, slots=True)
class Compared:
    """Time per token at `at_once` requests, greedy and sampled: seconds, medians; and the ratio of each pair of rounds."""

    at_once: int
    greedy: float
    sampled: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return _ratio(self.sampled, self.greedy)


def greedy_and_sampling(target: Target, at_once: int, output: int, rounds: int) -> Compared:
    """The same prompts greedy and sampled in turns; the prompts' own time is not counted. Raises ValueError."""
    pairs = []
    for number in range(rounds):
        jobs = [Job(0.0, 64, output, seed=one) for one in range(at_once)]
        modes = [GREEDY, SAMPLING] if number % 2 == 0 else [SAMPLING, GREEDY]
        speed = {}
        for mode in modes:
            asked = replace(target, extra={**target.extra, **mode})
            speed[mode is GREEDY] = median(times(_good(drive(asked, jobs, at_once=at_once).answers))["tpot"])
        pairs.append((speed[True], speed[False]))
    greedy, sampled = (median(pair[side] for pair in pairs) for side in (0, 1))
    return Compared(at_once, greedy, sampled, tuple(_ratio(b, a) for a, b in pairs))


def _ratio(one: float, other: float) -> float:
    """NaN where there was no time between tokens to divide by: this client read whole answers at once."""
    return one / other if other else nan


def _good(answers: Sequence[Answer]) -> Sequence[Answer]:
    for answer in answers:
        if answer.error is not None:
            raise ValueError(f"a request failed: {answer.error}")
        if answer.output_tokens < 2:
            raise ValueError("the server ended an answer after its first token; it must know ignore_eos")
    return answers
