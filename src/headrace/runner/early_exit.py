"""Early exit of decoder tokens, unverified: the first exit whose confidence passes the threshold outputs the token. A cascade
of two models works alike, with a smaller model in the exit's place.

deferred: K/V are exact. The layers above an exit lag, each span between two exits by its own number of tokens, and later read
the stored rows of the tokens they have not seen; a cascade's larger model reads the tokens themselves. propagated, as in the
paper: the exited row is used unchanged as the input of each layer above, which makes approximate K/V of it.

Whether a token exits depends on the tokens before it, on which of their rows have exited, and on the request's parameters. It
does not depend on the lag, on chunks or on recomputation. Prompts always run through the full model.

Source: Schuster et al., "Confident Adaptive Language Modeling" (CALM), arXiv 2207.07061.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from headrace.data.plan import Answer, Answers, Drawn, Exited, Failed, Feed, LogitRow, Logits, Ranked, StepOutput, Top
from headrace.runner.program import AnyLive, Program
from headrace.runner.span import WHOLE, Span
from headrace.runner.stored_rows import Rows, StoredRows

# Least probability of a draft token at an exit below the last one that drafts.
DRAFT_CONFIDENCE = 0.7
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
class DraftExits:
    """Exits of the target that draft together: a draft token comes from the first exit that is confident, or from the last one.

    The layers between take K/V from the row that exited, unchanged. The target's own step overwrites them.
    """

    exits: tuple[Exit, ...]

    @property
    def head(self) -> Program:
        """The program of the heads, which is one for all exits."""
        return self.exits[0].head

    def run(self, target: Program, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> list[Answers]:
        """Run as few layers as each draft token needs; returns the answers of every feed."""
        answers: list[Answers] = [()] * len(feeds)
        going, rows, first = [*range(len(feeds))], None, 0
        for exit in self.exits:
            fed, its = [feeds[at] for at in going], [lives[at] for at in going]
            rows = _run(target, fed, its, Span(exit.span.layers, first=first), rows)
            first, last = exit.span.layers, exit is self.exits[-1]
            judged = exit.judge([feed if last or not feed.wants else _with_top(feed) for feed in fed], its, rows)
            places = list(_places(fed))
            stays = [last or (bool(feed.wants) and _is_sure(one[0])) for feed, one in zip(fed, judged, strict=True)]
            for at, feed, one, stay in zip(going, fed, judged, stays, strict=True):
                if stay:
                    answers[at] = one if last or not feed.wants else one[1:]
            if last:
                break
            if drafted := [place for place, stay in enumerate(stays) if stay]:
                span = Span(self.exits[-1].span.layers, first=first, fill=True)
                below = _join(rows, [places[place] for place in drafted])
                _run(target, [fed[place] for place in drafted], [its[place] for place in drafted], span, below)
            deeper = [place for place, stay in enumerate(stays) if not stay]
            if not deeper:
                break
            going, rows = [going[place] for place in deeper], _join(rows, [places[place] for place in deeper])
        return answers


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit's answers, its confidence, whether the confidence passes the threshold, and the layers below the exit."""

    answers: Answers
    confidence: float
    passed: bool
    layers: int = 0


@dataclass(slots=True)
class Climb:
    """A step on its way through the layers.

    verdicts: by feed, of the last exit that judged it. going: feeds that run the next layers; rows [n, hidden]: their rows.
    left: by feed, the exit where it left the layers and its rows there (propagated exits).
    """

    feeds: Sequence[Feed]
    lives: Sequence[AnyLive]
    output: StepOutput
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    going: list[int] = field(default_factory=list)
    rows: Rows = None
    left: dict[int, tuple[int, Rows]] = field(default_factory=dict)

    def passed(self, at: int) -> bool:
        """Whether a feed's token comes from an exit."""
        return at in self.verdicts and self.verdicts[at].passed


