"""The application: its commands, what its help says of all of them, and its log."""

import logging
import os
from collections.abc import Sequence
from importlib import import_module

import typer

import headrace

# Modules of commands in the order of the help, with the names of theirs that are not the module's own.
COMMANDS = {
    **dict.fromkeys(("run", "chat", "ask", "generate", "embed", "classify", "serve"), ()),
    "models": ("pull", "list", "show", "rm"),
    "names": ("add", "cp"),
    **dict.fromkeys(("inspect", "compress", "perplexity", "arithmetic", "compare"), ()),
    "train_heads": ("train-heads",),
    "train_classifier": ("train-classifier",),
    "bench": (),
    "doctor": (),
}

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


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """The application, with the one command that is asked for, or with all."""
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(help=HELP, epilog=EPILOG, pretty_exceptions_enable=False, context_settings=settings)
    app.callback(invoke_without_command=True)(_start)
    asked = [module for module, names in COMMANDS.items() if arguments and arguments[0] in (names or (module,))]
    for module in asked or COMMANDS:
        import_module(f"headrace.cli.{module}").register(app)
    return app


def _start(
    context: typer.Context,
    show_version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    _set_up_log()
    if show_version:
        typer.echo(f"headrace {headrace.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


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
