"""Lists of docs/en/understand/architecture.md, made from docs/data/architecture.toml."""

import tomllib
from collections.abc import Iterable
from typing import Any

from tests.pages import DOCS
from tests.wrapping import COLUMNS, wrapped

DATA: dict[str, Any] = tomllib.loads((DOCS / "data/architecture.toml").read_text("utf-8"))


def entries(texts: Iterable[str]) -> str:
    """A list."""
    lines = []
    for text in texts:
        lines += [f"{'  ' if number else '* '}{line}" for number, line in enumerate(wrapped(text, COLUMNS - 2))]
    return "\n".join(lines)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def packages() -> str:
    contents = DATA["package"].items()
    return entries(f"`{name}{'' if name.endswith('.py') else '/'}`: {holds}" for name, holds in contents)


def types() -> str:
    return entries(f"{code(one['names'])}: {one['holds']}. Owner: {one['owner']}." for one in DATA["type"])


def interfaces() -> str:
    return entries(f"`{one['name']}` ({code(one['methods'])}): {one['purpose']}" for one in DATA["interface"])
