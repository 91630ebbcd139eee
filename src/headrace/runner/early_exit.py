"""Tokens that leave a decoder early, unverified: an exit after some of the layers writes them where it is sure enough (CALM,
Schuster et al. 2022). A cascade of two models is the same with a smaller model in the exit's place: all of the larger one lags,
and reads the tokens themselves.

deferred: no K or V is approximated: the layers above lag, and read what they have not seen from the rows that were kept where
they begin, when they are needed next. propagated, as in the paper: a row that leaves stays as it is, and each layer above
makes K and V of it, approximate ones.

Who writes a token depends on the tokens before it, on which of their rows have left, and on the request's parameters; prompts
are answered by the whole model. What runs beside that (how far the layers above lag, chunks, what is computed again) decides
nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.data.plan import Answer, Answers, Drawn, Exited, Failed, Feed, LogitRow, Logits, Ranked, StepOutput, Top
from headrace.runner.exit_head import Exit
from headrace.runner.program import AnyLive, Program
from headrace.runner.span import WHOLE, Span
from headrace.runner.stored_rows import Kept, Rows

MOST_BEHIND = 7  # tokens; the next one catches up: a step of eight rows takes little longer than one of one

Rest = Callable[[list[Feed], list[AnyLive], Span, Rows], list[Answers]]  # the answers after a span that begins with rows


@dataclass(frozen=True, slots=True)
class Verdict:
    """What who is asked first would write, how sure it is, and whether that is enough."""

    answers: Answers
    confidence: float
    sure: bool


class Leaving:
    """A target with one exit. `kept` has the rows that stand there, of tokens which the layers above have not seen."""

    def __init__(self, target: Program, exit: Exit, kept: Kept) -> None:
        self.target = target
        self.exit = exit
        self.kept = kept
        self.depth = exit.span.layers
        self.partial = exit.partial

    @contextmanager
    def exit_at(self, number: int, layers: int) -> Iterator[None]:
        """Exit after `layers` layers, by the head of this number, inside the `with` block. No row may lag meanwhile."""
        before = self.exit
        self.exit, self.depth = Exit(Span(layers), before.head, number, before.partial), layers
        try:
            yield
        finally:
            self.exit, self.depth = before, before.span.layers

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        """Whether a token of any feed may leave, or one before it has left."""
        return any(feed.lag or _may_leave(feed, live) for feed, live in zip(feeds, lives, strict=True))

    def run(self, number: int, feeds: Sequence[Feed], lives: Sequence[AnyLive], rest: Rest) -> StepOutput:
        """The step of a number: the layers below the exit for all feeds, then `rest`, those above, for as few as can be."""
        rows, before = self._below(feeds, lives)
        verdicts = self._judge(feeds, lives, rows, before)
        output = StepOutput(number)
        above = self._go_on(feeds, lives, rows, verdicts, rest, output)
        for at, (feed, live) in enumerate(zip(feeds, lives, strict=True)):
            here = verdicts.get(at)
            if here is None:
                output.feeds.append(above.get(at, ()))
            else:
                output.feeds.append(self._answers(here, above.get(at, ())))
            if _may_leave(feed, live):
                layers = self.depth if here is not None and here.sure else self.target.config.num_layers
                both = here is not None and live.params.audited
                votes = (*_tokens(here.answers), *_tokens(above[at])) if here is not None and both else ()
                output.exited[at] = Exited(layers, None if here is None else here.confidence, votes)
        return output

    def _answers(self, verdict: Verdict, full: Answers) -> Answers:
        """The answers of the one that writes. Rows for the caller's processors come with those of the other, if both ran."""
        writes, other = (verdict.answers, full) if verdict.sure else (full, verdict.answers)
        layers = self.target.config.num_layers if verdict.sure else self.depth
        if len(other) != len(writes):
            return writes
        return tuple(
            LogitRow(one.row, two.row, layers) if isinstance(one, LogitRow) and isinstance(two, LogitRow) else one
            for one, two in zip(writes, other, strict=True)
        )

    def _runs_both(self, feed: Feed, live: AnyLive) -> bool:
        """Whether the full model runs even if the exit's confidence passes: for an audit, and if the caller's processors could
        bar all tokens of the exit."""
        return live.params.audited or (self.partial and any(isinstance(want, Logits) for want in feed.wants))

    def _below(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> tuple[Rows, Rows]:
        """The rows [n, hidden] at the exit, and those a layer below it, where that is asked for."""
        if not any(_may_leave(feed, live) and _saturates(live) for feed, live in zip(feeds, lives, strict=True)):
            return self._run(feeds, lives, Span(self.depth), None), None
        before = self._run(feeds, lives, Span(self.depth - 1), None)
        return self._run(feeds, lives, Span(self.depth, first=self.depth - 1), before), before

    def _run(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], span: Span, rows: Rows) -> Rows:
        step = self.target.step()
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(_unasked(feed), live)
        return self.target.run(step, span, rows, keep=not span.fill)

    def _judge(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Rows, before: Rows) -> dict[int, Verdict]:
        """What the exit says of each feed that may leave and is past its prompt, by number: of its last row."""
        places = list(_places(feeds))
        past = [at for at, feed in enumerate(feeds) if _is_past(feed, lives[at])]
        if not past:
            return {}
        tips = [places[at].stop - 1 for at in past]
        found = self.exit.judge([_last(feeds[at]) for at in past], [lives[at] for at in past], rows[tips])
        verdicts = {}
        for at, tip, (top, *answers) in zip(past, tips, found, strict=True):
            live = lives[at]
            by = live.params.sure_by
            if by == "saturation":
                confidence = _cosine(self._on_host(before, tip), self._on_host(rows, tip))
            elif by == "classifier":
                confidence = self.exit.sure(self._on_host(rows, tip))
            else:
                confidence = _lead(top, live)
            verdicts[at] = _verdict(live, tuple(answers), confidence)
        return verdicts

    def _on_host(self, rows: Rows, at: int) -> np.ndarray:
        row: np.ndarray = self.target.on_host(rows[at : at + 1])[0]
        return row

    def _go_on(
        self,
        feeds: Sequence[Feed],
        lives: Sequence[AnyLive],
        rows: Rows,
        verdicts: dict[int, Verdict],
        rest: Rest,
        output: StepOutput,
    ) -> dict[int, Answers]:
        """What becomes of the rows [n, hidden] at the exit, said in the output; and what the whole model says, by number."""
        output.unfilled = tuple(at for at, one in verdicts.items() if one.sure and self._stays(feeds[at], lives[at]))
        for at, place in enumerate(_places(feeds)):
            if at in output.unfilled:
                self._keep(feeds[at], lives[at], rows, place)
        return self._above(feeds, lives, rows, verdicts, output.unfilled, rest)

    def _stays(self, feed: Feed, live: AnyLive) -> bool:
        """Whether the layers above skip a feed whose token exits early, for now."""
        return feed.count == 1 and feed.lag < MOST_BEHIND and not self._runs_both(feed, live)

    def _keep(self, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> None:
        """Keep what the layers above will read of a feed whose token has left."""
        self.kept.store(feed, live.table, rows[place])

    def _begins(self, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> list[Rows]:
        """What the layers above begin with, of a feed and of what they have not seen before it."""
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
        """What the whole model says, by number of the feed: of those that nobody has answered, or that are audited. Others go
        along so that the layers above have their K and V."""
        going: list[Feed] = []
        numbers: list[int] = []
        parts: list[Rows] = []
        for at, (feed, place) in enumerate(zip(feeds, _places(feeds), strict=True)):
            if at in unfilled:
                continue
            parts += self._begins(feed, lives[at], rows, place)
            numbers.append(at)
            asks = at not in verdicts or not verdicts[at].sure or self._runs_both(feed, lives[at])
            start, count = feed.start - feed.lag, feed.count + feed.lag
            going.append(msgspec.structs.replace(feed if asks else _unasked(feed), start=start, count=count, lag=0))
        if not going:
            return {}
        begin = self.kept.join(parts) if parts else None
        answers = rest(going, [lives[at] for at in numbers], Span(first=self.depth), begin)
        return dict(zip(numbers, answers, strict=True))


class Propagating(Leaving):
    """The same where no layer lags: a row that leaves goes up as it is. A feed has one depth, so that what is computed again
    has the bits that it had: rows of tokens whose feed has a `depth` leave again, whatever an exit would say now."""

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        return any(feed.depth or _may_leave(feed, live) for feed, live in zip(feeds, lives, strict=True))

    def _go_on(
        self,
        feeds: Sequence[Feed],
        lives: Sequence[AnyLive],
        rows: Rows,
        verdicts: dict[int, Verdict],
        rest: Rest,
        output: StepOutput,
    ) -> dict[int, Answers]:
        """An audit runs the whole model first; then its K and V are replaced."""
        output.propagated = tuple(at for at, one in verdicts.items() if one.sure)
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


class Cascade(Leaving):
    """A target with a smaller model beside it, which is fed what the target is wherever a request cascades. Where it is not
    sure enough the target reads all tokens that it has not seen, in one step, and writes (BiLD's fallback, Kim et al. 2023)."""

    def __init__(self, target: Program, smaller: Program) -> None:
        self.target = target
        self.smaller = smaller
        self.depth = 0  # it writes before the target's first layer
        self.partial = False

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        """Whether the smaller model must see any of the feeds."""
        return any(live.params.leaves for live in lives)

    def _below(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> tuple[Rows, Rows]:
        return None, None

    def _judge(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Rows, before: Rows) -> dict[int, Verdict]:
        """The smaller model reads all feeds of requests that cascade, and says what it would write."""
        read = [at for at, live in enumerate(lives) if live.params.leaves]
        step = self.smaller.step()
        for at in read:
            past = _is_past(feeds[at], lives[at])
            step.feed(_with_top(feeds[at]) if past else _unasked(feeds[at]), lives[at])
        self.smaller.run(step, WHOLE)
        verdicts = {}
        for at, answers in zip(read, step.answers(), strict=True):
            if answers:
                verdicts[at] = _verdict(lives[at], tuple(answers[1:]), _lead(answers[0], lives[at]))
        return verdicts

    def _keep(self, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> None:
        """Nothing: the target begins with tokens, and these are known."""

    def _begins(self, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> list[Rows]:
        return []


def _may_leave(feed: Feed, live: AnyLive) -> bool:
    return bool(live.params.leaves and feed.wants)


def _is_past(feed: Feed, live: AnyLive) -> bool:
    """Whether a feed that may leave is past its prompt."""
    return _may_leave(feed, live) and len(live) > live.prompt_len


def _saturates(live: AnyLive) -> bool:
    return bool(live.params.sure_by == "saturation")


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum() / math.sqrt((one**2).sum() * (other**2).sum()))


def _verdict(live: AnyLive, answers: Answers, confidence: float) -> Verdict:
    may = not any(isinstance(answer, Failed) for answer in answers)  # where none of its tokens may come, the model's can
    return Verdict(answers, confidence, may and confidence >= live.params.sure_at(len(live) - live.prompt_len))


def _lead(top: Answer, live: AnyLive) -> float:
    """The likeliest token's probability, or how far it is ahead of the next one's; 0 where none can come."""
    if not isinstance(top, Ranked):
        return 0.0
    best, *others = np.exp(np.array(top.logprobs[:2]))
    return float(best - sum(others)) if live.params.sure_by == "margin" else float(best)


def _unasked(feed: Feed) -> Feed:
    return msgspec.structs.replace(feed, wants=(), allowed=b"")


def _last(feed: Feed) -> Feed:
    """A feed's last known token alone, with the two best besides what it wants."""
    return msgspec.structs.replace(_with_top(feed), start=feed.start + feed.count - 1, count=1)


def _with_top(feed: Feed) -> Feed:
    return msgspec.structs.replace(feed, wants=(Top(2), *feed.wants))


def _places(feeds: Sequence[Feed]) -> Iterator[slice]:
    """Where each feed's rows are among those of a step."""
    start = 0
    for feed in feeds:
        end = start + feed.count + len(feed.nodes)
        yield slice(start, end)
        start = end


def _tokens(answers: Answers) -> tuple[int, ...]:
    return tuple(answer.tokens[0] for answer in answers[:1] if isinstance(answer, Drawn))
