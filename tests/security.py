"""The lists of docs/en/understand/security.md and docs/log/attacks.md, made from docs/data/security.toml and attacks.toml."""

import tomllib
from collections.abc import Iterator
from typing import Any

from tests.pages import DOCS
from tests.wrapping import COLUMNS, wrapped

DATA: dict[str, Any] = tomllib.loads((DOCS / "data/security.toml").read_text("utf-8"))
ATTACKS: list[dict[str, Any]] = tomllib.loads((DOCS / "data/attacks.toml").read_text("utf-8"))["attack"]


def faults() -> str:
    """A section for each group, an entry for each class of faults."""
    parts = []
    for group in DATA["group"]:
        parts.append(f"### {group['title']}")
        parts += ["\n".join(entry(one)) for one in DATA["class"] if one["group"] == group["id"]]
    return "\n\n".join(parts)


def entry(one: dict[str, Any]) -> Iterator[str]:
    """Title, text and files of tests of one class."""
    text = f"**{one['title']}.** {' '.join(one['text'].split())} Tests: {', '.join(files(one))}."
    for number, line in enumerate(wrapped(text, COLUMNS - 2)):
        yield f"{'  ' if number else '* '}{line}"


def files(one: dict[str, Any]) -> list[str]:
    """The test files of an entry, each once."""
    return list(dict.fromkeys(f"`{name.partition('::')[0]}`" for name in one["tests"]))


def complaints() -> str:
    """An entry for each complaint."""
    return "\n\n".join("\n".join(entry(one)) for one in DATA["complaint"])


def attacks() -> str:
    """An entry for each attack."""
    return "\n\n".join("\n".join(attack(one)) for one in ATTACKS)


def attack(one: dict[str, Any]) -> Iterator[str]:
    """Name, request, both answers and the files of the tests."""
    answers = f"*Before:* {one['before']}. *Now:* {one['now']}."
    text = f"**{one['attack']}**: {one['request']}. {answers} Tests: {', '.join(files(one))}."
    for number, line in enumerate(wrapped(text, COLUMNS - 2)):
        yield f"{'  ' if number else '* '}{line}"
