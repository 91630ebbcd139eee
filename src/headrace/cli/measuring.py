"""Measuring commands: a function that returns a `Measurement` becomes a command with --json and, if it has curves, --plot."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement, Plot
from headrace.cli.help import short_help
from headrace.cli.options import with_groups, writable
from headrace.cli.output import print_table, say, status

Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads (default: every core).")]
Rounds = Annotated[int, typer.Option(min=1, help="Measurements of each cell, after one warm-up.")]


def add_measurement(
    app: typer.Typer,
    measure: Callable[..., Measurement],
    common: str,
    *examples: tuple[str, str],
    plot: str = "",
    panel: str | None = None,
) -> None:
    """Add `measure` to `app` as a command of its name; its parameters are the options.

    A parameter `save` receives a function that writes unfinished figures to the JSON file. A parameter `with_plot` receives
    whether --plot was given.
    common, examples: see `help.short_help`. plot: help text of --plot; without it there is no such option.
    panel: section of the help in which --json is listed.
    """
    name = measure.__name__.replace("_", "-")
    app.command(name, cls=short_help(common, *examples))(measuring_command(measure, plot, panel))


def measuring_command(measure: Callable[..., Measurement], plot: str = "", panel: str | None = None) -> Callable[..., int]:
    """The function of a command that runs `measure`, prints its tables and writes its files."""
    signature = inspect.signature(measure)
    added = {
        "json_file": typer.Option("--json", help="Write the figures to this file.", callback=writable, rich_help_panel=panel)
    }
    if plot:
        added["plot_file"] = typer.Option("--plot", help=plot, callback=writable)
    options = [option for name, option in signature.parameters.items() if name not in ("save", "with_plot")]
    options += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option])
        for name, option in added.items()
    ]

    def command(json_file: Path | None = None, plot_file: Path | None = None, **values: Any) -> int:
        def save(figures: Any) -> None:
            if json_file is not None:
                json_file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")

        extra = {"save": save, "with_plot": plot_file is not None}
        result = measure(**values, **{name: value for name, value in extra.items() if name in signature.parameters})
        save(result.figures)
        if plot_file is not None and result.plot is not None:
            plot_file.write_text(_svg(result.plot), "utf-8")
        status().finish()
        for part in result.printed:
            if isinstance(part, str):
                print(part)
            else:
                heads, *rows = part.cells()
                print_table(heads, rows)
        return result.exit_code

    command.__name__, command.__doc__ = measure.__name__, measure.__doc__
    command.__signature__ = signature.replace(parameters=[o.replace(kind=o.KEYWORD_ONLY) for o in options])  # type: ignore[attr-defined]
    grouped: Callable[..., int] = with_groups(command)
    return grouped


def _svg(plot: Plot) -> str:
    from headrace.bench.plots import about, draw

    return draw(plot.title, plot.x_name, plot.y_name, plot.lines, about(plot.subject))


def report_cell(line: Callable[[str, dict[str, Any]], str], save: Callable[[Any], None]) -> Callable[[dict[str, Any]], None]:
    """Return the callback after each cell of a measurement.

    It prints `line(name, figures)` of the newest cell, saves all figures, and advances the bar.
    """

    def done(result: dict[str, Any]) -> None:
        name, figures = list(result["cells"].items())[-1]
        say(line(name, figures))
        save(result)
        status().advance(1)

    return done
