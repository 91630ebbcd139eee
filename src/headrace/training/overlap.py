"""Overlap of training texts with calibration texts. A guarantee holds only without it."""

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

# A text, a pair of texts, or a conversation.
Item = str | tuple[str, ...] | Sequence[Any]
# Hexadecimal digits of a hash.
DIGITS = 16


def normal(item: Item) -> str:
    """Normalize an item for comparison: lower case, single spaces; a pair or conversation as JSON."""
    text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return " ".join(text.casefold().split())


def hashes(items: Iterable[Item]) -> list[str]:
    """Return the sorted hashes of the different items."""
    return sorted({_hash(item) for item in items})


def without(items: Sequence[Item], known: Iterable[str]) -> list[int]:
    """Return the indices of the items whose hashes are not `known`."""
    trained = set(known)
    return [index for index, item in enumerate(items) if _hash(item) not in trained]


def _hash(item: Item) -> str:
    return hashlib.sha256(normal(item).encode()).hexdigest()[:DIGITS]


def parts_of(texts: Sequence[Item], others: Sequence[Item]) -> list[list[int]]:
    """Return for each text the indices of the `others` that contain it as whole words; equal texts contain each other.

    Data sets such as SST-2 hold phrases of one sentence as texts of their own.
    """
    padded = [f" {normal(other)} " for other in others]
    index_of: dict[str, list[int]] = defaultdict(list)
    for index, other in enumerate(padded):
        for word in set(other.split()):
            index_of[word].append(index)
    containing = []
    for text in texts:
        inner = normal(text)
        rarest: list[int] = min((index_of.get(word, []) for word in inner.split()), key=len, default=[])
        containing.append([index for index in rarest if f" {inner} " in padded[index]])
    return containing


def split(texts: Sequence[Item], share: float, seed: int) -> tuple[list[int], list[int], int]:
    """Return the indices of training texts and of calibration texts (`share` of all), and the number of texts left out.

    Draws texts that no other text contains at random. A contained text follows the texts around it, and is left out if these
    are on both sides.
    """
    first: dict[str, int] = {}
    for index, text in enumerate(texts):
        first.setdefault(normal(text), index)
    distinct = list(first.values())
    around = parts_of([texts[index] for index in distinct], [texts[index] for index in distinct])
    roots = [index for index, inside in zip(distinct, around, strict=True) if len(inside) == 1]
    holders = {
        normal(texts[index]): [distinct[other] for other in inside] for index, inside in zip(distinct, around, strict=True)
    }
    random.Random(seed).shuffle(roots)
    held = set(roots[: round(len(roots) * share)])
    sides: tuple[list[int], list[int]] = ([], [])
    is_root, left_out = set(roots), 0
    for index, text in enumerate(texts):
        is_held = {holder in held for holder in holders[normal(text)] if holder in is_root}
        if len(is_held) == 1:
            sides[is_held.pop()].append(index)
        else:
            left_out += 1
    return *sides, left_out
