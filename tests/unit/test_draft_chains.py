"""Chains that a model or heads fill in: what is asked of the back end, and where a chain ends. No model runs."""

from collections.abc import Iterable

import pytest

from headrace.data.params import SamplingParams
from headrace.data.plan import Answer, Answers, AnyWant, Drawn, Each, Failed, Feed, Sample, TokenLogprob, Where
from headrace.data.sources import Tokens
from headrace.data.types import Draft, Holding, Request, Sequence, Wire
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.heads import TrainedHeads
from headrace.engine.feeding import FeedWork

SURE, UNSURE = -0.01, -0.5  # ln of a probability


def work(number: int, known: int, seen: int, room: int, **params: object) -> FeedWork:
    """A sequence of so many known tokens, of which the companion has seen some, with room for a chain."""
    request = Request(str(number), [1], SamplingParams(**params), 0, None, 0, stop_ids=frozenset({99}))  # type: ignore[arg-type]
    request.metrics.drafts, request.metrics.drafted = 1, room
    seq = Sequence(number, [number] * known, 1, Holding(computed=[known - 1, seen]), Wire(slot=10 + number))
    seq.decode.draft = Draft([0] * room, list(range(-1, room - 1)), drafter="draft")
    feed = Feed(seq.wire.slot, known - 1, 1, (number,), nodes=(0,) * room, parents=tuple(range(-1, room - 1)))
    return FeedWork(request, seq, feed, True)


class Script:
    """A back end that says what it is told, by slot; `short`: the call in which it leaves out the last answer."""

    def __init__(self, said: dict[int, Iterable[tuple[int, float]]], short: int | None = None) -> None:
        self.said = {slot: iter(each) for slot, each in said.items()}
        self.calls: list[list[Feed]] = []
        self.short = short

    def __call__(self, model: int, feeds: list[Feed]) -> list[Answers]:
        assert model == 1
        self.calls.append(feeds)
        outs = [tuple(self._answer(feed, want) for want in feed.wants) for feed in feeds]
        return outs[:-1] if len(self.calls) - 1 == self.short else outs

    def _answer(self, feed: Feed, want: AnyWant) -> Answer:
        assert isinstance(want, Sample)
        if want.at is Where.TREE:
            return Each(tuple(self._token(feed) for _ in (-1, *feed.nodes)))
        return self._token(feed)

    def _token(self, feed: Feed) -> Drawn | Failed:
        token, logprob = next(self.said[feed.slot])
        return Drawn((token,), logprobs=(TokenLogprob(token, logprob),)) if token >= 0 else Failed("nothing")


def ignored(seq: Sequence, group: int, start: int) -> None:
    pass


def sure(*tokens: int) -> list[tuple[int, float]]:
    return [(token, SURE) for token in tokens]


def test_a_source_that_is_not_encoded_gets_no_draft() -> None:
    """It comes with the step that would verify the draft; another's chain is drawn all the same."""
    bringing, other = work(0, known=1, seen=0, room=2), work(1, known=1, seen=0, room=2)
    bringing.feed.source = Tokens((5, 6, 7))
    run = Script({11: sure(4, 5)})
    DraftModel(least=0.7).propose_tokens([bringing, other], run, ignored)
    assert bringing.seq.decode.draft is None
    assert (bringing.feed.nodes, bringing.feed.new, bringing.seq.kv.computed[1]) == ((), (0,), 0)
    assert other.seq.decode.draft is not None
    assert other.seq.decode.draft.tokens == [4, 5]


def test_a_chain_is_drawn_token_by_token_after_the_computed_tokens() -> None:
    one, filled = work(0, known=9, seen=5, room=3), []
    run = Script({10: sure(4, 5, 6)})
    DraftModel(least=0.7).propose_tokens([one], run, lambda *what: filled.append(what))
    want = Sample(0, logprobs=0)
    assert run.calls == [
        [Feed(10, 5, 4, (0,), (want,))],
        [Feed(10, 9, 0, (), (want,), nodes=(4,), parents=(-1,))],
        [Feed(10, 10, 0, (), (want,), nodes=(5,), parents=(-1,))],
    ]
    assert filled == [(one.seq, 1, 5)]
    assert one.seq.kv.computed == [8, 11], "the last token of the chain was not fed"
    assert one.feed.new == (), "the slot has been told"
    assert one.seq.decode.draft is not None
    assert (one.seq.decode.draft.tokens, one.seq.decode.draft.parents, one.seq.decode.draft.q) == ([4, 5, 6], [-1, 0, 1], None)
    assert (one.feed.nodes, one.feed.parents, one.feed.q) == ((4, 5, 6), (-1, 0, 1), ())
    assert (one.request.metrics.drafts, one.request.metrics.drafted) == (1, 3)


