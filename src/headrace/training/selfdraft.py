"""Self-speculation: a greedy search for the span of a model's own layers that drafts fastest.

A span is either the first layers with the model's head, or all layers without some attention and MLP sublayers. In untrained
models often no span pays.

Sources: LayerSkip, Elhoushi et al., arXiv 2404.16710; Draft & Verify, Zhang et al., arXiv 2309.08168 (which searches by
Bayesian optimisation).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.data.params import SamplingParams
from headrace.data.plan import Feed, NewSlot, Sample, Score, Scores, StepPlan, TableDelta
from headrace.data.progress import counted
from headrace.data.sources import Tokens
from headrace.drafting.policy import expected_tokens
from headrace.runner.runner import Runner
from headrace.runner.span import ATTENTION, MLP, WHOLE, Span

# Slot that no sequence of the engine uses.
SLOT = -1
# Longest draft in tokens.
LONGEST_DRAFT = 5


@dataclass(frozen=True, slots=True)
class SpanReport:
    """Measurements of one span.

    alpha: share of tokens that the span predicts as the model does. cost: of a draft step, in steps of the model.
    speedup, gamma: best speed-up that both promise at batch 1, and the number of drafted tokens that gives it.
    """

    span: Span
    alpha: float
    cost: float
    speedup: float
    gamma: int

    @property
    def name(self) -> str:
        if self.span.layers:
            return f"the first {counted(self.span.layers, 'layers')}"
        return f"without {counted(sum(bits.bit_count() for bits in self.span.skips), 'sublayers')}"

    @property
    def summary(self) -> str:
        return f"{self.name}: agreement {self.alpha:.3f}, cost {self.cost:.3f}, speed-up {self.speedup:.2f}"


class SpanTrial:
    """Measures spans of a model on texts that it wrote itself. The runner must be idle: its K/V pool is overwritten."""

    def __init__(self, runner: Runner, texts: Sequence[tuple[list[int], int]], block_size: int, layers: int) -> None:
        """texts: token ids, and the index at which the model's own text begins."""
        self.runner = runner
        self.texts = list(texts)
        self.layers = layers
        self.block_size = block_size
        self.verify = self._verify_costs()

    def sublayers(self, layer: int) -> tuple[int, ...]:
        """Return the sublayers of a layer that a span may skip: not an attention whose K and V a layer above reads."""
        read = any(above.kv_from == layer for above in self.runner.target.config.layers)
        return (MLP,) if read else (ATTENTION, MLP)

    def rate(self, span: Span, repeats: int = 5) -> SpanReport:
        """Measure a span: agreement over all texts, and the median time of `repeats` steps."""
        agrees = [same for text in self.texts for same in self._agreement(span, *text)]
        alpha = sum(agrees) / len(agrees)
        cost = self._seconds(0, span, repeats) / self.verify[0]
        return self._report(span, alpha, cost)

    def repeat(self, report: SpanReport, rounds: int = 5) -> tuple[float, float]:
        """Measure the times of the model and of a span `rounds` times again. Returns the lowest and the highest speed-up."""
        speedups = []
        for _ in range(rounds):
            self.verify = self._verify_costs()
            cost = self._seconds(0, report.span, 5) / self.verify[0]
            speedups.append(self._report(report.span, report.alpha, cost).speedup)
        return min(speedups), max(speedups)

    def _report(self, span: Span, alpha: float, cost: float) -> SpanReport:
        plain, gammas = self.verify[0], range(1, LONGEST_DRAFT + 1)
        speedups = [expected_tokens(alpha, gamma) / (gamma * cost + self.verify[gamma] / plain) for gamma in gammas]
        return SpanReport(span, alpha, cost, max(speedups), 1 + speedups.index(max(speedups)))

    def _verify_costs(self) -> list[float]:
        """Return the seconds of the model's step by number of drafted tokens."""
        self._seconds(0, WHOLE, 2)
        return [self._seconds(nodes, WHOLE, 5) for nodes in range(LONGEST_DRAFT + 1)]

    def _seconds(self, nodes: int, span: Span, repeats: int) -> float:
        """Return the median seconds of a step with one known token and `nodes` drafted ones, at the end of the first text."""
        tokens, _ = self.texts[0]
        feed = Feed(SLOT, len(tokens) - 1, 1, (), (Sample(),), nodes=tuple(tokens[:nodes]), parents=tuple(range(-1, nodes - 1)))
        plan = StepPlan(0, feeds=[feed])
        seconds = []
        with scratch_slot(self.runner, tokens, self.block_size):
            self.runner.run(StepPlan(0, feeds=[Feed(SLOT, 0, len(tokens))]))
            for _ in range(repeats):
                start = time.perf_counter()
                self.runner.run(plan, span)
                seconds.append(time.perf_counter() - start)
        return sorted(seconds)[repeats // 2]

    def _agreement(self, span: Span, tokens: list[int], start: int) -> list[bool]:
        """Return for each token of the model's own text whether it is the span's likeliest."""
        return likeliest(self.runner, tokens, self.block_size, span=span)[start - 1 :]


def likeliest(runner: Runner, tokens: list[int], block_size: int, source: Sequence[int] = (), span: Span = WHOLE) -> list[bool]:
    """Return for each token but the first whether it is the likeliest prediction of the model, or of a span of it.

    source: of an encoder-decoder. Overwrites the K/V pool.
    """
    with scratch_slot(runner, tokens, block_size, source):
        ((answer,),) = runner.run(StepPlan(0, feeds=[Feed(SLOT, 0, len(tokens), (), (Score(),))]), span).feeds
    assert isinstance(answer, Scores)
    return [score.rank == 1 for score in answer.scores]


@contextmanager
def scratch_slot(runner: Runner, tokens: list[int], block_size: int, source: Sequence[int] = ()) -> Iterator[None]:
    """A slot with a text, outside the engine, while the context is open. source: of an encoder-decoder."""
    own = -(-(len(tokens) + LONGEST_DRAFT) // block_size)
    blocks = list(range(own + -(-len(source) // block_size)))
    params = SamplingParams(temperature=0.0)
    new = NewSlot(slot=SLOT, prompt_len=len(tokens), tokens=list(tokens), params=params, reads=len(source))
    plan = StepPlan(0, new=[new], tables=[TableDelta(SLOT, 0, 0, blocks[:own])])
    if source:
        plan.tables.append(TableDelta(SLOT, 1, 0, blocks[own:]))
    runner.execute(plan)
    if source:
        runner.target.encode([(Tokens(tuple(source)), blocks[own:])])
    try:
        yield
    finally:
        runner.execute(StepPlan(0, free=[SLOT]))


def search(trial: SpanTrial, seconds: float, on_report: Callable[[SpanReport], None] = lambda report: None) -> SpanReport:
    """Search the span with the best speed-up, for at most `seconds`.

    First measures early exits. Then skips sublayers one by one, in each round the one with the best speed-up, until six rounds
    in a row gained nothing. on_report: receives the best early exit, and the best span of each round.
    """
    deadline = time.monotonic() + seconds
    best = max((trial.rate(Span(layers=n)) for n in range(2, trial.layers, max(1, trial.layers // 8))), key=_speedup)
    on_report(best)
    skips, rounds_without_gain = [0] * trial.layers, 0
    choices = [(layer, bit) for layer in range(trial.layers) for bit in trial.sublayers(layer)]
    while choices and rounds_without_gain < 6 and time.monotonic() < deadline:
        round_ = []
        for layer, bit in choices:
            if time.monotonic() > deadline:
                break
            candidate = list(skips)
            candidate[layer] |= bit
            round_.append((trial.rate(Span(skips=tuple(candidate)), 3), (layer, bit)))
        if not round_:
            break
        round_.sort(key=lambda pair: _speedup(pair[0]), reverse=True)
        report, (layer, bit) = round_[0]
        skips[layer] |= bit
        # The worst third of this round is dropped for the next: this bounds the cost of the search.
        choices = [pair for _, pair in round_[1 : 1 + max(4, len(round_) * 2 // 3)]]
        rounds_without_gain = 0 if report.speedup > best.speedup else rounds_without_gain + 1
        best = max(best, report, key=_speedup)
        on_report(report)
    return best


def _speedup(report: SpanReport) -> float:
    return report.speedup
