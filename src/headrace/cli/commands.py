"""The application: its commands, what its help says of all of them, and its log."""

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module

import typer

import headrace
from headrace.cli.help import App

# What the help lists: each command with the first sentence of its own help, so that none has to be imported for it.
COMMANDS = {
    "Generate": {
        "run": "Answer a prompt; the answer goes to stdout as it comes, figures to stderr.",
        "chat": "Talk with a model.",
        "ask": "Answer questions from the documents of a folder (BM25 retrieval), and say which were cited.",
        "generate": "Answer every line of a file; answers come in order of completion.",
        "embed": 'Turn texts into vectors of length 1: one JSON line each, {"text", "tokens", "embedding"}.',
        "classify": 'Say which class each text is of: one JSON line each, {"text", "tokens", "label", "probabilities", '
        '"layers"}.',
        "translate": "Write what an encoder-decoder (Marian, T5) makes of each text: one line each.",
        "serve": "Serve a model to OpenAI clients; it is downloaded where it is missing.",
    },
    "Models": {
        "pull": "Download models; what is here already is checked.",
        "list": "List the models that are here, by name and where they lie, and those of the catalog; or those in folders.",
        "show": "Show what is known of a model: where it lies, whether it runs here, and the settings in force.",
        "rm": "Delete a model from this machine; of a name that was given to one (headrace add) only the name.",
        "add": "Give a model a name, with settings, a system prompt and a chat template of its own.",
        "cp": "Give what is known by one name another, to change settings in; no file is copied.",
        "inspect": "Show a model's architecture, tensors, number formats, KV bytes per token, tokenizer and chat template.",
        "compress": "Write a model as a GGUF file, or a folder, with numbers in fewer bits: each rounded to the nearest its "
        "block can have, or so that the layers' outputs on texts change least (--method).",
        "distil": "Train a smaller model to do as MODEL does, or heal one that was pruned or rounded; OUT is a folder as any "
        "model's.",
        "train-heads": "Train heads that draft for a model, from its own answers; then: --draft OUT.",
        "train-masked": "Train a small model that fills in blocks of masked tokens, to try out non-autoregressive decoding.",
        "train-classifier": "Train a classifier with an exit after each layer of an encoder (BERT, MiniLM), whose own weights "
        "stay as they are.",
        "calibrate": "Find the lowest threshold for tokens that leave early with which little is lost for sure (Learn then "
        "Test).",
        "doctor": "Show what a bug report should say of this installation, and what is wrong with it (exit code 1).",
    },
    "Measure": {
        "perplexity": "Measure how well a model predicts a text: exp of the mean negative log-likelihood of its tokens.",
        "arithmetic": "Say what a token costs in each number format: bytes of weights, of K and V, the ceiling that memory "
        "sets, the error.",
        "compare": "Decoding methods on the same prompts: tokens/s, repetition, KV blocks.",
        "bench": "Measure: batching policies, speed on this machine, servers under load.",
    },
}
BENCH = {
    "Commands": {
        "local": "Prefill of 512 and 2048 tokens, decoding at batch 1 to 32 and at contexts up to 8k, verifying 5 and 8 "
        "tokens, load time, memory.",
        "serve": "Load on any OpenAI server: latencies, throughput, goodput.",
        "latency": "Time to the first token against prompt length, and greedy decoding against sampling.",
        "speculate": "Plain and speculative decoding in turns: acceptance, tokens per step, costs, predicted and measured "
        "speed-up.",
        "self-draft": "Search the layers, or the sublayers to leave out, with which a model drafts for itself; only a gain is "
        "saved.",
        "sharing": "KV blocks of parallel samples and of beams, with and without sharing, on the same prompts.",
        "cascade": "What a cascade of two models loses and saves on questions with known answers, and a threshold with a "
        "guarantee.",
        "token-cascade": "Cascades by token and speculative cascades over thresholds, beside plain decoding and a draft by the "
        "same smaller model.",
        "kv": "K and V in bfloat16, int8 and int4: bytes a token, what is lost on a text, tokens/s at long contexts.",
        "compressed": "Compressed models beside the one they were made of: size, perplexity, KL, questions, tokens/s in turns, "
        "memory.",
        "exits": "Accuracy, layers and time of what leaves early beside the whole model: texts of a classifier, or tokens of a "
        "decoder.",
    }
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
# Where a command is, if not in the module of its name.
MODULES = {
    **dict.fromkeys(("pull", "list", "show", "rm"), "models"),
    **dict.fromkeys(("add", "cp"), "names"),
    "bench_latency": "bench_serve",
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


def build(arguments: Sequence[str] | None = None) -> typer.Typer:
    """The application: with the one command that `arguments` ask for, or, where they ask for none, with names of commands for
    the help and for who mistyped one; without `arguments` with all commands."""
    app = App(help=HELP, epilog=EPILOG, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_start)
    _fill(app, COMMANDS, "", arguments)
    return app


def asked_for(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments; or what is typed so far, where a shell asks how it may go on."""
    if os.environ.get("_HEADRACE_COMPLETE") is None:
        return arguments
    return (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or "").split()[1:]


def _fill(app: typer.Typer, listed: Mapping[str, Mapping[str, str]], group: str, arguments: Sequence[str] | None) -> None:
    names = [name for panel in listed.values() for name in panel]
    words = [one for one in arguments or () if not one.startswith("-")]
    asked = words[:1] if words and words[0] in names else []
    if arguments is not None and not asked:
        for panel, commands in listed.items():
            for name, line in commands.items():
                app.command(name, help=line, rich_help_panel=panel)(_elsewhere)
        return
    if "bench" in (asked or names):
        bench = App(help=listed["Measure"]["bench"], no_args_is_help=True)
        _fill(bench, BENCH, "bench_", None if arguments is None else words[1:])
        app.add_typer(bench, name="bench")
    for module in dict.fromkeys(module_of(group, name) for name in asked or names if name != "bench"):
        import_module(module).register(app)


def module_of(group: str, name: str) -> str:
    """Where a command is. `group`: "bench_" or nothing."""
    word = group + name.replace("-", "_")
    return f"headrace.cli.{MODULES.get(word, word)}"


def _elsewhere() -> None:
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
