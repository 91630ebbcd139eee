"""Self-speculation: which span of a model drafts for it. A greedy search measures what pays.

Either the first layers draft, through the model's own head (LayerSkip, Elhoushi et al. 2024), or all layers without some
attention and MLP sublayers (Draft & Verify, Zhang et al. 2023, which searches by Bayesian optimisation). Untrained models lose
much by either; that nothing pays is a result too, and then nothing is saved.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.params import SamplingParams
from headrace.data.plan import Feed, NewSlot, Sample, Score, Scores, StepPlan, TableDelta
from headrace.drafting.controller import expected
from headrace.runner.runner import Runner
from headrace.runner.span import ATTENTION, MLP, WHOLE, Span

SLOT = -1  # no sequence of the engine has it: what the next plan frees is still there
MOST = 5  # tokens of a chain


@dataclass(frozen=True, slots=True)
class Rated:
    """A span with its share of agreeing tokens, its cost in target steps, and the speed-up these promise at batch 1."""

    span: Span
    alpha: float
    cost: float
    speedup: float
    gamma: int

    @property
    def name(self) -> str:
        left_out = sum(bits.bit_count() for bits in self.span.skips)
        return f"the first {self.span.layers} layers" if self.span.layers else f"without {left_out} sublayers"

    @property
    def summary(self) -> str:
        return f"{self.name}: agreement {self.alpha:.3f}, cost {self.cost:.3f}, speed-up {self.speedup:.2f}"


class Trial:
    """Rates spans of a model on texts that it wrote itself. The runner must be idle: its pool is written."""

    def __init__(self, runner: Runner, texts: Sequence[tuple[list[int], int]], block_size: int, layers: int) -> None:
        """`texts`: tokens, and where what the model wrote begins."""
        self.runner = runner
        self.texts = list(texts)
        self.layers = layers
        self.block_size = block_size
        self.verify = self._verify_costs()

    def sublayers(self, layer: int) -> tuple[int, ...]:
        """What of a layer may be left out: not the attention whose K and V a layer above reads."""
        above = self.runner.target.config.layers[layer + 1 :]
        return (MLP,) if above and above[0].shares else (ATTENTION, MLP)

    def rate(self, span: Span, repeats: int = 5) -> Rated:
        """Agreement over all texts, cost by the clock, and the speed-up of the best chain length."""
        agreed = [same for text in self.texts for same in self._agreement(span, *text)]
        alpha = sum(agreed) / len(agreed)
        cost = self._seconds(0, span, repeats) / self.verify[0]
        return self._judge(span, alpha, cost)

    def _judge(self, span: Span, alpha: float, cost: float) -> Rated:
        gains = [expected(alpha, g) / (g * cost + self.verify[g] / self.verify[0]) for g in range(1, MOST + 1)]
        return Rated(span, alpha, cost, max(gains), 1 + gains.index(max(gains)))

    def _verify_costs(self) -> list[float]:
        """Seconds of the target's step by the number of drafted tokens."""
        self._seconds(0, WHOLE, 2)
        return [self._seconds(nodes, WHOLE, 5) for nodes in range(MOST + 1)]

    def _seconds(self, nodes: int, span: Span, repeats: int) -> float:
        """Median seconds of a step with one known token, and a chain, at the end of the first text."""
        tokens, _ = self.texts[0]
        feed = Feed(SLOT, len(tokens) - 1, 1, (), (Sample(),), nodes=tuple(tokens[:nodes]), parents=tuple(range(-1, nodes - 1)))
        plan = StepPlan(0, feeds=[feed])
        taken = []
        with self._slot(tokens):
            self.runner.run(StepPlan(0, feeds=[Feed(SLOT, 0, len(tokens))]))
            for _ in range(repeats):
                began = time.perf_counter()
                self.runner.run(plan, span)
                taken.append(time.perf_counter() - began)
        return sorted(taken)[repeats // 2]

    def _agreement(self, span: Span, tokens: list[int], start: int) -> list[bool]:
        """For each token the model wrote: whether the span finds it the likeliest."""
        return likeliest(self.runner, tokens, self.block_size, span=span)[start - 1 :]

    def _slot(self, tokens: list[int]) -> "ScratchLive":
        return ScratchLive(self.runner, tokens, self.block_size)


def likeliest(runner: Runner, tokens: list[int], block_size: int, source: Sequence[int] = (), span: Span = WHOLE) -> list[bool]:
    """Of each token but the first whether the model, or a span of it, finds it the likeliest behind those before; `source`:
    what an encoder-decoder writes from. Nothing else may be in the pool."""
    with ScratchLive(runner, tokens, block_size, source):
        ((answer,),) = runner.run(StepPlan(0, feeds=[Feed(SLOT, 0, len(tokens), (), (Score(),))]), span).feeds
    assert isinstance(answer, Scores)
    return [score.rank == 1 for score in answer.scores]


class ScratchLive:
    """A slot with a text, for as long as a `with` lasts; `source`: what an encoder-decoder has written it from."""

    def __init__(self, runner: Runner, tokens: list[int], block_size: int, source: Sequence[int] = ()) -> None:
        self.runner = runner
        params, reads = SamplingParams(temperature=0.0), len(source)
        new = NewSlot(slot=SLOT, prompt_len=len(tokens), tokens=list(tokens), params=params, reads=reads)
        own = -(-(len(tokens) + MOST) // block_size)
        blocks = list(range(own + -(-reads // block_size)))
        self.plan = StepPlan(0, new=[new], tables=[TableDelta(SLOT, 0, 0, blocks[:own])])
        if reads:
            self.plan.tables.append(TableDelta(SLOT, 1, 0, blocks[own:]))
        self.sources = [(source, blocks[own:])] if reads else []

    def __enter__(self) -> None:
        self.runner.execute(self.plan)
        if self.sources:
            self.runner.target.encode(self.sources)

    def __exit__(self, *error: Any) -> None:
        self.runner.execute(StepPlan(0, free=[SLOT]))


def search(trial: Trial, seconds: float, say: Callable[[Rated], None] = lambda rated: None) -> Rated:
    """The best span found: early exits first, then sublayers left out one by one, the one that costs least agreement for its
    time each round, as long as anything is gained or might be. Ends after `seconds`."""
    until = time.monotonic() + seconds
    best = max((trial.rate(Span(layers=n)) for n in range(2, trial.layers, max(1, trial.layers // 8))), key=_speedup)
    say(best)
    skips, since = [0] * trial.layers, 0
    choices = [(layer, bit) for layer in range(trial.layers) for bit in trial.sublayers(layer)]
    while choices and since < 6 and time.monotonic() < until:
        round_ = []
        for layer, bit in choices:
            if time.monotonic() > until:
                break
            tried = list(skips)
            tried[layer] |= bit
            round_.append((trial.rate(Span(skips=tuple(tried)), 3), (layer, bit)))
        if not round_:
            break
        round_.sort(key=lambda pair: _speedup(pair[0]), reverse=True)
        rated, (layer, bit) = round_[0]
        skips[layer] |= bit
        # What did worst in this round is not looked at in the next: the search stays affordable.
        choices = [pair for _, pair in round_[1 : 1 + max(4, len(round_) * 2 // 3)]]
        since = 0 if rated.speedup > best.speedup else since + 1
        best = max(best, rated, key=_speedup)
        say(rated)
    return best


def _speedup(rated: Rated) -> float:
    return rated.speedup
