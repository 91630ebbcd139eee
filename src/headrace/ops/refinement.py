"""Filling in a block in passes: what each of them keeps, and what is masked again (Mask-Predict, Ghazvininejad et al. 2019)."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.data.plan import Answer, Each, Failed, Ranked


@dataclass(frozen=True, slots=True)
class Block:
    """A block of an answer between two passes: its tokens, the mask where one is to be guessed, and how sure each guess was
    (its log-probability; of a mask the least there is). `done`: passes it has had."""

    tokens: tuple[int, ...]
    sure: tuple[float, ...]
    done: int = 0


def empty(size: int, mask: int) -> Block:
    """A block of which nothing is known."""
    return Block((mask,) * size, (float("-inf"),) * size)


def masks_left(size: int, passes: int, done: int) -> int:
    """How many of `size` tokens are masked after `done` of `passes` passes."""
    return size * (passes - done) // passes


def guesses(answer: Answer, mask: int) -> list[tuple[int, float]]:
    """The likeliest token at each node that is no mask, and its log-probability. Raises ValueError where there is none."""
    if not isinstance(answer, Each):
        raise ValueError(answer.error if isinstance(answer, Failed) else f"guesses are ranked tokens, not {answer!r}")
    found = []
    for one in answer.answers:
        if not isinstance(one, Ranked):
            raise ValueError(one.error if isinstance(one, Failed) else f"a guess is a ranked token, not {one!r}")
        found.append(next(pair for pair in zip(one.ids, one.logprobs, strict=True) if pair[0] != mask))
    return found


def refine(block: Block, found: Sequence[tuple[int, float]], passes: int, mask: int, *, kept_stay: bool = False) -> Block:
    """The block after one more pass, which guessed `found` [size] (token, log-probability): masked tokens take their guesses,
    then the least sure are masked again, of equals the last ones; with `kept_stay` only such as were masked before it."""
    masked = [token == mask for token in block.tokens]
    known = list(zip(block.tokens, block.sure, strict=True))
    now = [new if was else old for new, old, was in zip(found, known, masked, strict=True)]
    open_ = [at for at, was in enumerate(masked) if was or not kept_stay]
    done = block.done + 1
    least = sorted(open_, key=lambda at: (now[at][1], -at))[: masks_left(len(now), passes, done)]
    for at in least:
        now[at] = mask, float("-inf")
    return Block(tuple(token for token, _ in now), tuple(sure for _, sure in now), done)
