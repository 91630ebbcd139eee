"""The command `headrace`: its options, its log, its errors and exit codes.

A command lives in its own module with `register(app)`. What is heavy (torch, the model hub's library) is imported inside the
command's function, so that `headrace --help` and `headrace list` stay instant.
"""

import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import typer

from headrace.cli import (
    arithmetic,
    ask,
    bench,
    chat,
    compare,
    compress,
    embed,
    generate,
    inspect,
    models,
    perplexity,
    run,
    serve,
    train_heads,
)
from headrace.cli.output import say

COMMANDS = (
    *(run, chat, ask, generate, embed, serve, models, inspect, compress, perplexity, arithmetic, compare, train_heads, bench),
)

OK, ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130

HELP = "Run language models on this machine: fast, offline, many decoding methods in one loop."
EPILOG = "\n\n".join(
    (
        "Exit codes: 0 done; 1 error, or generate had lines with errors; 2 wrong usage; 130 interrupted.",
        "HEADRACE_HOME: where models and the history of chat are kept (~/.cache/headrace).",
        "HEADRACE_LOG: debug, info, warning (default) or error. HEADRACE_DEBUG=1 shows where an error came from.",
        "XDG_CONFIG_HOME: your own catalogs lie there in headrace/*.toml (~/.config).",
        "HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE: as for the model hub's own tools.",
    )
)

LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Every error is one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # no answer may fail over a character that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = build()(args=argv, prog_name="headrace", standalone_mode=False)
        code = code if isinstance(code, int) else OK
        sys.stdout.flush()
    except typer.TyperException as error:
        return _wrong_usage(error)
    except typer.Abort:
        say("headrace: nothing done")
        return ERROR
    except BrokenPipeError:  # whoever read our output has gone, as in `headrace list | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        return _failed(error)
    if code == INTERRUPTED:
        say("headrace: interrupted")
    return code


def build() -> typer.Typer:
    """The application with every command."""
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(help=HELP, epilog=EPILOG, pretty_exceptions_enable=False, context_settings=settings)
    app.callback(invoke_without_command=True)(_start)
    for module in COMMANDS:
        module.register(app)
    return app


def _start(
    context: typer.Context,
    show_version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    _set_up_log()
    if show_version:
        typer.echo(f"headrace {_version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit(OK)


def _set_up_log() -> None:
    name = os.environ.get("HEADRACE_LOG") or "warning"
    if name.lower() not in LOG_LEVELS:
        raise typer.BadParameter(f"HEADRACE_LOG is {name!r}; set it to one of {', '.join(LOG_LEVELS)}")
    log = logging.getLogger("headrace")
    log.setLevel(LOG_LEVELS[name.lower()])
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "(not installed)"


def _wrong_usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "headrace"
    say(f"headrace: {error.format_message().replace('Value error, ', '').rstrip('.')} ({command} --help shows the usage)")
    return error.exit_code


def _failed(error: Exception) -> int:
    if os.environ.get("HEADRACE_DEBUG"):
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'the output'}: {error.strerror}"
    if isinstance(error, ValueError | OSError) and text:  # meant for the person; others are our own mistakes
        say(f"headrace: {text}")
    else:
        say(f"headrace: {type(error).__name__}: {text} (a bug in Headrace; HEADRACE_DEBUG=1 shows where)")
    return ERROR
