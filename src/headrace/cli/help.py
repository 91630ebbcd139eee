"""Help in two lengths: `--help` has what most need, with examples, `--help-all` has everything, by group."""

from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

ALL = "headrace.help-all"  # in a context: everything is to be shown


class ShortHelp(TyperCommand):
    """A command of which `--help` shows the options named `common`, and `examples`: (command line, what it does)."""

    common: frozenset[str]
    examples: tuple[tuple[str, str], ...]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """All of it, or the common part; the command is over after it, so what is hidden stays so."""
        if not ctx.meta.get(ALL):
            left, shown = 0, {*self.common, "help_all", "help"}
            for one in self.params:
                if isinstance(one, TyperOption | TyperArgument):
                    rare = isinstance(one, TyperOption) and not one.required and one.name not in shown
                    one.hidden = one.hidden or rare
                    one.rich_help_panel = None
                    left += rare
            lines = [f"{line}\n\n    {what}" for line, what in self.examples]
            more = f"{left} more options, by group: {ctx.command_path} --help-all"
            self.epilog = "\n\n".join(["Examples:", *lines, more, *([self.epilog] if self.epilog else [])])
        super().format_help(ctx, formatter)


def _show_all(context: typer.Context, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta[ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options, by group, and exit.")
]


def short_help(common: str, *examples: tuple[str, str]) -> type[ShortHelp]:
    """The class of a command, for typer. `common`: names of parameters, with blanks between."""
    return type("ShortHelp", (ShortHelp,), {"common": frozenset(common.split()), "examples": examples})
