"""A step on the native core: feeds and wants in, answers out."""

from collections.abc import Sequence
from typing import Any, assert_never

from headrace import core
from headrace.backends.native.live import NativeLive
from headrace.data.plan import (
    Align,
    Answer,
    Answers,
    AnyWant,
    Classify,
    Drawn,
    Each,
    Failed,
    Feed,
    LogitRow,
    Logits,
    Pool,
    Propose,
    Ranked,
    Reject,
    Sample,
    Score,
    Scores,
    TokenLogprob,
    Top,
    Verify,
    Where,
)
from headrace.ops.keys import round_key
from headrace.runner.wants import append_live, logit_rows, named_rows

# A want, the number of its answer in the core's step, and the number of its second answer (of a Top with `live`).
PendingWant = tuple[AnyWant, Any, Any]


class NativeStep:
    """A reusable step of the core. `clear` empties it."""

    def __init__(self, vocab_size: int) -> None:
        self.core = core.module().Step()
        self.vocab_size = vocab_size
        self._asked: list[tuple[NativeLive, list[PendingWant]]] = []
        # By slot: the numbers of its whole rows of logits.
        self._kept: dict[int, list[int]] = {}

    def clear(self) -> None:
        self.core.clear()
        self._asked, self._kept = [], {}

    def draw_each(self, feeds: Sequence[Feed], lives: Sequence[NativeLive]) -> bool:
        """Fast path: every feed has one known token and wants one sampled token. Returns False, without effect, otherwise."""
        sequences, starts = [], []
        for feed, live in zip(feeds, lives, strict=True):
            if feed.count != 1 or feed.nodes or feed.allowed or len(feed.wants) != 1 or not live.plain:
                return False
            want = feed.wants[0]
            if type(want) is not Sample or want.at is not Where.LAST or want.n != 1 or want.logprobs is not None:
                return False
            if want.child != live.child:
                live.draw_as(want.child)
            sequences.append(live.sequence)
            starts.append(feed.start)
        self.core.draw_each(sequences, starts)
        return True

    def drawn(self) -> list[Answers]:
        """The answers of `draw_each`."""
        tokens = self.core.drawn()
        return [(Drawn((token,)) if token >= 0 else Failed(self.core.error(at)),) for at, token in enumerate(tokens)]

    def feed_for_rows(self, feed: Feed, live: NativeLive) -> None:
        """Add a feed whose rows of logits are combined with another model's step."""
        count = logit_rows(feed)
        self.core.feed(live.sequence, feed.start, feed.count, count, feed.nodes, feed.parents, feed.full)
        self._kept[feed.slot] = [self.core.logits(row) for row in range(count)]

    def answers(self) -> list[list[Any]]:
        """The answers of each feed, in the order of its wants; None for wants that are answered from hidden rows."""
        return [[_answer(self.core, live, *one) for one in each] for live, each in self._asked]

    def feed(self, feed: Feed, live: NativeLive, amateur: "NativeStep | None" = None) -> None:
        """Add a feed and its wants. With `amateur` its logits are combined with the rows of the same slot in that step."""
        step, rows = self.core, logit_rows(feed)
        # Row of the last known token, if the feed has logits.
        last = rows - len(feed.nodes) - 1
        if feed.nodes:
            step.feed(live.sequence, feed.start, feed.count, rows, feed.nodes, feed.parents, feed.full)
        else:
            step.feed(live.sequence, feed.start, feed.count, rows)
        if feed.allowed:
            step.mask(feed.allowed)
        asked: list[PendingWant] = [(want, self._ask(live, want, last, feed), None) for want in feed.wants]
        if any(isinstance(want, Top) and want.live for want in feed.wants):
            # Applies to all later requests of this step.
            step.mask(live.live_masks(feed, self.vocab_size))
            asked = [
                (want, answer, self._ask(live, want, last, feed) if isinstance(want, Top) and want.live else None)
                for want, answer, _ in asked
            ]
        self._asked.append((live, asked))
        if amateur is not None:
            assert live.params.combined is not None
            for row, answer in enumerate(amateur._kept[feed.slot]):
                step.combine(row, amateur.core, answer, *live.params.combined)

    def _ask(self, live: NativeLive, want: AnyWant, last: int, feed: Feed) -> Any:
        """Register a want with the core's step. Returns its number, or a list with one per row of NODES or TREE."""
        step = self.core
        processed = live.params.logprobs_mode == "processed"
        match want:
            case Verify():
                return step.verify(last, live.key(want.child), _most(want.logprobs), processed, want.mu)
            case Reject():
                key, block = round_key(live.seed, len(live), want.child), live.params.verification == "block"
                return step.reject(last, key, feed.q, block, _most(want.logprobs), processed)
            case Propose():
                return step.propose(last, round_key(live.seed, len(live) - want.known, want.child))
            case Score():
                return step.score(0, want.logprobs)
            case Sample() | Top() | Logits():
                if want.at is Where.LAST:
                    return self._ask_row(live, want, last, processed)
                return [self._ask_row(live, want, last + 1 + node, processed) for node in named_rows(feed, want)]
            case Pool() | Classify() | Align():
                return None  # answered from other rows by the runner
            case _:
                assert_never(want)

    def _ask_row(self, live: NativeLive, want: Sample | Top | Logits, row: int, processed: bool) -> Any:
        step = self.core
        match want:
            case Sample():
                keys = [live.key(child) for child in range(want.child, want.child + want.n)]
                return step.draw(row, keys, _most(want.logprobs), processed, want.mu)
            case Top():
                return step.top(row, want.k)
            case Logits():
                return step.logits(row)


