"""Reference of the Python API: the public names of `headrace` and the types that their methods return, from the docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import headrace
from headrace.data.fields import declared
from headrace.data.outputs import Classification, Embedding, Score, Vote
from headrace.data.structured import StructuredOutputs
from headrace.decoding.base import Strategy
from headrace.decoding.processors import Processor
from headrace.drafting.base import Drafter
from tests.pages import item, wrapped
from tests.wrapping import COLUMNS

# Types in signatures of the public classes that `headrace` itself does not export.
RETURNED = (Embedding, Classification, Vote, Score, StructuredOutputs)
INTERFACES = (Strategy, Processor, Drafter)
# An entry of a docstring that describes an argument or a field: "name: text" or "- text".
ENTRY = re.compile(r"^(?:[-*] |[a-z_`][\w`, ]*: )")


def text() -> str:
    public = [getattr(headrace, name) for name in headrace.__all__ if not name.startswith("_")]
    parts = ["## Public names"]
    for one in public:
        parts += section(one, "headrace")
    parts.append("## Results and forms")
    for one in RETURNED:
        parts += section(one, one.__module__)
    parts.append("## Interfaces")
    for one in INTERFACES:
        parts += section(one, one.__module__)
    return "\n\n".join(parts)


def section(one: Any, module: str) -> Iterator[str]:
    """A class: where to import it from, its docstring, its fields and its methods."""
    yield f"### {one.__name__}"
    yield f"`from {module} import {one.__name__}`"
    yield from paragraphs(inspect.getdoc(one) or "")
    fields = getattr(one, "__struct_fields__", None) or tuple(getattr(one, "__dataclass_fields__", ()))
    if is_declared(one):
        yield "The fields are those of [sampling.md](sampling.md#" + one.__name__.lower() + ")."
    elif fields:
        hints = one.__annotations__
        yield "\n".join(item(f"`{name}`", f"`{spelled(hints[name])}`") for name in fields if name in hints)
    for name, line, doc in members(one):
        yield f"#### {one.__name__}.{name}"
        yield f"```py\n{line}\n```"
        yield from paragraphs(doc)


def is_declared(one: Any) -> bool:
    return hasattr(one, "__struct_fields__") and any(field.field.doc for field in declared(one))


def members(one: Any) -> Iterator[tuple[str, str, str]]:
    """Name, signature and docstring of the constructor and the public methods that a class itself defines."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
    assert isinstance(node, ast.ClassDef)
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and (member.name[0] != "_" or member.name == "__init__"):
            is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in member.decorator_list)
            line = f"{member.name}: {ast.unparse(member.returns or ast.Name('Any'))}" if is_property else signature(member)
            yield member.name, line, ast.get_docstring(member) or ""


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The signature as the source has it, one argument a line if it is longer than a line."""
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    back = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    arguments = node.args
    bare = [*arguments.posonlyargs, *arguments.args]
    preset = [None] * (len(bare) - len(arguments.defaults)) + arguments.defaults
    rows = [argument(one, value) for one, value in zip(bare, preset, strict=True)]
    if arguments.vararg or arguments.kwonlyargs:
        rows.append(f"*{argument(arguments.vararg, None) if arguments.vararg else ''}")
    rows += [argument(one, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    rows += [f"**{argument(arguments.kwarg, None)}"] if arguments.kwarg else []
    rows = [row for row in rows if row not in ("self", "cls")]
    line = f"{start}{node.name}({', '.join(rows)}){back}"
    return line if len(line) <= COLUMNS else "\n".join([f"{start}{node.name}(", *(f"    {row}," for row in rows), f"){back}"])


def argument(one: ast.arg, value: ast.expr | None) -> str:
    kind = f": {ast.unparse(one.annotation)}" if one.annotation is not None else ""
    preset = "" if value is None else f"{' = ' if kind else '='}{ast.unparse(value)}"
    return f"{one.arg}{kind}{preset}"


def spelled(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def paragraphs(doc: str) -> Iterator[str]:
    """A docstring as Markdown: its paragraphs wrapped, its entries as lists."""
    for block in doc.split("\n\n"):
        if block.startswith("    "):
            yield f"```py\n{textwrap.dedent(block)}\n```"
            continue
        lines: list[str] = []
        for line in block.splitlines():
            if ENTRY.match(line) or not lines:
                lines.append(line.strip())
            else:
                lines[-1] += f" {line.strip()}"
        if not lines:
            return
        shown = [listed(line) if ENTRY.match(line) else wrapped(line) for line in lines]
        starts = ["", *("\n" if text[0] == "*" != before[0] else "" for before, text in pairwise(shown))]
        yield "\n".join(start + text for start, text in zip(starts, shown, strict=True))


def listed(line: str) -> str:
    return "* " + wrapped(re.sub("^[-*] ", "", line), "  ").lstrip()
