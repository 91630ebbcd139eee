"""Tables of a request's parameters (docs/en/understand/decoding.md) and a model's settings (docs/en/reference/commands.md).

PYTHONPATH=src python -m tests.parameters
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import msgspec

from headrace.data.fields import BIASES, ID_LISTS, IDS, TEXTS, Declared, declared
from headrace.data.params import BeamSearchParams, RefineParams, SamplingParams, StructuredOutputs
from headrace.data.settings import Group, ModelSettings, Setting
from tests.pages import DOCS, write

PART = "parameters"
SETTINGS, COMMANDS = "settings", DOCS / "en/reference/commands.md"


def rows(params: type[msgspec.Struct]) -> Iterator[str]:
    """A line of the table for each field that is declared."""
    for one in declared(params):
        if one.field.doc:
            yield f"| `{one.flat}` | {values(one)} | {default(one)} | {one.field.doc} |"


def values(one: Declared) -> str:
    """What it may be."""
    field = one.field
    said: dict[Any, str] = {
        int: field.bounds if field.bounds != "a finite number" else "a whole number",
        float: field.bounds,
        bool: "true, false",
        TEXTS: f"{field.most} texts",
        IDS: f"{field.most} token ids",
        ID_LISTS: f"{field.most} lists of {field.each} token ids",
        BIASES: f"{field.most} token ids, each {field.bounds}",
        StructuredOutputs: "`StructuredOutputs`",
        BeamSearchParams: "`BeamSearchParams`",
        RefineParams: "`RefineParams`",
    }
    if one.kind in said:
        return said[one.kind]
    if get_origin(one.kind) is Literal:
        return ", ".join(get_args(one.kind))
    return ", ".join(values(replace(one, kind=way)) for way in get_args(one.kind))


def default(one: Declared) -> str:
    return "–" if one.default in (None, ()) else str(one.default).lower()


def table() -> str:
    lines = ["| field | values | default | what it says |", "|---|---|---|---|"]
    return "\n".join([*lines, *rows(SamplingParams), *rows(BeamSearchParams), *rows(RefineParams)])


def setting_rows(settings: type[msgspec.Struct]) -> Iterator[str]:
    """A line of the table for each setting of `LLM`."""
    for one in declared(settings):
        assert isinstance(one.field, Setting)
        option = "–" if one.field.group is Group.PYTHON else f"`--{one.name.replace('_', '-')}`"
        yield f"| `{one.name}` | {option} | {one.field.group.value} | {default(one)} | {one.field.doc} |"


def settings_table() -> str:
    lines = ["| setting | option | of | default | what it does |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *setting_rows(ModelSettings)])


if __name__ == "__main__":
    write(PART, table())
    write(SETTINGS, settings_table(), COMMANDS)
