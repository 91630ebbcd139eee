"""Help in plain text, by group: `--help` shows common options with examples, `--help-all` all options."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from headrace.data.progress import counted

# Key in a context: show all options.
ALL = "headrace.help-all"
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Quick:
    """Converts typed values. Texts and defaults need no conversion; for other types typer imports a slow library."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the value that typer would return."""
        kind = param.type_descriptor.annotation
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if (kind in (str, bool) and isinstance(value, kind)) or value == param.default:  # a number of a file has bounds
            return value
        return type(param).get_runtime_param(param).coerce(value, param=param, ctx=ctx)


QUICK = Quick()


def _quickly(params: list[Any]) -> list[Any]:
    for one in params:
        one.get_runtime_param = lambda: QUICK
    return params


class Help(TyperCommand):
    """A command whose help lists options by panel."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options."""
        return _quickly(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage: MODEL, and [PROMPT] if it is optional."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options without a panel, then the options of each panel."""
        _sections(formatter, [(_panel(one), one.get_help_record(ctx)) for one in self.get_params(ctx)])


class ShortHelp(Help):
    """A command whose `--help` shows the options `common` (empty: all) and `examples`, pairs of command line and purpose."""

    common: frozenset[str]
    examples: tuple[tuple[str, str], ...]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Return the full help, or the common part."""
        if ctx.meta.get(ALL):
            super().format_options(ctx, formatter)
            return
        shown = [one for one in self.get_params(ctx) if not self._rare(one)]
        rows = [("Arguments" if isinstance(one, TyperArgument) else "", one.get_help_record(ctx)) for one in shown]
        _sections(formatter, rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples and the note on hidden options first."""
        if not ctx.meta.get(ALL):
            with formatter.section("Examples"):
                for line, what in self.examples:
                    formatter.write(f"  {line}\n      {what}\n")
            left = sum(map(self._rare, self.get_params(ctx)))
            if left:
                formatter.write(f"\n{counted(left, 'more options')}, by group: {ctx.command_path} --help-all\n")
        super().format_epilog(ctx, formatter)

    def _rare(self, one: Any) -> bool:
        always = not self.common or not isinstance(one, TyperOption) or one.required
        return not always and one.name not in {*self.common, "help_all", "help"}


class CommandGroup(TyperGroup):
    """A group whose help lists commands by panel."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options."""
        return _quickly(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the commands of each panel."""
        _sections(formatter, [(_panel(one), one.get_help_record(ctx)) for one in self.get_params(ctx)])
        listed: list[Any] = list(self.commands.values())
        _sections(formatter, [(one.rich_help_panel, (one.name, one.get_short_help_str(1000))) for one in listed])


class App(typer.Typer):
    """Typer application with plain-text help, which needs no slow drawing library."""

    def __init__(self, **more: Any) -> None:
        super().__init__(rich_markup_mode=None, cls=CommandGroup, context_settings=SETTINGS, **more)

    def command(self, name: str | None = None, *, cls: Any = Help, **more: Any) -> Callable[[Any], Any]:
        """Register a command as Typer does."""
        return super().command(name, cls=cls, **more)


def _panel(one: Any) -> str:
    return one.rich_help_panel or ("Arguments" if isinstance(one, TyperArgument) else "")


def _sections(formatter: Any, rows: list[tuple[str, tuple[str, str] | None]]) -> None:
    """Group rows (section, (names, description)) by section, in order; rows without a section are options."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "": []}
    for section, row in rows:
        if row is not None:
            sections.setdefault(section, []).append(
                (re.sub(r"<list\[(\w+)\]>", lambda kind: f"<{kind[1].lower()}>", row[0]), row[1])
            )
    for section, listed in sections.items():
        if listed:
            with formatter.section(section or "Options"):
                formatter.write_dl(listed)


def _show_all(context: typer.Context, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options, by group, and exit.")
]


def complete_model(incomplete: str) -> list[str]:
    """Return the names of catalog and installed models, for shell completion."""
    from headrace.weights import catalog, names
    from headrace.weights.store import installed

    known = {*catalog.load(), *(record.name for record in installed()), *(one.name for one in names.given())}
    return sorted(name for name in known if name.startswith(incomplete))


def short_help(common: str, *examples: tuple[str, str]) -> type[ShortHelp]:
    """Return a command class for typer. common: parameter names separated by spaces; empty for all."""
    return type("ShortHelp", (ShortHelp,), {"common": frozenset(common.split()), "examples": examples})
