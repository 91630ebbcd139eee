"""Two latency comparisons on a server: first token by prompt length, and greedy decoding against sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import median

from headrace.bench.figures import Column
from headrace.bench.load.client import Target, TimedAnswer
from headrace.bench.load.drive import drive
from headrace.bench.load.summary import times
from headrace.bench.load.workload import ScheduledRequest

FIRST_TOKEN_COLUMNS = (
    Column("prompt tokens", "{0.length}"),
    Column("first token ms", lambda row: f"{row.ttft * 1000:.2f}"),
    Column("ms a prompt token", lambda row: f"{row.ttft / row.length * 1000:.2f}"),
    Column("in tokens of the answer", "{0.steps:.1f}"),
)
SAMPLING_COLUMNS = (
    Column("at once", "{0.at_once}"),
    Column("greedy ms a token", lambda row: f"{row.greedy * 1000:.2f}"),
    Column("sampled ms a token", lambda row: f"{row.sampled * 1000:.2f}"),
    Column("ratio", "{0.ratio:.3f}"),
    Column("least", lambda row: f"{min(row.ratios):.3f}"),
    Column("most", lambda row: f"{max(row.ratios):.3f}"),
)
GREEDY = {"temperature": 0.0}
SAMPLING = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True, slots=True)
class FirstTokenTime:
    """Median seconds for prompts of `length` tokens: `ttft` to the first token, `step` for each later token."""

    length: int
    ttft: float
    step: float

    @property
    def steps(self) -> float:
        """Time to the first token in later tokens; NaN if an answer arrived in one piece."""
        return _ratio(self.ttft, self.step)


def first_tokens(target: Target, lengths: Sequence[int], rounds: int, say: Callable[[str], None]) -> list[FirstTokenTime]:
    """Measure the time to the first token for prompts of each length, one request at a time, each with a new prompt.

    Raises ValueError if a request fails.
    """
    results = []
    for length in lengths:
        requests = [ScheduledRequest(0.0, length, 16, seed=length * 1000 + number) for number in range(rounds)]
        seconds = times(_good(drive(target, requests, at_once=1).answers))
        results.append(FirstTokenTime(length, median(seconds["ttft"]), median(seconds["tpot"])))
        say(f"{length} tokens: {results[-1].ttft * 1000:.1f} ms")
    return results


@dataclass(frozen=True, slots=True)
class SamplingCost:
    """Median seconds per token at `at_once` requests, greedy and sampled, and the ratio of each pair of rounds."""

    at_once: int
    greedy: float
    sampled: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Ratio of the medians."""
        return _ratio(self.sampled, self.greedy)


def greedy_and_sampling(target: Target, at_once: int, output: int, rounds: int) -> SamplingCost:
    """Alternate greedy and sampled answers to the same prompts; the time of the prompts is not counted. Raises ValueError."""
    pairs = []
    for number in range(rounds):
        requests = [ScheduledRequest(0.0, 64, output, seed=one) for one in range(at_once)]
        modes = [GREEDY, SAMPLING] if number % 2 == 0 else [SAMPLING, GREEDY]
        speed = {}
        for mode in modes:
            variant = replace(target, extra={**target.extra, **mode})
            speed[mode is GREEDY] = median(times(_good(drive(variant, requests, at_once=at_once).answers))["tpot"])
        pairs.append((speed[True], speed[False]))
    greedy, sampled = (median(pair[side] for pair in pairs) for side in (0, 1))
    return SamplingCost(at_once, greedy, sampled, tuple(_ratio(b, a) for a, b in pairs))


def _ratio(one: float, other: float) -> float:
    """NaN if there is no time between tokens: the client received whole answers at once."""
    return one / other if other else nan


def _good(answers: Sequence[TimedAnswer]) -> Sequence[TimedAnswer]:
    for answer in answers:
        if answer.error is not None:
            raise ValueError(f"a request failed: {answer.error}")
        if answer.output_tokens < 2:
            raise ValueError("the server ended an answer after its first token; it must support ignore_eos")
    return answers
