"""Tables of the Chinese glossary, from docs/data/glossary.toml."""

import tomllib
from collections.abc import Iterable
from typing import Any

from tests.docs.markdown import DOCS
from tests.wrapping import COLUMNS, columns

DATA = DOCS / "data/glossary.toml"
Pairs = list[tuple[str, str]]


def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(DATA.read_text("utf-8"))["group"]
    return found


def terms() -> list[dict[str, Any]]:
    return [term for group in groups() for term in group["terms"]]


def text() -> str:
    """Terms by subject, and other translations with the word used here."""
    parts = []
    for group in groups():
        pairs = [(term["zh"], english(term)) for term in group["terms"]]
        parts.append(f"## {group['zh']}\n\n{table(('中文', 'English'), pairs)}")
    others = [(f"“{word}”", term["zh"]) for term in terms() for word in term.get("not", ())]
    parts.append(f"## 别处的译法\n\n这些词在别处常见，本文档不用。\n\n{table(('别处', '本文档'), others)}")
    return "\n\n".join(parts)


def english(term: dict[str, Any]) -> str:
    return f"{term['en']} ({term['full']})" if "full" in term else str(term["en"])


def table(head: tuple[str, str], pairs: Pairs) -> str:
    """A table with as many pairs in a row as fit, ordered by column."""
    for width in (4, 3, 2, 1):
        found = rows(width, head, pairs)
        if max(map(columns, found.split("\n"))) <= COLUMNS:
            break
    return found


def rows(width: int, head: tuple[str, str], pairs: Pairs) -> str:
    height = -(-len(pairs) // width)
    padded = pairs + [("", "")] * (height * width - len(pairs))
    lines = [row(head * width), "|" + "---|" * (2 * width)]
    return "\n".join([*lines, *(row(cell for pair in padded[at::height] for cell in pair) for at in range(height))])


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
