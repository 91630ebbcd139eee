"""Runs a function as a command whose options, help, progress and errors are those of `headrace`."""

from collections.abc import Callable, Sequence
from typing import Any

from headrace.cli import app
from headrace.cli.commands import set_up_log
from headrace.cli.help import App, short_help
from headrace.cli.options import with_groups


def run(command: Callable[..., Any], name: str, argv: Sequence[str] | None, examples: Sequence[tuple[str, str]]) -> int:
    """Run `command`, the module `benchmarks.NAME`; returns its exit code.

    argv: arguments; those of this process if None. examples: arguments and what they do, for the help.
    """
    program = f"python -m benchmarks.{name}"

    def build(arguments: Sequence[str]) -> App:
        set_up_log()
        application = App(pretty_exceptions_enable=False, add_completion=False)
        lines = ((f"{program} {line}".rstrip(), effect) for line, effect in examples)
        application.command(cls=short_help("", *lines))(with_groups(command))
        return application

    return app.main(argv, program, build)
