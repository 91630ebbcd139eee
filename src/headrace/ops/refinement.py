"""Passes of block filling: which guesses a pass keeps, and which tokens it masks again.

Source: Ghazvininejad et al., "Mask-Predict", arXiv 1904.09324.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.data.plan import Answer, Each, Failed, Ranked


@dataclass(frozen=True, slots=True)
class MaskedBlock:
    """A block between two passes. tokens: mask ids at positions to be guessed. sure: log-probability of each guess (-inf for a
    mask). done: passes so far."""

    tokens: tuple[int, ...]
    sure: tuple[float, ...]
    done: int = 0


def empty(size: int, mask: int) -> MaskedBlock:
    """A block of masks."""
    return MaskedBlock((mask,) * size, (float("-inf"),) * size)


def masked_after(size: int, passes: int, done: int) -> int:
    """How many of `size` tokens are masked after `done` of `passes` passes."""
    return size * (passes - done) // passes


def guesses(answer: Answer, mask: int) -> list[tuple[int, float]]:
    """The likeliest token at each node that is not the mask, and its log-probability. Raises ValueError if a node has none."""
    if not isinstance(answer, Each):
        raise ValueError(answer.error if isinstance(answer, Failed) else f"guesses are ranked tokens, not {answer!r}")
    tokens = []
    for one in answer.answers:
        if not isinstance(one, Ranked):
            raise ValueError(one.error if isinstance(one, Failed) else f"a guess is a ranked token, not {one!r}")
        tokens.append(next(pair for pair in zip(one.ids, one.logprobs, strict=True) if pair[0] != mask))
    return tokens


def refine(
    block: MaskedBlock, guessed: Sequence[tuple[int, float]], passes: int, mask: int, *, kept_stay: bool = False
) -> MaskedBlock:
    """The block after one more pass with the guesses [size] (token, log-probability). Masked tokens take their guesses; then
    the least certain are masked again, of equals the last ones. kept_stay: only tokens that were masked before this pass are
    masked again."""
    masked = [token == mask for token in block.tokens]
    known = list(zip(block.tokens, block.sure, strict=True))
    now = [new if was else old for new, old, was in zip(guessed, known, masked, strict=True)]
    open_ = [at for at, was in enumerate(masked) if was or not kept_stay]
    done = block.done + 1
    least = sorted(open_, key=lambda at: (now[at][1], -at))[: masked_after(len(now), passes, done)]
    for at in least:
        now[at] = mask, float("-inf")
    return MaskedBlock(tuple(token for token, _ in now), tuple(sure for _, sure in now), done)
