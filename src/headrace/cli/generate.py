"""generate: many requests from a file, through one engine."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.batch_lines import BadLine, Job, read_jobs
from headrace.cli.batch_output import BatchOutput, Input, survey
from headrace.cli.help import short_help
from headrace.cli.interrupt import Interrupt
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
from headrace.cli.output import say
from headrace.cli.status import status
from headrace.data.params import SamplingParams
from headrace.data.progress import counted
from headrace.data.progress_bar import Moving
from headrace.weights.defaults import stated

INTERRUPTED = 130
AHEAD = 4  # requests read ahead, for each that can run: the engine never waits for the file, memory stays bounded
SAY_EVERY = 10.0  # seconds, where there is no terminal


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "source target overwrite max_num_seqs preset temperature top_p max_tokens seed json_schema draft max_model_len",
        ("headrace generate MODEL -i prompts.jsonl -o answers.jsonl -m 200", "The same command goes on after a stop."),
        ("headrace generate MODEL -i prompts.jsonl -o answers.jsonl -t 0 --overwrite", "Begin anew, without chance."),
    )
    app.command(cls=short)(with_groups(generate))


def generate(
    model: ModelName,
    sampling: SamplingOptions,
    choice: ChoiceOptions,
    options: ModelOptions,
    source: Annotated[
        Path, typer.Option("--input", "-i", metavar="IN.jsonl", exists=True, dir_okay=False, help="Requests, one a line.")
    ],
    target: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Answers, one a line.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew where OUT.jsonl is there.")] = False,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences computed at once.")] = 32,
    show_exits: ShowExitsOfMany = False,
) -> int:
    """Answer every line of a file; answers come in order of completion.

    A line is {"prompt": ...} (continued as it is), {"messages": [...]} (through the chat template) or {"prompt_token_ids":
    [...]}, with "id" and sampling parameters where wanted; or a line of OpenAI's batch API for chat/completions or
    completions. Without max_tokens an answer goes on to its end or to that of the context. "messages" may come with
    continue_final_message, add_generation_prompt and chat_template_kwargs.

    An answer is {"id", "outputs", "finish_reason", "usage", "error"}. A line that cannot be answered gets one with "error"
    and stops nothing; if there are any, the exit code is 1. Lines without "id" are line-N; of two with the same the second
    is an error.

    After a kill or Ctrl-C the same command goes on where it was. OUT.jsonl.state says what OUT.jsonl is made from: another
    input, model or setting is refused.
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
    found = survey(source)
    output = BatchOutput(
        target, {"input": found.sha256, "model": str(fetch(model).resolve()), "settings": sampling.settings() | more | other}
    )
    output.look(overwrite)
    if len(output.done) < found.lines:
        output.claim()
        try:
            llm = open_llm(model, options, max_num_seqs=max_num_seqs, preset="offline")
            output.begin()
            seen: list[Any] = []
            _answer_all(llm, read_jobs(source), output, partial(sampling.bind(llm, stated), **more), found, seen)
            if show_exits:
                from headrace.cli.origins import say_exits

                say_exits(seen, llm.model_config.num_layers)
        finally:
            output.drop_unused()
            output.close()
    return _conclude(output, found)


def _conclude(output: BatchOutput, found: Input) -> int:
    failed = f", {output.failed} with an error" if output.failed else ""
    lines = f"{counted(found.lines, 'lines')} {'is' if found.lines == 1 else 'are'} done{failed}"
    if len(output.done) < found.lines:
        say(f"{len(output.done)} of {lines}; the same command goes on")
        return INTERRUPTED
    say(f"{lines}: {output.path}")
    return 1 if output.failed else 0


