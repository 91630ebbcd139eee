"""Renders chat templates in a process of its own. Run as a script by chat.py; it imports nothing of Headrace.

A template is a program from a stranger. jinja2's sandbox keeps it from attributes and from changing what it is given,
but not from running for ever inside one C call (`10 ** 10 ** 10`) or filling the memory. The kernel does: a timer on
this process's CPU time ends it, whatever it is doing, and its address space is limited.

Protocol: a line of JSON in ({"source", "context", "seconds", "max_output"}), a line out ({"text"} or {"error"}).
"""

import contextlib
import functools
import json
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training; rendering takes the body as it is."""

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
    """Unlike jinja2's own, no HTML escapes: this text is read by a model."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, but an attribute out of bounds is an error at once and not an empty text."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}, which is not allowed")


def environment() -> Sandbox:
    """The dialect chat templates are written in (that of transformers.apply_chat_template)."""
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def limit_process(memory: int) -> None:
    """Limit memory and files, where the system can; end at the timer even if the parent ignored or blocked it."""
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(limit, (value, value))


@contextlib.contextmanager
def cpu_timer(seconds: float) -> Iterator[None]:
    """Ends the process (SIGPROF) once it has used `seconds` of CPU time, be it inside a C call."""
    if not hasattr(signal, "setitimer"):
        yield  # the parent's clock is the only limit
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@functools.lru_cache(maxsize=4)
def compiled(env: Sandbox, source: str) -> Template:
    """A template ready to be rendered; a model's is compiled once."""
    return env.from_string(source)


def render(env: Sandbox, request: dict[str, Any]) -> str:
    pieces, size = [], 0
    for piece in compiled(env, request["source"]).generate(request["context"]):
        pieces.append(piece)
        size += len(piece)
        if size > request["max_output"]:
            raise TemplateError(f"its output is longer than {request['max_output']} characters")
    return "".join(pieces)


def answer(env: Sandbox, request: dict[str, Any]) -> dict[str, str]:
    try:
        with cpu_timer(request["seconds"]):
            return {"text": render(env, request)}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except RecursionError:
        return {"error": "it calls or nests itself too deeply"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template can raise anything
        return {"error": str(error) or type(error).__name__}


def main() -> None:
    env = environment()
    limit_process(int(sys.argv[1]))
    for line in sys.stdin.buffer:
        reply = json.dumps(answer(env, json.loads(line)))
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
