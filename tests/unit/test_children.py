"""What becomes of a sequence: a fork shares nothing that grows, and a result is the whole output."""

from headrace.data.params import SamplingParams
from headrace.data.plan import TokenLogprob
from headrace.data.types import Decode, Delta, Holding, Request, Sequence, Transcript, Wire
from headrace.engine.children import result


def test_a_result_is_the_whole_output() -> None:
    said = [TokenLogprob(7, -1.0), TokenLogprob(8, -1.0)]
    text = Transcript(shown="ab", logprobs=said, finish_reason="stop", stop_reason="b")
    seq = Sequence(0, [1, 2, 7, 8], 2, text=text, decode=Decode(3, score=-2.0))
    made = result(Request("r", [1, 2], SamplingParams(), 0, None, 0), seq, -0.5, 1)
    assert made == Delta("r", 1, [7, 8], "ab", tuple(said), "stop", "b", cumulative_logprob=-2.0, score=-0.5)


class Copied:
    def __init__(self, copies: int = 0) -> None:
        self.copies = copies

    def copy(self) -> "Copied":
        return Copied(self.copies + 1)


def test_a_fork_shares_nothing_that_grows() -> None:
    """And has neither blocks nor a slot, nor what is the strategy's to say."""
    said = TokenLogprob(3, -1.0)
    parent = Sequence(
        4,
        [1, 2, 3],
        2,
        Holding(b"s", 0b101, [[6], [7]], [2, 0, 2], 2, [], [b"h"], 1),
        Wire(5, 3, [1, 1]),
        Transcript(Copied(), Copied(), "a", [said]),
        Decode(2, -1.0, "state", Copied(), memory={"drafter": [3]}),
    )
    twin = parent.fork(9)
    assert (twin.id, twin.decode.index, twin.tokens, twin.prompt_len, twin.kv.root) == (9, 2, [1, 2, 3], 2, b"s")
    assert (twin.kv.groups, twin.text.shown, twin.wire.slot, twin.kv.tables) == (0b101, "a", -1, [[]])
    assert (twin.kv.computed, twin.kv.exact_until, twin.kv.hashes, twin.kv.published) == ([0], None, [], 0)
    assert (twin.wire.sent, twin.wire.synced, twin.text.logprobs) == (0, [0], [])
    assert (twin.decode.score, twin.decode.state, twin.decode.memory) == (0.0, None, {})
    assert [each.copies for each in (twin.text.words, twin.text.stops, twin.decode.constraint)] == [1, 1, 1]
    twin.tokens.append(4)
    assert parent.tokens == [1, 2, 3]
    bare = Sequence(0, [1], 1).fork(1)
    assert (bare.text.words, bare.text.stops, bare.decode.constraint) == (None, None, None)


def test_a_fork_shares_blocks_and_copies_lists() -> None:
    kv = Holding(b"s", 0b11, [[6], [7]], [2, 2], 2, [], [b"h"], 1)
    twin = kv.fork()
    assert (twin.root, twin.groups, twin.exact_until, twin.published) == (b"s", 0b11, 2, 1)
    assert (twin.tables, twin.computed, twin.hashes) == ([[6], [7]], [2, 2], [b"h"])
    for growing in (*twin.tables, twin.computed, twin.hashes):
        growing.append(0)  # type: ignore[attr-defined]
    assert (kv.tables, kv.computed, kv.hashes) == ([[6], [7]], [2, 2], [b"h"])
