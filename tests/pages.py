"""Generated parts of pages. Each part stands between two marks with its name, and one function writes it.

PYTHONPATH=src python -m tests.pages            write all parts
PYTHONPATH=src python -m tests.pages PART...    write these parts
"""

import sys
from importlib import import_module
from pathlib import Path

from tests import wrapping

DOCS = Path(__file__).parents[1] / "docs"
# (page below docs, module and function that return its text) of each part.
PARTS = {
    "commands": ("en/reference/commands.md", "tests.reference.commands:text"),
    "sampling": ("en/reference/sampling.md", "tests.reference.params:sampling"),
    "settings": ("en/reference/settings.md", "tests.reference.params:settings"),
    "http": ("en/reference/http-fields.md", "tests.reference.http:text"),
    "metrics": ("en/reference/metrics.md", "tests.reference.metrics:text"),
    "python": ("en/reference/python.md", "tests.reference.python:text"),
    "composition": ("en/reference/composition.md", "tests.composition:text"),
    "combinations": ("en/understand/pipeline-parallelism.md", "tests.parallel.refusals:table"),
    "tp-refusals": ("en/understand/tensor-parallelism.md", "tests.parallel.refusals:text"),
    "glossary": ("zh/understand/glossary.md", "tests.reference.glossary:text"),
    "packages": ("en/understand/architecture.md", "tests.architecture:packages"),
    "types": ("en/understand/architecture.md", "tests.architecture:types"),
    "interfaces": ("en/understand/architecture.md", "tests.architecture:interfaces"),
    "faults": ("en/understand/security.md", "tests.security:faults"),
    "complaints": ("en/understand/security.md", "tests.security:complaints"),
    "attacks": ("log/attacks.md", "tests.security:attacks"),
    "speed": ("en/understand/speed.md", "benchmarks.peers.record:tables"),
    "speed-readme": ("../README.md", "benchmarks.peers.record:short_table"),
    "speed-readme-zh": ("../README.zh-CN.md", "benchmarks.peers.record:chinese_short_table"),
    "papers": ("en/understand/papers.md", "tests.papers:text"),
    "sections": ("en/understand/seeds.md", "tests.seeds:sections"),
    "statements": ("en/understand/seeds.md", "tests.seeds:statements"),
    "zh-sections": ("zh/understand/seeds.md", "tests.seeds:chinese_sections"),
    "zh-statements": ("zh/understand/seeds.md", "tests.seeds:chinese_statements"),
}


def page_of(part: str) -> Path:
    return DOCS / PARTS[part][0]


def generated(part: str) -> str:
    """The text that a part must have, from the code."""
    module, _, function = PARTS[part][1].partition(":")
    text: str = getattr(import_module(module), function)()
    return text.strip()


def stale(part: str) -> str:
    """The message for a part that differs from the code."""
    return f"docs/{PARTS[part][0]} differs from the code; write it with: PYTHONPATH=src python -m tests.pages {part}"


def written(part: str) -> str:
    """The text of a part, as its page has it."""
    begin, end = marks(part)
    return page_of(part).read_text("utf-8").partition(begin)[2].partition(end)[0].strip()


def marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: begin -->", f"<!-- {part}: end -->"


def write(part: str) -> None:
    """Replace a part of its page."""
    begin, end = marks(part)
    before, found, rest = page_of(part).read_text("utf-8").partition(begin)
    assert found, f"{page_of(part)} lacks {begin}"
    page_of(part).write_text(f"{before}{begin}\n\n{generated(part)}\n\n{end}{rest.partition(end)[2]}", "utf-8")


def wrapped(text: str, indent: str = "") -> str:
    """Text in lines of at most 100 columns; code and links are not broken."""
    return "\n".join(indent + line for line in wrapping.wrapped(text, wrapping.COLUMNS - len(indent)))


def item(name: str, text: str) -> str:
    """An entry of a list."""
    return "* " + wrapped(f"{name}: {text}" if text else name, "  ").lstrip()


if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        write(name)
