"""Everything public is in the reference: its generated parts equal the code, and no public name is missing in its page."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

import headrace
from headrace.cli.commands import build
from headrace.data.fields import declared
from headrace.data.params import BeamSearchParams, RefineParams, SamplingParams
from headrace.data.settings import ModelSettings
from tests.docs.markdown import BAD, ROOT
from tests.pages import PARTS, generated, page_of, stale, written
from tests.reference.metrics import registered

# tests/e2e/test_composition.py runs the models behind this part.
COMPARED = [part for part in PARTS if part != "composition"]


@pytest.mark.parametrize("part", COMPARED)
def test_a_generated_part_equals_the_code(part: str) -> None:
    assert generated(part) == written(part), stale(part)


def public() -> Iterator[tuple[str, str]]:
    """(part of the reference, text that its page must contain) for each public name."""
    app: Any = get_command(build())
    for group in ("", "bench "):
        commands = app.commands["bench"].commands if group else app.commands
        for name, command in commands.items():
            yield "commands", f"## {group}{name}\n"
            for option in (option for param in command.params for option in param.opts if option.startswith("--")):
                yield "commands", option
    for params in (SamplingParams, BeamSearchParams, RefineParams):
        yield from (("sampling", f"* `{one.name}`") for one in declared(params) if one.field.doc)
    yield from (("settings", f"* `{name}`") for name in ModelSettings.__struct_fields__)
    yield from (("metrics", f"`{metric.name}") for metric in registered().registry.collect())
    for name in headrace.__all__:
        if not name.startswith("_"):
            yield "python", f"### {name}\n"


def missing(pages: dict[str, str]) -> list[str]:
    return [f"docs/{PARTS[part][0]} lacks {text.strip()}" for part, text in public() if text not in pages[part]]


def test_every_public_name_is_in_the_reference() -> None:
    pages = {part: page_of(part).read_text("utf-8") for part in COMPARED}
    assert missing(pages) == []
    page = (BAD / "reference.md").read_text("utf-8")
    assert "docs/en/reference/commands.md lacks --repetition-penalty" in missing({**pages, "commands": page})
    assert "docs/en/reference/commands.md lacks ## bench kv" in missing({**pages, "commands": page})


def undocumented(page: str) -> list[str]:
    """Environment variables that the sources read and the page lacks."""
    sources = [
        path
        for folder in ("src", "csrc", "tests", "tools")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp")
    ]
    pattern = re.compile(r"""(?:getenv\(|environ(?:\.get\(|\[))"(\w+)"(?!\] = )""")
    read = {name for path in sources for name in pattern.findall(path.read_text("utf-8"))}
    assert {"HEADRACE_HOME", "HEADRACE_LOG", "HEADRACE_ISA", "SOAK_SECONDS"} <= read
    return [name for name in sorted(read) if f"`{name}`" not in page]


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs/en/reference/environment.md").read_text("utf-8")
    assert undocumented(page) == []
    assert undocumented(page.replace("`HEADRACE_HOME`", "the home")) == ["HEADRACE_HOME"]