def _answer_all(
    llm: Any,
    jobs: Iterator[Job | BadLine],
    output: BatchOutput,
    params: Callable[..., SamplingParams],
    found: Input,
    exits: list[Any],
) -> None:
    """Keep the engine full until the file ends, or Ctrl-C comes. `exits` gets those of all tokens that may leave."""
    from headrace.cli.report import record
    from headrace.decoding.constraint_check import extract_calls

    window = AHEAD * llm.engine.config.scheduler.max_num_seqs
    running: dict[str, Queued] = {}  # by request id
    ignored: set[str] = set()
    todo = (job for job in jobs if job.id not in output.done)
    more = True
    with Interrupt() as interrupt, Meter(found.lines, len(output.done)) as meter:
        while (more or running) and not interrupt.requested:
            while more and len(running) < window:
                job = next(todo, None)
                if job is None:
                    more = False
                    continue
                if isinstance(job, Job) and (new := job.ignored - ignored):
                    say(f"line {job.line}: {', '.join(sorted(new))}: no effect in a file (said once)")
                    ignored |= new
                if isinstance(made := _begin(llm, job, params), str):
                    output.append(_failure(job, made))
                else:
                    running[made.output.request_id] = made
            for ended in llm.step():
                job, tools = running[ended.request_id].job, running.pop(ended.request_id).tools
                meter.ended(ended)
                if tools is not None:
                    extract_calls(ended, tools)
                exits += [exited for one in ended.outputs for exited in one.exits or ()]
                output.append({"id": job.id, **record(ended, llm.tokenizer)})
            meter.show(len(output.done), [queued.output for queued in running.values()])


def _begin(llm: Any, job: Job | BadLine, params: Callable[..., SamplingParams]) -> "Queued | str":
    """The queued request, or what is wrong with the line."""
    if isinstance(job, BadLine):
        return job.error
    try:
        if job.messages is None:
            return Queued(job, llm.add(job.prompt_token_ids if job.prompt is None else job.prompt, params(**job.params)))
        return _begin_chat(llm, job, params(**job.params))
    except Exception as error:  # whatever a line does, it must not stop the others
        return f"line {job.line}: {error}"


def _begin_chat(llm: Any, job: Job, params: SamplingParams) -> "Queued":
    """Queue a conversation, with its tools, as the server does."""
    from headrace.cli.batch_bodies import tools_of
    from headrace.decoding.tools import conversation
    from headrace.text.chat import validate_messages

    assert job.messages is not None
    template = dict(job.template)
    called = job.tools is not None and bool(job.tools.tools) and job.tools.tool_choice != "none"
    source = llm.opened.template.choose(template.get("chat_template"), tools=called).source
    tools = None if job.tools is None else tools_of(llm, job.tools, params.structured_outputs, source)
    if tools is not None:
        params = params.replace(structured_outputs=tools.spec)
        template |= {"tools": tools.tools} if tools.in_template else {}
    talk = conversation(llm.opened.with_system(validate_messages(job.messages)), tools, source)
    return Queued(job, llm.add(llm.render(talk, **template), params), tools)


def _failure(job: Job | BadLine, error: str) -> dict[str, Any]:
    return {"id": job.id, "outputs": [], "finish_reason": "error", "usage": None, "error": error}


@dataclass(frozen=True, slots=True)
class Queued:
    """A line in the engine: its output fills up, and `tools` read the calls out of it when it ends."""

    job: Job | BadLine
    output: Any
    tools: Any = None  # decoding.tools.Tooling


class Meter:
    """How far it is: a bar on a terminal, elsewhere a line now and then. Counts the tokens of this run."""

    def __init__(self, total: int, done: int) -> None:
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

    def ended(self, output: Any) -> None:
        """An output is complete."""
        self._tokens += _tokens(output)

    def show(self, done: int, running: list[Any]) -> None:
        """Tell where we are, if it is time to."""
        now = time.monotonic()
        if self._bar is None and now - self._reported < SAY_EVERY:
            return
        speed = f"{self._speed(sum(map(_tokens, running))):.1f} tokens/s"
        if self._bar is not None:
            self._bar.advance(done - self._done, speed)
            self._done = done
        else:
            say(f"{done} of {counted(self._total, 'lines')}, {speed}")
        self._reported = now

    def _speed(self, open_tokens: int) -> float:
        return (self._tokens + open_tokens) / (time.monotonic() - self._start)


def _tokens(output: Any) -> int:
    return sum(len(one.token_ids) for one in output.outputs)