class EarlyExit:
    """A target with exits, ascending; owned by a runner. kept: per exit, the rows of tokens that the layers above have not
    seen."""

    def __init__(self, target: Program, exits: Sequence[Exit], kept: Sequence[StoredRows]) -> None:
        self.target = target
        self.exits = tuple(exits)
        self.kept = tuple(kept)
        self.depths = tuple(exit.span.layers for exit in exits)
        self.partial = exits[0].partial

    @property
    def depth(self) -> int:
        """Number of layers below the first exit."""
        return self.depths[0]

    @contextmanager
    def exit_at(self, number: int, layers: int) -> Iterator[None]:
        """Exit after `layers` layers alone, by head `number`, while the context is open.

        No feed may lag meanwhile: the upper layers must have K/V of all earlier tokens.
        """
        before = self.exits, self.depths
        head = self.exits[0].head
        self.exits, self.depths = (Exit(Span(layers), head, number, self.partial),), (layers,)
        try:
            yield
        finally:
            self.exits, self.depths = before

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        """Whether a token of any feed may exit, or an upper layer lags."""
        return any(feed.lag or _may_exit(feed, live) for feed, live in zip(feeds, lives, strict=True))

    def run(self, number: int, feeds: Sequence[Feed], lives: Sequence[AnyLive], rest: Rest) -> StepOutput:
        """Run step `number`: the layers up to each exit for the feeds that have not exited, then `rest`, the layers above the
        last exit, for as few feeds as possible."""
        climb = Climb(feeds, lives, StepOutput(number), going=[*range(len(feeds))])
        for exit in range(len(self.depths)):
            if climb.going:
                self._climb_to(climb, exit)
        above = self._finish(climb, rest)
        for at, (feed, live) in enumerate(zip(feeds, lives, strict=True)):
            here = climb.verdicts.get(at)
            if here is None:
                climb.output.feeds.append(above.get(at, ()))
            else:
                climb.output.feeds.append(self._answers(here, above.get(at, ())))
            if _may_exit(feed, live):
                layers = here.layers if here is not None and here.passed else self.target.config.num_layers
                both = here is not None and live.params.audited
                votes = (*_tokens(here.answers), *_tokens(above[at])) if here is not None and both else ()
                climb.output.exited[at] = Exited(layers, None if here is None else here.confidence, votes)
        return climb.output

    def _climb_to(self, climb: Climb, exit: int) -> None:
        """Run the layers up to an exit for the feeds that go on, and judge those that have not exited."""
        fed = [self._entering(exit, climb.feeds[at], not climb.passed(at)) for at in climb.going]
        lives = [climb.lives[at] for at in climb.going]
        rows, before = self._below(exit, fed, lives, climb.rows)
        for place, verdict in self._judge(exit, fed, lives, rows, before).items():
            climb.verdicts[climb.going[place]] = verdict
        self._leave(climb, exit, fed, rows)

    def _entering(self, exit: int, feed: Feed, asks: bool) -> Feed:
        """A feed as the layers from the exit before `exit` on run it: with the tokens that they have not seen."""
        lag = feed.lags[exit - 1] if exit and feed.lags else 0
        feed = msgspec.structs.replace(feed, start=feed.start - lag, count=feed.count + lag) if lag else feed
        return feed if asks else _without_wants(feed)

    def _answers(self, verdict: Verdict, full: Answers) -> Answers:
        """The answers of the exit or of the full model. Rows of logits for the caller's processors come with those of the other
        one, if both ran."""
        writes, other = (verdict.answers, full) if verdict.passed else (full, verdict.answers)
        layers = self.target.config.num_layers if verdict.passed else verdict.layers
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

    def _below(self, exit: int, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Rows) -> tuple[Rows, Rows]:
        """Rows [n, hidden] at an exit, from those at the exit before; and one layer below, if the saturation criterion needs
        them."""
        first, depth = self.depths[exit - 1] if exit else 0, self.depths[exit]
        if not any(_may_exit(feed, live) and _saturates(live) for feed, live in zip(feeds, lives, strict=True)):
            return self._run(feeds, lives, Span(depth, first=first), rows), None
        before = self._run(feeds, lives, Span(depth - 1, first=first), rows) if depth - 1 > first else rows
        return self._run(feeds, lives, Span(depth, first=depth - 1), before), before

    def _run(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], span: Span, rows: Rows) -> Rows:
        return _run(self.target, feeds, lives, span, rows)

    def _judge(
        self, exit: int, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Rows, before: Rows
    ) -> dict[int, Verdict]:
        """An exit's verdict on the last row of each feed that may exit and is past its prompt, by the feed's number."""
        places = list(_places(feeds))
        past = [at for at, feed in enumerate(feeds) if _is_past(feed, lives[at])]
        if not past:
            return {}
        tips = [places[at].stop - 1 for at in past]
        judge, layers = self.exits[exit], self.depths[exit]
        judgements = judge.judge([_last(feeds[at]) for at in past], [lives[at] for at in past], rows[tips])
        verdicts = {}
        for at, tip, (top, *answers) in zip(past, tips, judgements, strict=True):
            live = lives[at]
            by = live.params.sure_by
            if by == "saturation":
                confidence = _cosine(self._on_host(before, tip), self._on_host(rows, tip))
            elif by == "classifier":
                confidence = judge.confidence(self._on_host(rows, tip))
            else:
                confidence = _head_confidence(top, live)
            verdicts[at] = _verdict(live, tuple(answers), confidence, layers, layers / self.depths[-1])
        return verdicts

    def _on_host(self, rows: Rows, at: int) -> np.ndarray:
        row: np.ndarray = self.target.on_host(rows[at : at + 1])[0]
        return row

    def _leave(self, climb: Climb, exit: int, fed: Sequence[Feed], rows: Rows) -> None:
        """Sort the feeds at an exit. The rows [n, hidden] of those whose token exits are stored. Those of the others go on,
        with the rows that the next layers have not seen."""
        above, parts = [], list[Rows]()
        for at, feed, place in zip(climb.going, fed, _places(fed), strict=True):
            if climb.passed(at) and self._stays(climb.feeds[at], climb.lives[at]):
                climb.output.unfilled[at] = self.depths[exit]
                self._keep(exit, feed, climb.lives[at], rows, place)
            else:
                above.append(at)
                parts += self._upper_input(exit, climb.feeds[at], feed, climb.lives[at], rows, place)
        climb.going, climb.rows = above, self.kept[exit].join(parts) if parts else None

    def _stays(self, feed: Feed, live: AnyLive) -> bool:
        """Whether the upper layers skip a feed whose token exits, for now."""
        return feed.count == 1 and feed.lag < MOST_BEHIND and not self._runs_both(feed, live)

    def _keep(self, exit: int, feed: Feed, live: AnyLive, rows: Rows, place: slice) -> None:
        """Store the rows at an exit that the layers above read later, of a feed whose token exited there."""
        self.kept[exit].store(feed, live.table, rows[place])

    def _upper_input(self, exit: int, feed: Feed, fed: Feed, live: AnyLive, rows: Rows, place: slice) -> list[Rows]:
        """The rows that the layers above an exit start from: those of lagging tokens and those of the feed, which ran up to the
        exit as `fed`."""
        start = self._entering(exit + 1, feed, asks=False).start
        lagging = [self.kept[exit].read(live.table, start, fed.start)] if start < fed.start else []
        return [*lagging, rows[place]]

    def _finish(self, climb: Climb, rest: Rest) -> dict[int, Answers]:
        """The full model's answers by feed, for feeds that did not exit and for audits. Feeds that exited but may lag no
        further run along without wants."""
        if not climb.going:
            return {}
        fed = []
        for at in climb.going:
            feed, live = climb.feeds[at], climb.lives[at]
            fed.append(self._entering(len(self.depths), feed, not climb.passed(at) or self._runs_both(feed, live)))
        answers = rest(fed, [climb.lives[at] for at in climb.going], Span(first=self.depths[-1]), climb.rows)
        return dict(zip(climb.going, answers, strict=True))


