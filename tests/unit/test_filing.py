"""Small work of the loop: what a chunk brings is filed once, and a copy shares nothing that grows."""

import pytest

from headrace.filing import clone, file_pooled, file_scores, pool_wants, result
from headrace.params import SamplingParams
from headrace.types import Delta, Feed, FeedOutput, Request, Sequence, TokenLogprob, Want


def asked(prompt: int = 12, pool: str = "") -> Request:
    return Request("r", list(range(prompt)), SamplingParams(), 0, None, 0, pool=pool)


@pytest.mark.parametrize("pool", ["first", "last"])
def test_one_row_is_asked_of_the_chunk_that_ends_the_prompt(pool: str) -> None:
    request = asked(pool=pool)
    assert pool_wants(request, last=False) == ()
    assert pool_wants(request, last=True) == (Want(rows=pool, kind="pool"),)


def test_a_mean_goes_on_where_the_sum_was_also_when_rows_are_fed_again() -> None:
    request = asked(pool="mean")
    assert pool_wants(request, last=False) == (Want(rows="all", kind="pool", k=0, before=()),)
    file_pooled(request, Feed(0, 0, 8), (1.0, 2.0))
    file_pooled(request, Feed(0, 0, 4), (1.0, 2.0))  # after a preemption: nothing new
    assert pool_wants(request, last=True) == (Want(rows="all", kind="pool", k=8, before=(1.0, 2.0)),)
    file_pooled(request, Feed(0, 4, 8), (3.0, 4.0))
    assert (request.pooled, request.pooled_until) == ([3.0, 4.0], 12)


def test_scores_are_filed_once_and_end_with_the_prompt() -> None:
    """Also where chunks overlap, and where a feed after a preemption goes on into the output."""
    request = asked(prompt=6)
    scores = [TokenLogprob(token, -float(token)) for token in range(9)]
    for start, end in ((0, 3), (0, 2), (1, 9), (3, 9)):
        file_scores(request, start, FeedOutput(scores=tuple(scores[start + 1 : end])))
    assert request.prompt_logprobs == [None, *scores[1:6]]


def test_a_result_is_the_whole_output() -> None:
    seq = Sequence(0, 3, [1, 2, 7, 8], 2, score=-2.0, shown="ab", finish_reason="stop", stop_reason="b")
    seq.logprobs = [TokenLogprob(7, -1.0), TokenLogprob(8, -1.0)]
    made = result(asked(), seq, -0.5, 1)
    assert made == Delta("r", 1, [7, 8], "ab", tuple(seq.logprobs), "stop", "b", cumulative_logprob=-2.0, score=-0.5)


class Copied:
    def __init__(self, copies: int = 0) -> None:
        self.copies = copies

    def copy(self) -> "Copied":
        return Copied(self.copies + 1)


def test_a_clone_shares_nothing_that_grows() -> None:
    parent = Sequence(4, 2, [1, 2, 3], 2, salt=b"s", groups=0b101, shown="a")
    parent.text, parent.stops, parent.constraint = Copied(), Copied(), Copied()
    twin = clone(parent, 9)
    assert (twin.id, twin.index, twin.tokens, twin.prompt_len, twin.salt) == (9, 2, [1, 2, 3], 2, b"s")
    assert (twin.groups, twin.shown, twin.slot, twin.tables) == (0b101, "a", -1, [[]])
    assert [each.copies for each in (twin.text, twin.stops, twin.constraint)] == [1, 1, 1]
    twin.tokens.append(4)
    assert parent.tokens == [1, 2, 3]
    bare = clone(Sequence(0, 0, [1], 1), 1)
    assert (bare.text, bare.stops, bare.constraint) == (None, None, None)
