"""Early exit of decoder tokens, unverified: an exit after some of the layers outputs the token if its confidence passes the
threshold. A cascade of two models works alike, with a smaller model in the exit's place.

deferred: K/V are exact. The layers above the exit lag, and later read the stored rows of the tokens they have not seen; a
cascade's larger model reads the tokens themselves. propagated, as in the paper: the exited row is used unchanged as the input
of each layer above, which makes approximate K/V of it.

Whether a token exits depends on the tokens before it, on which of their rows have exited, and on the request's parameters. It
does not depend on the lag, on chunks or on recomputation. Prompts always run through the full model.

Source: Schuster et al., "Confident Adaptive Language Modeling" (CALM), arXiv 2207.07061.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headrace.data.plan import Answer, Answers, Drawn, Exited, Failed, Feed, LogitRow, Logits, Ranked, StepOutput, Top
from headrace.runner.program import AnyLive, Program
from headrace.runner.span import WHOLE, Span
from headrace.runner.stored_rows import Rows, StoredRows

# Tokens that the upper layers may lag; the next token catches up. A step of eight rows takes little longer than one of one.
MOST_BEHIND = 7

# Runs a span that begins with hidden rows; returns the answers of each feed.
Rest = Callable[[list[Feed], list[AnyLive], Span, Rows], list[Answers]]


@dataclass(frozen=True, slots=True)
class Exit:
    """The layers of the target that run (`span`), and the program of the head, which starts from hidden rows.

    number: which of the trained exits it is. partial: the head chooses from a part of the vocabulary.
    """

    span: Span
    head: Program
    number: int = 0
    partial: bool = False

    def run(self, target: Program, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> list[Answers]:
        """Run the layers and the head; returns the answers of every feed. K/V are written in the layers that ran."""
        step = target.step()
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(msgspec.structs.replace(feed, wants=(), allowed=b""), live)
        return self.judge(feeds, lives, target.run(step, self.span, keep=True))

    def confidence(self, row: Any) -> float:
        """The exit classifier's probability that the head's token of a row [hidden] equals the full model's."""
        assert self.head.inputs is not None
        return self.head.inputs.confidence(self.number, row)

    def judge(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Any) -> list[Answers]:
        """The head's answers for the rows [n, hidden] after the exit's layers."""
        assert self.head.inputs is not None
        step = self.head.step()
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(feed, live)
        self.head.run(step, WHOLE, self.head.inputs.at_exit(self.number, rows))
        return [tuple(answers) for answers in step.answers()]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit's answers, its confidence, and whether the confidence passes the threshold."""

    answers: Answers
    confidence: float
    passed: bool