def _most(logprobs: int | None) -> int:
    """Number of alternatives in the core's format: -1 for no log-probabilities."""
    return -1 if logprobs is None else logprobs


def _answer(step: Any, live: NativeLive, want: AnyWant, number: Any, going: Any) -> Any:
    """The answer of a want. number: its number or numbers in the step; going: those of the second answer."""
    if isinstance(want, Pool | Classify | Align):
        return None
    if isinstance(want, Score):
        return _scores(step, number)
    if not isinstance(number, list):
        return _one(step, live, want, number, going)
    more = going or [None] * len(number)
    return Each(tuple(_one(step, live, want, *one) for one in zip(number, more, strict=True)))


def _one(step: Any, live: NativeLive, want: AnyWant, number: int, going: int | None) -> Any:
    """The answer of one row, or of the verification of a draft."""
    if error := step.error(number):
        return Failed(error)
    match want:
        case Sample() | Verify() | Reject():
            out = Drawn(tuple(step.tokens(number)))
            if not isinstance(want, Sample):
                out.path = tuple(step.path(number))
            if want.logprobs is not None:
                out.logprobs = tuple(_logprob(report) for report in step.reports(number))
            if live.params.mirostat_tau:
                out.mus = tuple(report.mu for report in step.reports(number))
            return out
        case Propose():
            return Drawn(tuple(step.tokens(number)), q=step.row_of_logits(number))
        case Top():
            (best,) = step.reports(number)
            ranked = Ranked(tuple(best.top_ids), tuple(best.top_logprobs))
            # An error means that every allowed token ends the output.
            for best in () if going is None or step.error(going) else step.reports(going):
                append_live(ranked, best.top_ids, best.top_logprobs)
            return ranked
        case _:
            return LogitRow(step.row_of_logits(number))


def _scores(step: Any, asked: tuple[int, int]) -> Answer:
    """The log-probabilities of known tokens."""
    numbers = range(asked[0], sum(asked))
    error = next((error for at in numbers if (error := step.error(at))), "")
    return Failed(error) if error else Scores(tuple(_logprob(step.reports(at)[0]) for at in numbers))


def _logprob(report: Any) -> TokenLogprob:
    return TokenLogprob(report.id, report.logprob, report.rank, report.top_ids, report.top_logprobs)
