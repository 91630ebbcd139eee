"""The table of a request's parameters, from what is declared of them, written into docs/decoding.md.

PYTHONPATH=src python -m tests.parameters
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import msgspec

from headrace.data.fields import BIASES, ID_LISTS, IDS, TEXTS, Declared, declared
from headrace.data.params import BeamSearchParams, RefineParams, SamplingParams, StructuredOutputs
from tests.pages import write

PART = "parameters"


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


if __name__ == "__main__":
    write(PART, table())