class PropagatingExit(EarlyExit):
    """Early exit without lag: an exited row is propagated to the layers above. All rows of a feed have one depth, so that
    recomputation gives the same bits: rows of a feed with a `depth` exit again, whatever the confidence."""

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        return any(feed.depth or _may_exit(feed, live) for feed, live in zip(feeds, lives, strict=True))

    def _leave(self, climb: Climb, exit: int, fed: Sequence[Feed], rows: Rows) -> None:
        """Sort the feeds at an exit. Those whose token exits go on only if the full model runs as well, as in an audit."""
        depth, above, parts = self.depths[exit], list[int](), list[Rows]()
        for at, feed, place in zip(climb.going, fed, _places(fed), strict=True):
            exits = climb.passed(at) and climb.verdicts[at].layers == depth
            if exits:
                assert feed.count == 1, "a token that may exit is fed alone"
                climb.output.propagated[at] = depth
            if exits or feed.depth == depth:
                climb.left[at] = exit, rows[place]
            if at not in climb.left or (at in climb.verdicts and self._runs_both(climb.feeds[at], climb.lives[at])):
                above.append(at)
                parts.append(rows[place])
        climb.going, climb.rows = above, self.kept[exit].join(parts) if parts else None

    def _finish(self, climb: Climb, rest: Rest) -> dict[int, Answers]:
        """Propagate the exited rows. An audit runs the full model first, and then replaces its K/V."""
        above = super()._finish(climb, rest)
        for exit, depth in enumerate(self.depths):
            if left := [at for at, (where, _) in climb.left.items() if where == exit]:
                rows = self.kept[exit].join([climb.left[at][1] for at in left])
                fed, lives = [climb.feeds[at] for at in left], [climb.lives[at] for at in left]
                self._run(fed, lives, Span(first=depth, fill=True), rows)
        return above


