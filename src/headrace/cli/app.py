"""Entry point of the command `headrace`: streams, errors and exit codes.

Imports little, so the first progress line appears at once. Each command has a module with `register(app)`, imported when the
command line names it. Heavy modules (the engine, torch, the hub's library) are imported inside the command's function, so
`headrace --help` and `headrace list` stay fast.
"""

import io
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from headrace.cli.interrupt import INTERRUPTED
from headrace.cli.output import begin, say, status

OK, ERROR, USAGE = 0, 1, 2
# How threads of torch's OpenMP library wait for each other. The library reads them when torch is imported.
OPENMP_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def main(
    argv: Sequence[str] | None = None,
    program: str = "headrace",
    build: Callable[[Sequence[str]], Any] | None = None,
) -> int:
    """Run one command; returns the exit code. Every error is one line on stderr.

    build: makes the application of another `program` (a benchmark of the clone) from its arguments.
    """
    _open_streams()
    # An answer must not fail at a character that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # Bytes of another encoding are an error, not surrogates.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Waiting threads spin for milliseconds by default. Next to other busy processes training then takes four times as long.
    if not any(name in os.environ for name in OPENMP_WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        begin(arguments if build is None else ["bench", *arguments])
        code = _run(arguments, program, build)
    # Also raised while a command's imports run.
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        status().finish()
    if code == INTERRUPTED:
        say("headrace: interrupted")
    return code


def _open_streams() -> None:
    """Replace closed stdin, stdout and stderr (`>&-`), lowest descriptor first, so that no other file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open


def _run(arguments: list[str], program: str, build: Callable[[Sequence[str]], Any] | None) -> int:
    """Run the application and report its error; returns the exit code."""
    import typer

    from headrace.cli import commands

    try:
        app = (build or commands.build)(commands.asked_for(arguments))
        code = app(args=arguments, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return _wrong_usage(error, arguments)
    except typer.Abort:
        say("headrace: nothing done")
        return ERROR
    # The reader of the output has gone, as in `headrace list | head -1`.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except Exception as error:
        return _failed(error)
    return code if isinstance(code, int) else OK


def _wrong_usage(error: Any, arguments: Sequence[str]) -> int:
    from headrace.cli import commands

    context = getattr(error, "ctx", None)
    command = context.command_path if context else "headrace"
    unknown = error.format_message().startswith("No such command")
    if unknown and arguments[0] == "bench" and (moved := commands.MOVED.get(arguments[1])):
        say(f"headrace: bench {arguments[1]} is outside the package now; in a clone: python -m benchmarks.{moved} --help")
        return error.exit_code
    if unknown and arguments and _is_model(arguments[0]):
        typed = shlex.join(arguments)
        say(f"headrace: {arguments[0]} is a model, not a command; to prompt it: headrace run {typed}")
        return error.exit_code
    text = error.format_message()
    if options := getattr(error, "possibilities", None):
        from headrace.data.spelling import did_you_mean, near

        text = f"{error.message}; {did_you_mean(error.option_name, near(error.option_name, options, 1))}"
    other = "; to rank documents: headrace rerank" if arguments[:1] == ["rank"] else ""
    say(f"headrace: {text.replace('Value error, ', '').rstrip('.')} ({command} --help shows the usage{other})")
    return error.exit_code


def _is_model(name: str) -> bool:
    from headrace.cli.help import complete_model

    return name in complete_model(name) or name.endswith(".gguf") or os.path.exists(name)


def _failed(error: Exception) -> int:
    if os.environ.get("HEADRACE_DEBUG"):
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'the output'}: {error.strerror}"
    # These errors are messages for the user; others are defects of Headrace.
    if isinstance(error, ValueError | OSError) and text:
        say(f"headrace: {text}")
    else:
        say(f"headrace: {type(error).__name__}: {text} (a bug in Headrace; HEADRACE_DEBUG=1 shows where)")
    return ERROR
