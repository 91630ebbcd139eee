"""Rendering of chat templates; runs in a confined process.

A template is an untrusted program. jinja2's sandbox blocks attributes and mutation, but neither an endless C call
(`10 ** 10 ** 10`) nor exhaustion of memory.
"""

import functools
import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.text.content_marks import escape_all_but_marks, joined_content, marked_context, marker_of


class GenerationTag(Extension):
    """`{% generation %}` marks the model's text for training; rendering returns its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter `tojson` without jinja2's HTML escapes, since a model reads the text."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return escape_all_but_marks(text) if ensure_ascii else text


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which a forbidden attribute raises at once instead of rendering as empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}, which is not allowed")


@functools.cache
def environment() -> Sandbox:
    """Return the jinja2 dialect of transformers.apply_chat_template."""
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


@functools.lru_cache(maxsize=4)
def compile_template(source: str) -> Template:
    """Compile a template; a model's is compiled once."""
    return environment().from_string(source)


def render_template(source: str, context: dict[str, Any], most: int) -> str:
    pieces, size = [], 0
    for piece in compile_template(source).generate(context):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise TemplateError(f"its output is longer than {most} characters")
    text = "".join(pieces)
    # Raises for a lone surrogate, which cannot be sent or encoded.
    text.encode()
    return text


def read_context(question: dict[str, Any]) -> dict[str, Any]:
    """Return the template's variables, with marks in the content if the question names tokens to mark."""
    context: dict[str, Any] = json.loads(question["context"])
    if "control" not in question:
        return {**context, "messages": list(map(joined_content, context["messages"]))} if "messages" in context else context
    control, quoted = (marker_of(tuple(question[name]), question["source"]) for name in ("control", "quoted"))
    return marked_context(context, control, quoted)


def render(question: dict[str, Any]) -> dict[str, str]:
    """Render {"source", "context" (JSON), "most", and for marks "control" and "quoted" (tokens)} to {"text"} or {"error"}."""
    try:
        return {"text": render_template(question["source"], read_context(question), question["most"])}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except RecursionError:
        return {"error": "it calls or nests itself too deeply"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template can raise anything
        return {"error": str(error) or type(error).__name__}


def warm(_: str) -> None:
    """Make jinja2 load its modules for dates, errors and built-in filters."""
    for source in (
        "{{ strftime_now('%c') }}{{ lipsum() }}{{ 'a'|urlize|pprint }}{{ 1 / 0 }}",
        "{% for %}",
        "{{ ''.__class__ }}",
    ):
        render({"source": source, "context": "{}", "most": 10_000})


def variables(question: dict[str, Any]) -> dict[str, list[str] | None]:
    """Turn {"source"} into {"names"} of the variables that a template reads from its caller; None if it cannot be parsed."""
    try:
        read = meta.find_undeclared_variables(environment().parse(question["source"]))
        return {"names": sorted(read - environment().globals.keys())}
    except (TemplateError, RecursionError, MemoryError):
        return {"names": None}