class TokenCascade(EarlyExit):
    """A target with a smaller model, which reads all feeds of requests that use the cascade. If its confidence does not pass,
    the target reads all tokens it has not seen, in one step, and outputs the token.

    Source: the fallback policy of Kim et al., "Speculative Decoding with Big Little Decoder" (BiLD), arXiv 2302.07863.
    """

    def __init__(self, target: Program, smaller: Program) -> None:
        self.target = target
        self.smaller = smaller
        self.depths = (0,)  # no layer of the target runs before the smaller model's answer
        self.partial = False

    def asked(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        """Whether any feed belongs to a request that uses the cascade."""
        return any(live.params.leaves for live in lives)

    def _below(self, exit: int, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Rows) -> tuple[Rows, Rows]:
        return None, None

    def _judge(
        self, exit: int, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Rows, before: Rows
    ) -> dict[int, Verdict]:
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

    def _leave(self, climb: Climb, exit: int, fed: Sequence[Feed], rows: Rows) -> None:
        """Sort the feeds. The target starts from tokens, which are known, so no row is stored."""
        stay = {at: 0 for at in climb.going if climb.passed(at) and self._stays(climb.feeds[at], climb.lives[at])}
        climb.output.unfilled |= stay
        climb.going = [at for at in climb.going if at not in stay]


def _may_exit(feed: Feed, live: AnyLive) -> bool:
    return bool(live.params.leaves and feed.wants)


def _is_past(feed: Feed, live: AnyLive) -> bool:
    """Whether a feed that may exit is past its prompt."""
    return _may_exit(feed, live) and len(live) > live.prompt_len


def _saturates(live: AnyLive) -> bool:
    return bool(live.params.sure_by == "saturation")


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float((one * other).sum() / math.sqrt((one**2).sum() * (other**2).sum()))


def _verdict(live: AnyLive, answers: Answers, confidence: float, layers: int = 0, share: float = 1.0) -> Verdict:
    """share: layers below the exit, as a share of those below the last exit."""
    # If the grammar bars all tokens of the exit, the full model may still have one.
    may = not any(isinstance(answer, Failed) for answer in answers)
    least = live.params.sure_at(len(live) - live.prompt_len, share)
    return Verdict(answers, confidence, may and confidence >= least, layers)


def _head_confidence(top: Answer, live: AnyLive) -> float:
    """The probability of the likeliest token, or its lead over the second; 0 if there is none."""
    if not isinstance(top, Ranked):
        return 0.0
    best, *others = np.exp(np.array(top.logprobs[:2]))
    return float(best - sum(others)) if live.params.sure_by == "margin" else float(best)


def _is_sure(top: Answer) -> bool:
    """Whether an exit that drafts is confident of its likeliest token."""
    return isinstance(top, Ranked) and math.exp(top.logprobs[0]) >= DRAFT_CONFIDENCE


def _run(target: Program, feeds: Sequence[Feed], lives: Sequence[AnyLive], span: Span, rows: Rows) -> Rows:
    """Run a span of the target; returns the rows after it, None if it only fills."""
    step = target.step()
    for feed, live in zip(feeds, lives, strict=True):
        step.feed(_without_wants(feed), live)
    return target.run(step, span, rows, keep=not span.fill)


def _join(rows: Rows, places: Sequence[slice]) -> Rows:
    """The rows [n, hidden] of some places, in order."""
    return rows[[at for place in places for at in range(place.start, place.stop)]]


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
