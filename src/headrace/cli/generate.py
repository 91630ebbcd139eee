"""Command generate: an offline batch of requests from a file."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
    bound,
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


def _ray(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Ray", **more)


@dataclass
class RayOptions:
    """Options of a batch on a Ray cluster."""

    ray: Annotated[bool, _ray("Answer on the Ray cluster of RAY_ADDRESS, one engine for each actor.", "--ray")] = False
    actors: Annotated[str, _ray("Least and most actors of --ray.", metavar="A..B")] = "1..1"
    ray_open: Annotated[
        bool, _ray("Without RAY_ADDRESS: start a Ray here, whose sockets listen on every network.", "--ray-open")
    ] = False

    def check(self, show_exits: bool) -> None:
        """Raises typer.BadParameter, ValueError."""
        parse_range(self.actors)
        if not self.ray:
            return
        if show_exits:
            raise typer.BadParameter("--show-exits counts exits of one process; leave it or --ray out")
        from headrace.workflows.ray_batch import check_address

        check_address(self.ray_open)


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
    cluster: RayOptions,
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
    cluster.check(show_exits)
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
            if cluster.ray:
                _on_ray(source, output, fetch(model), options, max_num_seqs, sampling.settings(), more, cluster)
            else:
                _here(source, output, model, options, max_num_seqs, sampling, more, show_exits)
        finally:
            output.remove_if_empty()
            output.close()
    return _conclude(output)


def parse_range(text: str) -> tuple[int, int]:
    """Read "1..4", or "2" for both ends. Raises typer.BadParameter."""
    least, dots, most = text.partition("..")
    try:
        ends = int(least), int(most if dots else least)
    except ValueError:
        ends = 0, 0
    if not 1 <= ends[0] <= ends[1]:
        raise typer.BadParameter(f"{text} must be two numbers A..B with 1 ≤ A ≤ B, such as 1..4")
    return ends


def _here(
    source: Path,
    output: BatchOutput,
    model: str,
    options: ModelOptions,
    max_num_seqs: int,
    sampling: SamplingOptions,
    more: dict[str, Any],
    show_exits: bool,
) -> None:
    """Answer the lines with an engine of this process."""
    llm = open_llm(model, options, max_num_seqs=max_num_seqs, preset="offline")
    output.start()
    from headrace.workflows.batch import answer, read_requests

    with Interrupt() as interrupt, Meter(output.total, len(output.done)) as meter:
        answer(llm, read_requests(source), output, partial(sampling.bind(llm, stated), **more), meter, interrupt)
    if show_exits:
        from headrace.cli.token_colours import print_exit_legend

        print_exit_legend(meter.exits, llm.model_config.num_layers)


def _on_ray(
    source: Path,
    output: BatchOutput,
    model: Path,
    options: ModelOptions,
    max_num_seqs: int,
    sampling: dict[str, Any],
    more: dict[str, Any],
    cluster: RayOptions,
) -> None:
    """Answer the lines on Ray. Raises ValueError."""
    from headrace.workflows import ray_batch

    settings = {**asdict(options), "max_num_seqs": max_num_seqs, "preset": "offline"}
    given = {"sampling": sampling, "more": more}
    output.start()
    with Interrupt() as interrupt, Meter(output.total, len(output.done)) as meter:
        ray_batch.run(
            source,
            output,
            str(model),
            settings,
            bound_params,
            given,
            actors=parse_range(cluster.actors),
            stepped=lambda done: meter.stepped(done, []),
            stop=interrupt,
        )


def bound_params(llm: Any, given: Mapping[str, Any]) -> Callable[..., Any]:
    """The parameters of requests in an actor of Ray, from plain data."""
    return partial(bound(llm, given["sampling"], stated), **given["more"])


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