@pytest.mark.parametrize(
    ("said", "chain"),
    [
        (sure(4, 5, 6, 7), [4, 5, 6, 7]),
        ([(4, SURE), (5, UNSURE), (6, SURE)], [4, 5]),  # the chain as a whole is less likely than 0.7
        ([(4, -0.2), (5, -0.2), (6, SURE)], [4, 5]),
        (sure(4, 99, 6), [4, 99]),  # an end
        (sure(4, -1), [4]),  # no token
        (sure(-1), []),
    ],
)
@pytest.mark.parametrize("kind", ["draft", "heads"])
def test_a_chain_ends_where_it_is_unlikely_and_where_the_output_ends(kind: str, said: list, chain: list[int]) -> None:
    """Of several sequences each for itself."""
    drafter = DraftModel(least=0.7) if kind == "draft" else TrainedHeads(4, least=0.7)
    one, beside = work(0, known=9, seen=8, room=4), work(1, known=5, seen=4, room=4)
    run = Script({10: said + sure(*[8] * 4), 11: sure(21, 22, 23, 24)})
    drafter.propose_tokens([one, beside], run, ignored)
    assert beside.seq.decode.draft is not None
    assert beside.seq.decode.draft.tokens == [21, 22, 23, 24]
    assert (one.seq.decode.draft.tokens if one.seq.decode.draft is not None else []) == chain
    assert one.feed.nodes == tuple(chain)
    assert (one.request.metrics.drafts, one.request.metrics.drafted) == (int(bool(chain)), len(chain))


def test_catch_up_is_bounded_and_shortest_first() -> None:
    """A text that does not fit is read as far as the budget goes, without a draft; the next step goes on there."""
    long, short, mid = work(0, 40, 0, 1), work(1, 9, 0, 1), work(2, 20, 8, 1)
    run = Script({11: sure(4), 12: sure(5), 10: sure(6)})
    drafter = DraftModel(least=0.0, budget=30)
    drafter.propose_tokens([long, short, mid], run, ignored)
    assert [(feed.slot, feed.start, feed.count, bool(feed.wants)) for feed in run.calls[0]] == [
        (11, 0, 9, True),
        (12, 8, 12, True),
        (10, 0, 9, False),
    ]
    assert [each.seq.decode.draft is not None for each in (long, short, mid)] == [False, True, True]
    assert [each.seq.kv.computed[1] for each in (long, short, mid)] == [9, 9, 20]
    assert all(want.logprobs is None for feed in run.calls[0] for want in feed.wants), "nobody asks how likely it is"
    run.calls.clear()
    long.seq.decode.draft = Draft([0], [-1])
    drafter.propose_tokens([long], run, ignored)
    assert [(feed.start, feed.count) for feed in run.calls[0]] == [(9, 30)]


def test_a_part_of_the_target_reads_only_the_last_token() -> None:
    one = work(0, known=9, seen=0, room=2)
    drafter = DraftModel("self", group=None)
    run = Script({10: sure(4, 5)})
    drafter.propose_tokens([one], run, lambda *what: pytest.fail("it fills no group"))
    assert [(feed.start, feed.count) for (feed,) in run.calls] == [(8, 1), (9, 0)]
    assert one.seq.kv.computed == [8, 0]
    assert drafter.lag(one.seq) == 1
    assert DraftModel().lag(one.seq) == 9


def test_discarded_chain_tokens_are_read_again() -> None:
    one = work(0, known=9, seen=8, room=3)
    DraftModel("feature", keeps=False).propose_tokens([one], Script({10: sure(4, 5, 6)}), ignored)
    assert one.seq.kv.computed == [8, 9]


@pytest.mark.parametrize(("kind", "call"), [("draft", 0), ("draft", 1), ("self", 0), ("self", 1), ("heads", 0)])
def test_a_missing_answer_of_a_back_end_is_an_error(kind: str, call: int) -> None:
    """None is taken for another's."""
    made = {"draft": DraftModel(), "self": DraftModel("self", group=None), "heads": TrainedHeads(2)}
    works = [work(0, 9, 8, 2), work(1, 5, 4, 2)]
    with pytest.raises(ValueError, match="shorter"):
        made[kind].propose_tokens(works, Script({10: sure(4, 5), 11: sure(6, 7)}, call), ignored)  # type: ignore[attr-defined]


def test_heads_all_speak_in_one_step_from_the_last_row() -> None:
    one = work(0, known=9, seen=8, room=3)
    drafter = TrainedHeads(3)
    run = Script({10: sure(4, 5, 6)})
    drafter.propose_tokens([one], run, ignored)
    want = Sample(0, logprobs=0, at=Where.TREE)
    assert run.calls == [[Feed(10, 8, 1, (0,), (want,), nodes=(0, 0), parents=(-1, 0))]]
    assert one.feed.new == ()
    assert drafter.lag(one.seq) == 1
    made = drafter.draft(one.request, one.seq, 9)
    assert made is not None
    assert (made.tokens, made.parents) == ([0] * 3, [-1, 0, 1])
