"""Reference of the command line: every command with its arguments and options, from the typer application."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from headrace.cli.commands import BENCH, COMMANDS, build
from tests.pages import item, wrapped
from tests.wrapping import COLUMNS

# Options of every command.
COMMON = ("--help", "--help-all")


def text() -> str:
    app: Any = get_command(build())
    bench = app.commands["bench"]
    parts, seen = list(overview(app)), dict[str, str]()
    for panel in COMMANDS.values():
        for name in panel:
            parts += section(name, app.commands[name], seen)
    for panel in BENCH.values():
        for name in panel:
            parts += section(f"bench {name}", bench.commands[name], seen)
    return "\n\n".join(parts)


def overview(app: Any) -> Iterator[str]:
    """A list of all commands by panel."""
    for panel, names in COMMANDS.items():
        yield f"**{panel}**"
        yield "\n".join(item(f"[`{name}`](#{name})", app.commands[name].get_short_help_str(1000)) for name in names)
    bench = app.commands["bench"].commands
    yield "**bench**"
    names = [name for panel in BENCH.values() for name in panel]
    yield "\n".join(item(f"[`{name}`](#bench-{name})", bench[name].get_short_help_str(1000)) for name in names)


def section(name: str, command: Any, seen: dict[str, str]) -> Iterator[str]:
    """Usage, description, arguments and options of a command, by panel.

    seen: the command that first had a panel of several options, by the panel's text. A later command refers to it.
    """
    yield f"## {name}"
    context = command.make_context(f"headrace {name}", [], resilient_parsing=True)
    usage = " ".join([f"headrace {name}", *command.collect_usage_pieces(context)[1:]])
    yield f"```text\n{usage}\n```"
    yield from (wrapped(escaped(" ".join(paragraph.split()))) for paragraph in (command.help or "").split("\n\n"))
    if examples := getattr(command, "examples", ()):
        yield "\n".join(["```sh", *(f"# {what}\n{in_lines(line)}" for line, what in examples), "```"])
    panels: dict[str, list[str]] = {}
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None and not any(opt in COMMON for opt in param.opts):
            panel = "Arguments" if type(param).__name__ == "TyperArgument" else param.rich_help_panel or "Options"
            panels.setdefault(panel, []).append(entry(*record))
    for panel, entries in panels.items():
        listed = "\n".join(entries)
        first = seen.setdefault(listed, name) if len(entries) > 2 else name
        yield f"**{panel}**" if first == name else f"**{panel}**: as of [`{first}`](#{first.replace(' ', '-')})."
        if first == name:
            yield listed


def in_lines(command: str) -> str:
    """A command in lines of at most 100 columns, joined by backslashes."""
    return " \\\n    ".join(textwrap.wrap(command, COLUMNS - 6, break_long_words=False, break_on_hyphens=False))


def entry(names: str, help_text: str) -> str:
    """One argument or option: its names and type, its help, its default and range."""
    about, _, extra = help_text.partition("  [")
    about = about if not about.startswith("[") else ""
    extra = extra or (help_text if help_text.startswith("[") else "")
    notes = "; ".join(part.strip() for part in extra.strip("[]").split(";") if part.strip())
    said = f"{escaped(about)}{f' `[{notes}]`' if notes else ''}"
    named = re.sub(r"<list\[(\w+)\]>", lambda kind: f"<{kind[1].lower()}>", names)
    return item(f"`{named}`", said)


def escaped(text: str) -> str:
    """Plain help as Markdown: * and < are literal outside code."""
    parts = text.split("`")
    return "`".join(part if index % 2 else re.sub(r"([<*])", r"\\\1", part) for index, part in enumerate(parts))
