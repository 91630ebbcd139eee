"""Tables of the Chinese glossary, from docs/data/glossary.toml."""

import tomllib
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "docs/data/glossary.toml"


def groups() -> list[dict[str, Any]]:
    return tomllib.loads(DATA.read_text("utf-8"))["group"]


def terms() -> list[dict[str, Any]]:
    return [term for group in groups() for term in group["terms"]]


def text() -> str:
    """Terms by subject, terms from English, and words of other texts with the word used here."""
    parts = []
    for group in groups():
        pairs = [(term["zh"], term["en"]) for term in group["terms"]]
        parts.append(f"## {group['zh']}\n\n{table(3, ('中文', 'English'), pairs)}")
    english = sorted(((term["en"], term["zh"]) for term in terms()), key=lambda pair: pair[0].lower())
    parts.append(f"## 从英文查\n\n{table(4, ('English', '中文'), english)}")
    others = [(word, term["zh"]) for term in terms() for word in term.get("wrong", ())]
    parts.append(f"## 别处的译法\n\n这些词在别处常见，本文档不用：\n\n{table(4, ('别处', '本文档'), others)}")
    return "\n\n".join(parts)


def table(width: int, head: tuple[str, str], pairs: list[tuple[str, str]]) -> str:
    """A table with `width` pairs in a row, ordered by column."""
    rows = -(-len(pairs) // width)
    padded = pairs + [("", "")] * (rows * width - len(pairs))
    lines = [row(head * width), "|" + "---|" * (2 * width)]
    lines += [row(cell for pair in padded[at::rows] for cell in pair) for at in range(rows)]
    return "\n".join(lines)


def row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"