class EarlyExit:
    """A target with one exit; owned by a runner. kept: the rows at the exit of tokens that the upper layers have not seen."""

    def __init__(self, target: Program, exit: Exit, kept: StoredRows) -> None:
        self.target = target
        self.exit = exit
        self.kept = kept
        self.depth = exit.span.layers
        self.partial = exit.partial

    @contextmanager
    def exit_at(self, number: int, layers: int) -> Iterator[None]:
        """Exit after `layers` layers, by head `number`, while the context is open.

        No feed may lag meanwhile: the upper layers must have K/V of all earlier tokens.
        """
        before = self.exit
        self.exit, self.depth = Exit(Span(layers), before.head, number, before.partial), layers
        try:
            yield
        finally:
            self.exit, self.depth = before, before.span.layers

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        """Whether a token of any feed may exit, or an upper layer lags."""
        return any(feed.lag or _may_exit(feed, live) for feed, live in zip(feeds, lives, strict=True))

    def run(self, number: int, feeds: Sequence[Feed], lives: Sequence[AnyLive], rest: Rest) -> StepOutput:
        """Run step `number`: the layers below the exit for all feeds, then `rest`, the layers above, for as few feeds as
        possible."""
        rows, before = self._below(feeds, lives)
        verdicts = self._judge(feeds, lives, rows, before)
        output = StepOutput(number)
        above = self._run_upper(feeds, lives, rows, verdicts, rest, output)
        for at, (feed, live) in enumerate(zip(feeds, lives, strict=True)):
            here = verdicts.get(at)
            if here is None:
                output.feeds.append(above.get(at, ()))
            else:
                output.feeds.append(self._answers(here, above.get(at, ())))
            if _may_exit(feed, live):
                layers = self.depth if here is not None and here.passed else self.target.config.num_layers
                both = here is not None and live.params.audited
                votes = (*_tokens(here.answers), *_tokens(above[at])) if here is not None and both else ()
                output.exited[at] = Exited(layers, None if here is None else here.confidence, votes)
        return output

    def _answers(self, verdict: Verdict, full: Answers) -> Answers:
        """The answers of the exit or of the full model. Rows of logits for the caller's processors come with those of the other
        one, if both ran."""
        writes, other = (verdict.answers, full) if verdict.passed else (full, verdict.answers)
        layers = self.target.config.num_layers if verdict.passed else self.depth
        if len(other) != len(writes):
            return writes
        return tuple(
            LogitRow(one.row, two.row, layers) if isinstance(one, LogitRow) and isinstance(two, LogitRow) else one
            for one, two in zip(writes, other, strict=True)
        )

    def _runs_both(self, feed: Feed, live: AnyLive) -> bool:
        """Whether the full model runs even if the confidence passes: for an audit, and if the caller's processors could bar all
        tokens of the exit."""
        return live.params.audited or (self.partial and any(isinstance(want, Logits) for want in feed.wants))

    def _below(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> tuple[Rows, Rows]:
        """Rows [n, hidden] at the exit, and one layer below it if the saturation criterion needs them."""
        if not any(_may_exit(feed, live) and _saturates(live) for feed, live in zip(feeds, lives, strict=True)):
            return self._run(feeds, lives, Span(self.depth), None), None
        before = self._run(feeds, lives, Span(self.depth - 1), None)
        return self._run(feeds, lives, Span(self.depth, first=self.depth - 1), before), before

    def _run(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], span: Span, rows: Rows) -> Rows:
        step = self.target.step()
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(_without_wants(feed), live)
        return self.target.run(step, span, rows, keep=not span.fill)

    def _judge(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Rows, before: Rows) -> dict[int, Verdict]:
        """The exit's verdict on the last row of each feed that may exit and is past its prompt, by the feed's number."""
        places = list(_places(feeds))
        past = [at for at, feed in enumerate(feeds) if _is_past(feed, lives[at])]
        if not past:
            return {}
        tips = [places[at].stop - 1 for at in past]
        judgements = self.exit.judge([_last(feeds[at]) for at in past], [lives[at] for at in past], rows[tips])
        verdicts = {}
        for at, tip, (top, *answers) in zip(past, tips, judgements, strict=True):
            live = lives[at]
            by = live.params.sure_by
            if by == "saturation":
                confidence = _cosine(self._on_host(before, tip), self._on_host(rows, tip))
            elif by == "classifier":
                confidence = self.exit.confidence(self._on_host(rows, tip))
            else:
                confidence = _head_confidence(top, live)
            verdicts[at] = _verdict(live, tuple(answers), confidence)
        return verdicts

    def _on_host(self, rows: Rows, at: int) -> np.ndarray:
        row: np.ndarray = self.target.on_host(rows[at : at + 1])[0]
        return row

    def _run_upper(
        self,
        feeds: Sequence[Feed],
        lives: Sequence[AnyLive],
        rows: Rows,
        verdicts: dict[int, Verdict],
        rest: Rest,
        output: StepOutput,
    ) -> dict[int, Answers]:
        """Continue with the rows [n, hidden] at the exit. Sets the output's unfilled (or propagated) feeds; returns the full
        model's answers by feed."""
        output.unfilled = tuple(at for at, one in verdicts.items() if one.passed and self._stays(feeds[at], lives[at]))
        for at, place in enumerate(_places(feeds)):
            if at in output.unfilled:
                self._keep(feeds[at], lives[at], rows, place)
        return self._above(feeds, lives, rows, verdicts, output.unfilled, rest)

    def _stays(self, feed: Feed, live: AnyLive) -> bool:
        """Whether the upper layers skip a feed whose token exits, for now."""
        return feed.count == 1 and feed.lag < MOST_BEHIND and not self._runs_both(feed, live)

    def _keep(self, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> None:
        """Store the rows that the upper layers read later, of a feed whose token exited."""
        self.kept.store(feed, live.table, rows[place])

    def _upper_input(self, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> list[Rows]:
        """The rows that the upper layers start from: those of lagging tokens and those of the feed."""
        lagging = [self.kept.read(live.table, feed.start - feed.lag, feed.start)] if feed.lag else []
        return [*lagging, rows[place]]

    def _above(
        self,
        feeds: Sequence[Feed],
        lives: Sequence[AnyLive],
        rows: Rows,
        verdicts: dict[int, Verdict],
        unfilled: tuple[int, ...],
        rest: Rest,
    ) -> dict[int, Answers]:
        """The full model's answers by feed, for feeds that did not exit and for audits. Feeds that exited but may lag no
        further run along without wants."""
        going: list[Feed] = []
        numbers: list[int] = []
        parts: list[Rows] = []
        for at, (feed, place) in enumerate(zip(feeds, _places(feeds), strict=True)):
            if at in unfilled:
                continue
            parts += self._upper_input(feed, lives[at], rows, place)
            numbers.append(at)
            asks = at not in verdicts or not verdicts[at].passed or self._runs_both(feed, lives[at])
            start, count = feed.start - feed.lag, feed.count + feed.lag
            going.append(msgspec.structs.replace(feed if asks else _without_wants(feed), start=start, count=count, lag=0))
        if not going:
            return {}
        begin = self.kept.join(parts) if parts else None
        answers = rest(going, [lives[at] for at in numbers], Span(first=self.depth), begin)
        return dict(zip(numbers, answers, strict=True))


class PropagatingExit(EarlyExit):
    """Early exit without lag: an exited row is propagated to the layers above. All rows of a feed have one depth, so that
    recomputation gives the same bits: rows of a feed with a `depth` exit again, whatever the confidence."""

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        return any(feed.depth or _may_exit(feed, live) for feed, live in zip(feeds, lives, strict=True))

    def _run_upper(
        self,
        feeds: Sequence[Feed],
        lives: Sequence[AnyLive],
        rows: Rows,
        verdicts: dict[int, Verdict],
        rest: Rest,
        output: StepOutput,
    ) -> dict[int, Answers]:
        """Propagate the exited rows. An audit runs the full model first, and then replaces its K/V."""
        output.propagated = tuple(at for at, one in verdicts.items() if one.passed)
        assert all(feeds[at].count == 1 for at in output.propagated), "a token that may leave is fed alone"
        left = [at for at, feed in enumerate(feeds) if feed.depth or at in output.propagated]
        both = [at for at in left if at in verdicts and self._runs_both(feeds[at], lives[at])]
        going = [at for at in range(len(feeds)) if at not in left or at in both]
        places, above = list(_places(feeds)), dict[int, Answers]()

        def of(some: list[int]) -> tuple[list[Feed], list[AnyLive], Rows]:
            return [feeds[at] for at in some], [lives[at] for at in some], self.kept.join([rows[places[at]] for at in some])

        if going:
            fed, its, those = of(going)
            above = dict(zip(going, rest(fed, its, Span(first=self.depth), those), strict=True))
        if left:
            fed, its, those = of(left)
            self._run(fed, its, Span(first=self.depth, fill=True), those)
        return above


class TokenCascade(EarlyExit):
    """A target with a smaller model, which reads all feeds of requests that use the cascade. If its confidence does not pass,
    the target reads all tokens it has not seen, in one step, and outputs the token.

    Source: the fallback policy of Kim et al., "Speculative Decoding with Big Little Decoder" (BiLD), arXiv 2302.07863.
    """

    def __init__(self, target: Program, smaller: Program) -> None:
        self.target = target
        self.smaller = smaller
        self.depth = 0  # no layer of the target runs before the smaller model's answer
        self.partial = False

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        """Whether any feed belongs to a request that uses the cascade."""
        return any(live.params.leaves for live in lives)

    def _below(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> tuple[Rows, Rows]:
        return None, None

    def _judge(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Rows, before: Rows) -> dict[int, Verdict]:
        """Run the smaller model on all feeds of requests that use the cascade; returns its verdicts."""
        read = [at for at, live in enumerate(lives) if live.params.leaves]
        step = self.smaller.step()
        for at in read:
            past = _is_past(feeds[at], lives[at])
            step.feed(_with_top(feeds[at]) if past else _without_wants(feeds[at]), lives[at])
        self.smaller.run(step, WHOLE)
        verdicts = {}
        for at, answers in zip(read, step.answers(), strict=True):
            if answers:
                verdicts[at] = _verdict(lives[at], tuple(answers[1:]), _head_confidence(answers[0], lives[at]))
        return verdicts

    def _keep(self, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> None:
        """Does nothing: the target starts from tokens, which are known."""

    def _upper_input(self, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> list[Rows]:
        return []


def _may_exit(feed: Feed, live: AnyLive) -> bool:
    return bool(live.params.leaves and feed.wants)


def _is_past(feed: Feed, live: AnyLive) -> bool:
    """Whether a feed that may exit is past its prompt."""
    return _may_exit(feed, live) and len(live) > live.prompt_len


def _saturates(live: AnyLive) -> bool:
    return bool(live.params.sure_by == "saturation")


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum() / math.sqrt((one**2).sum() * (other**2).sum()))


def _verdict(live: AnyLive, answers: Answers, confidence: float) -> Verdict:
    # If the grammar bars all tokens of the exit, the full model may still have one.
    may = not any(isinstance(answer, Failed) for answer in answers)
    return Verdict(answers, confidence, may and confidence >= live.params.sure_at(len(live) - live.prompt_len))


def _head_confidence(top: Answer, live: AnyLive) -> float:
    """The probability of the likeliest token, or its lead over the second; 0 if there is none."""
    if not isinstance(top, Ranked):
        return 0.0
    best, *others = np.exp(np.array(top.logprobs[:2]))
    return float(best - sum(others)) if live.params.sure_by == "margin" else float(best)


def _without_wants(feed: Feed) -> Feed:
    return msgspec.structs.replace(feed, wants=(), allowed=b"")


def _last(feed: Feed) -> Feed:
    """The feed's last known token alone, with the two best tokens added to its wants."""
    return msgspec.structs.replace(_with_top(feed), start=feed.start + feed.count - 1, count=1)


def _with_top(feed: Feed) -> Feed:
    return msgspec.structs.replace(feed, wants=(Top(2), *feed.wants))


def _places(feeds: Sequence[Feed]) -> Iterator[slice]:
    """The slice of a step's rows that each feed has."""
    start = 0
    for feed in feeds:
        end = start + feed.count + len(feed.nodes)
        yield slice(start, end)
        start = end


def _tokens(answers: Answers) -> tuple[int, ...]:
    return tuple(answer.tokens[0] for answer in answers[:1] if isinstance(answer, Drawn))
