"""Long work on the event loop, cut into slices. Other requests run between two slices."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from headrace.text.tokenizer import Tokenizer

T = TypeVar("T")
# Token ids that are decoded in one slice.
TOKENS_PER_SLICE = 4096


async def slices(items: Sequence[T], size: int) -> AsyncIterator[Sequence[T]]:
    """The items in slices of `size`, each but the first after the event loop ran other tasks."""
    for start in range(0, len(items), size):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + size]


async def decode_in_slices(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """The text of token ids, as `Tokenizer.decode` returns it."""
    return tokenizer.text_of(
        b"".join([tokenizer.spelled(piece, skip_special) async for piece in slices(ids, TOKENS_PER_SLICE)])
    )
