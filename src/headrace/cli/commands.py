"""The application: its commands, the list that its help shows, and its log."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import typer

import headrace
from headrace.cli.help import App

# Names of the commands by panel of the help; their descriptions are the docstrings of their functions.
COMMANDS = {
    "Generate": (
        *("run", "chat", "ask", "generate", "embed", "rerank", "classify", "translate", "transcribe", "serve"),
        *("engine", "rank", "deploy", "models"),
    ),
    "Models": (
        *("pull", "list", "show", "rm", "add", "cp", "inspect", "merge", "compress", "distil"),
        *("train-heads", "train-masked", "train-classifier", "calibrate", "doctor"),
    ),
    "Measure": ("fit", "perplexity", "arithmetic", "compare", "bench"),
}
BENCH_HELP = "Measure speed: this machine, servers under load, speculation, compression, early exit."
BENCH = {
    "Commands": (
        *("local", "serve", "latency", "speculate", "self-draft", "sharing", "cascade", "token-cascade"),
        *("kv", "compressed", "exits", "parallel", "router", "synthetic"),
    )
}
# Commands of `bench` that left the package, and the module of `benchmarks` in a clone.
MOVED = {
    "peers": "peers",
    "peers-speculate": "peers.speculation",
    "beams": "peers.beams",
    "linears": "linears",
    "masks": "masks",
    "batching": "batching",
    "tools": "tool_calls",
    "refine": "refine",
}
# Modules and functions of the commands whose module or function has another name.
MODULES = {
    **dict.fromkeys(("pull", "list", "show", "rm"), "models"),
    **dict.fromkeys(("add", "cp"), "names"),
    "models": "served",
    "bench_latency": "bench_serve",
}
FUNCTIONS = {"list": "list_models", "rm": "remove", "cp": "copy"}

HELP = "Run language models on this machine, offline, with many decoding methods."
EPILOG = "\n\n".join(
    (
        "Exit codes: 0 done; 1 error, or lines with errors in generate; 2 wrong usage; 130 interrupted.",
        "HEADRACE_HOME: folder of models and of the history of chat (~/.cache/headrace).",
        "HEADRACE_LOG: debug, info, warning (default) or error. HEADRACE_DEBUG=1 adds the traceback of an error.",
        "XDG_CONFIG_HOME: your own catalogs are headrace/*.toml in it (~/.config).",
        "HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE: as for the model hub's own tools.",
    )
)

LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def build(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Build the application.

    With `arguments` it imports only the command that they name; if they name none, it has all names and descriptions, for the
    help and for suggestions. Without `arguments` it has all commands.
    """
    app = App(help=HELP, epilog=EPILOG, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_start)
    _fill(app, COMMANDS, "", arguments)
    return app


def asked_for(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments, or the incomplete command line if a shell asks for completions."""
    if os.environ.get("_HEADRACE_COMPLETE") is None:
        return arguments
    return (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or "").split()[1:]


def _fill(app: typer.Typer, panels: Mapping[str, Sequence[str]], group: str, arguments: Sequence[str] | None) -> None:
    names = [name for panel in panels.values() for name in panel]
    words = [word for word in arguments or () if not word.startswith("-")]
    wanted = words[:1] if words and words[0] in names else []
    if arguments is not None and not wanted:
        for panel, commands in panels.items():
            for name in commands:
                text = BENCH_HELP if name == "bench" else description(group, name)
                app.command(name, help=text, rich_help_panel=panel)(_only_listed)
        return
    if "bench" in (wanted or names):
        bench = App(help=BENCH_HELP, no_args_is_help=True)
        _fill(bench, BENCH, "bench_", None if arguments is None else words[1:])
        app.add_typer(bench, name="bench")
    for module in dict.fromkeys(module_of(group, name) for name in wanted or names if name != "bench"):
        import_module(module).register(app)


def module_of(group: str, name: str) -> str:
    """Module of a command. group: "bench_", or "" for the others."""
    word = group + name.replace("-", "_")
    return f"headrace.cli.{MODULES.get(word, word)}"


def description(group: str, name: str) -> str:
    """First paragraph of a command's docstring, read from its source: the help imports no command."""
    module, function = module_of(group, name), FUNCTIONS.get(name, name.replace("-", "_"))
    source = Path(__file__).with_name(module.rpartition(".")[2] + ".py").read_text("utf-8")
    docstring = re.search(rf'^def {function}\(.*?^    """(.*?)(?:\n\n|""")', source, re.DOTALL | re.MULTILINE)
    assert docstring is not None, f"{module}.{function} has no docstring"
    return " ".join(docstring[1].split())


def _only_listed() -> None:
    raise AssertionError("a command that is only listed was called")


def _start(
    context: typer.Context,
    show_version: bool = typer.Option(False, "--version", help="Show the version and exit."),
) -> None:
    set_up_log()
    if show_version:
        typer.echo(f"headrace {headrace.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


def set_up_log() -> None:
    name = os.environ.get("HEADRACE_LOG") or "warning"
    if name.lower() not in LOG_LEVELS:
        raise typer.BadParameter(f"HEADRACE_LOG is {name!r}; set it to one of {', '.join(LOG_LEVELS)}")
    log = logging.getLogger("headrace")
    log.setLevel(LOG_LEVELS[name.lower()])
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
