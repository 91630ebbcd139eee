"""The lists of docs/en/understand/architecture.md, written from docs/data/architecture.toml.

PYTHONPATH=src python -m tests.architecture
"""

import tomllib
from collections.abc import Iterable
from typing import Any

from tests.pages import DOCS
from tests.wrapping import COLUMNS, wrapped, write_part

PAGE = DOCS / "en/understand/architecture.md"
DATA: dict[str, Any] = tomllib.loads((DOCS / "data/architecture.toml").read_text("utf-8"))


def entries(texts: Iterable[str]) -> str:
    """A list."""
    lines = []
    for text in texts:
        lines += [f"{'  ' if number else '* '}{line}" for number, line in enumerate(wrapped(text, COLUMNS - 2))]
    return "\n".join(lines)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def parts() -> dict[str, str]:
    """Text of each part of the page."""
    return {
        "packages": entries(
            f"`{name}{'' if name.endswith('.py') else '/'}`: {contents}" for name, contents in DATA["package"].items()
        ),
        "types": entries(f"{code(one['names'])}: {one['holds']}. Owner: {one['owner']}." for one in DATA["type"]),
        "interfaces": entries(f"`{one['name']}` ({code(one['methods'])}): {one['purpose']}" for one in DATA["interface"]),
    }


if __name__ == "__main__":
    for name, text in parts().items():
        write_part(PAGE, name, text)
