"""Overlap of the texts that train something with the texts that it is calibrated on: a guarantee holds only without it."""

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Item = str | tuple[str, ...] | Sequence[Any]  # a text, a pair of texts, or a conversation
DIGITS = 16  # hexadecimal digits of a hash


def normal(item: Item) -> str:
    """A text in lower case with single spaces; a pair or conversation as the JSON of it. Equal texts count as one."""
    text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
    return " ".join(text.casefold().split())


def hashes(items: Iterable[Item]) -> list[str]:
    """One short hash of each different item, sorted."""
    return sorted({_hash(item) for item in items})


def without(items: Sequence[Item], known: Iterable[str]) -> list[int]:
    """Places of the items whose hashes are not `known`."""
    trained = set(known)
    return [at for at, item in enumerate(items) if _hash(item) not in trained]


def _hash(item: Item) -> str:
    return hashlib.sha256(normal(item).encode()).hexdigest()[:DIGITS]


def parts_of(texts: Sequence[Item], others: Sequence[Item]) -> list[list[int]]:
    """For each text the places of the `others` that contain it as whole words, equal ones included.

    Sets such as SST-2 hold phrases of one sentence as texts of their own.
    """
    padded = [f" {normal(other)} " for other in others]
    places: dict[str, list[int]] = defaultdict(list)
    for at, other in enumerate(padded):
        for word in set(other.split()):
            places[word].append(at)
    found = []
    for text in texts:
        inner = normal(text)
        rarest: list[int] = min((places.get(word, []) for word in inner.split()), key=len, default=[])
        found.append([at for at in rarest if f" {inner} " in padded[at]])
    return found


def split(texts: Sequence[Item], share: float, seed: int) -> tuple[list[int], list[int], int]:
    """Places of the texts to train with and of those to calibrate with, `share` of all, and the count of those left out.

    Texts that no other contains are drawn at random. A text that they contain follows them, and is left out if it is part
    of texts on both sides.
    """
    first: dict[str, int] = {}
    for at, text in enumerate(texts):
        first.setdefault(normal(text), at)
    distinct = list(first.values())
    around = parts_of([texts[at] for at in distinct], [texts[at] for at in distinct])
    roots = [at for at, inside in zip(distinct, around, strict=True) if len(inside) == 1]
    holders = {normal(texts[at]): [distinct[one] for one in inside] for at, inside in zip(distinct, around, strict=True)}
    random.Random(seed).shuffle(roots)
    held = set(roots[: round(len(roots) * share)])
    sides: tuple[list[int], list[int]] = ([], [])
    is_root, left_out = set(roots), 0
    for at, text in enumerate(texts):
        around_it = {one in held for one in holders[normal(text)] if one in is_root}
        if len(around_it) == 1:
            sides[around_it.pop()].append(at)
        else:
            left_out += 1
    return *sides, left_out
