"""Help in plain text, by group, and in two lengths: `--help` has what most need, with examples, `--help-all` has everything."""

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from headrace.data.progress import counted

ALL = "headrace.help-all"  # in a context: everything is to be shown
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Quick:
    """Makes values of what was typed. Texts, and what was not typed, are what they are; for others typer asks a library that
    takes as long to import as all else of a help."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value, as typer would have it."""
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
    """A command whose options are listed by their panel."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options."""
        return _quickly(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """As is usual: MODEL, and [PROMPT] where it may be left out."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options of no panel, then those of each panel."""
        _sections(formatter, [(_panel(one), one.get_help_record(ctx)) for one in self.get_params(ctx)])


class ShortHelp(Help):
    """A command of which `--help` shows the options named `common` (none: all), and `examples`: (command line, what it
    does)."""

    common: frozenset[str]
    examples: tuple[tuple[str, str], ...]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """All of it, or the common part."""
        if ctx.meta.get(ALL):
            super().format_options(ctx, formatter)
            return
        shown = [one for one in self.get_params(ctx) if not self._rare(one)]
        rows = [("Arguments" if isinstance(one, TyperArgument) else "", one.get_help_record(ctx)) for one in shown]
        _sections(formatter, rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Examples, and what was left out, go before it."""
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


class Group(TyperGroup):
    """A group whose commands are listed by their panel."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments and options."""
        return _quickly(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options, then the commands of each panel."""
        _sections(formatter, [(_panel(one), one.get_help_record(ctx)) for one in self.get_params(ctx)])
        listed: list[Any] = list(self.commands.values())
        _sections(formatter, [(one.rich_help_panel, (one.name, one.get_short_help_str(1000))) for one in listed])


class App(typer.Typer):
    """Commands and groups whose help is ours: plain text needs no library that draws, so that it is there at once."""

    def __init__(self, **more: Any) -> None:
        super().__init__(rich_markup_mode=None, cls=Group, context_settings=SETTINGS, **more)

    def command(self, name: str | None = None, *, cls: Any = Help, **more: Any) -> Callable[[Any], Any]:
        """As of Typer."""
        return super().command(name, cls=cls, **more)


def _panel(one: Any) -> str:
    return one.rich_help_panel or ("Arguments" if isinstance(one, TyperArgument) else "")


def _sections(formatter: Any, rows: list[tuple[str, tuple[str, str] | None]]) -> None:
    """Rows of (section, (names, what they are)), in the order of their sections; those of no section are options."""
    found: dict[str, list[tuple[str, str]]] = {"Arguments": [], "": []}
    for section, row in rows:
        if row is not None:
            found.setdefault(section, []).append(
                (re.sub(r"<list\[(\w+)\]>", lambda kind: f"<{kind[1].lower()}>", row[0]), row[1])
            )
    for section, listed in found.items():
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
    """Names of the catalog and of what is installed, for the shell."""
    from headrace.weights import catalog, names
    from headrace.weights.store import installed

    known = {*catalog.load(), *(record.name for record in installed()), *(one.name for one in names.given())}
    return sorted(name for name in known if name.startswith(incomplete))


def short_help(common: str, *examples: tuple[str, str]) -> type[ShortHelp]:
    """The class of a command, for typer. `common`: names of parameters, with blanks between; none: all."""
    return type("ShortHelp", (ShortHelp,), {"common": frozenset(common.split()), "examples": examples})
