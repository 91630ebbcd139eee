"""Work on the event loop that grows with what was asked for: piece by piece, others have their turn between two."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from headrace.text.tokenizer import Tokenizer

T = TypeVar("T")
TOKENS_PER_SLICE = 4096  # that are spelled in one turn


async def slices(items: Sequence[T], size: int) -> AsyncIterator[Sequence[T]]:
    """`size` items at a time."""
    for start in range(0, len(items), size):
        if start:
            await asyncio.sleep(0)
        yield items[start : start + size]


async def decode_in_slices(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """`Tokenizer.decode`."""
    return tokenizer.text_of(
        b"".join([tokenizer.spelled(piece, skip_special) async for piece in slices(ids, TOKENS_PER_SLICE)])
    )
