"""Command generate: an offline batch of requests from a file."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.interrupt import INTERRUPTED, Interrupt
from headrace.cli.opening import fetch, open_llm
from headrace.cli.options import (
    ChoiceOptions,
    ModelName,
    ModelOptions,
    SamplingOptions,
    ShowExitsOfMany,
    check,
    with_groups,
)
from headrace.cli.output import say, status
from headrace.data.outputs import RequestOutput
from headrace.data.plan import Exited
from headrace.data.progress import Moving, counted
from headrace.weights.defaults import stated
from headrace.workflows.batch_output import BatchOutput

# Seconds between two lines of progress, if stderr is no terminal.
REPORT_SECONDS = 10.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "source target overwrite max_num_seqs preset temperature top_p max_tokens seed json_schema draft max_model_len",
        ("headrace generate MODEL -i prompts.jsonl -o answers.jsonl -m 200", "After a stop the same command continues."),
        ("headrace generate MODEL -i prompts.jsonl -o answers.jsonl -t 0 --overwrite", "Start again, greedily."),
    )
    app.command(cls=short)(with_groups(generate))


def generate(
    model: ModelName,
    sampling: SamplingOptions,
    choice: ChoiceOptions,
    options: ModelOptions,
    source: Annotated[
        Path,
        typer.Option(
            "--input", "-i", metavar="IN.jsonl", exists=True, dir_okay=False, help="Requests, one JSON object per line."
        ),
    ],
    target: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Answers, one JSON object per line.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.jsonl if it exists.")] = False,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in a batch.")] = 32,
    show_exits: ShowExitsOfMany = False,
) -> int:
    """Answer every line of a file. Answers are written in order of completion.

    A line is {"prompt": ...} (continued without the chat template), {"messages": [...]} (with the chat template) or
    {"prompt_token_ids": [...]}, with an optional "id" and sampling parameters; or a line of OpenAI's batch API for
    chat/completions or completions. Without max_tokens an answer ends where the model or the context ends it. "messages" may
    come with continue_final_message, add_generation_prompt and chat_template_kwargs.

    A record is {"id", "outputs", "finish_reason", "usage", "error"}. A line that cannot be answered gets a record with "error";
    the other lines are answered, and the exit code is 1. Lines without "id" are line-N. The second of two lines with the same
    id is an error.

    After a kill or Ctrl-C the same command continues. OUT.jsonl.state holds hashes of the input, the model and the settings; if
    one of them differs, the command stops.
    """
    check(options, sampling, choice)
    if show_exits and options.exits is None and options.cascade is None:
        raise typer.BadParameter("--show-exits goes with --exits FOLDER or --cascade MODEL")
    more = choice.changes()
    # Answers depend on these, too.
    models = {"amateur": options.amateur, "cascade": options.cascade}
    paths = {role: str(fetch(name).resolve()) for role, name in models.items() if name is not None}
    other = options.settings().early_exit | paths
    if target.exists() and source.samefile(target):
        raise typer.BadParameter("input and output are the same file; name another output")
    output = BatchOutput.of(source, target, fetch(model), sampling.settings() | more | other)
    output.read_existing(overwrite)
    if not output.complete:
        output.lock()
        try:
            llm = open_llm(model, options, max_num_seqs=max_num_seqs, preset="offline")
            output.start()
            from headrace.workflows.batch import answer, read_requests

            with Interrupt() as interrupt, Meter(output.total, len(output.done)) as meter:
                answer(llm, read_requests(source), output, partial(sampling.bind(llm, stated), **more), meter, interrupt)
            if show_exits:
                from headrace.cli.token_colours import print_exit_legend

                print_exit_legend(meter.exits, llm.model_config.num_layers)
        finally:
            output.remove_if_empty()
            output.close()
    return _conclude(output)


def _conclude(output: BatchOutput) -> int:
    """Print the result. Returns the exit code."""
    failed = f", {output.failed} with an error" if output.failed else ""
    lines = f"{counted(output.total, 'lines')} {'is' if output.total == 1 else 'are'} done{failed}"
    if not output.complete:
        say(f"{len(output.done)} of {lines}; the same command continues")
        return INTERRUPTED
    say(f"{lines}: {output.path}")
    return 1 if output.failed else 0


class Meter:
    """Progress of a batch run: a bar on a terminal, otherwise a line every REPORT_SECONDS. A `BatchObserver`.

    exits: the exit of every finished token, for requests with early exit or a cascade.
    """

    def __init__(self, total: int, done: int) -> None:
        self.exits: list[Exited] = []
        self._total = total
        self._done = done
        self._tokens = 0
        self._start = self._reported = time.monotonic()
        self._bar = status() if isinstance(status(), Moving) else None

    def __enter__(self) -> "Meter":
        if self._bar:
            self._bar.start("answering", self._total, self._done, unit="lines")
        return self

    def __exit__(self, *_: object) -> None:
        status().finish()
        if self._tokens:
            say(f"{counted(self._tokens, 'tokens')}, {self._speed(0):.1f} tokens/s")

    def note(self, line: str) -> None:
        say(line)

    def finished(self, output: RequestOutput) -> None:
        self._tokens += _tokens(output)
        self.exits += [exited for choice in output.outputs for exited in choice.exits or ()]

    def stepped(self, done: int, running: list[RequestOutput]) -> None:
        now = time.monotonic()
        if self._bar is None and now - self._reported < REPORT_SECONDS:
            return
        speed = f"{self._speed(sum(map(_tokens, running))):.1f} tokens/s"
        if self._bar is not None:
            self._bar.advance(done - self._done, speed)
            self._done = done
        else:
            say(f"{done} of {counted(self._total, 'lines')}, {speed}")
        self._reported = now

    def _speed(self, running_tokens: int) -> float:
        """Tokens a second of this run, with those of requests that are not finished."""
        return (self._tokens + running_tokens) / (time.monotonic() - self._start)


def _tokens(output: RequestOutput) -> int:
    return sum(len(choice.token_ids) for choice in output.outputs)
