"""Offline batches: answer every request of a JSONL file with one engine, resumable after a stop.

from headrace.workflows import batch
batch.run(llm, Path("prompts.jsonl"), Path("answers.jsonl"), temperature=0, max_tokens=200)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.data.explicit import params_of
from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.decoding.constraint_check import extract_calls
from headrace.decoding.tools import Tooling, conversation
from headrace.llm import LLM
from headrace.text.chat import validate_messages
from headrace.weights.defaults import stated
from headrace.workflows.batch_bodies import tools_of
from headrace.workflows.batch_output import BatchOutput
from headrace.workflows.batch_requests import BatchRequest, InvalidLine, read_requests
from headrace.workflows.output_record import record

# Requests in the engine for each sequence that can run: the engine never waits for the file, and memory stays bounded.
READ_AHEAD = 4


class BatchObserver(Protocol):
    """Receives the events of a batch run."""

    def note(self, line: str) -> None:
        """Show one line to the user, such as fields of a request that have no effect."""

    def finished(self, output: RequestOutput) -> None:
        """A request has finished, with or without an error."""

    def stepped(self, done: int, running: list[RequestOutput]) -> None:
        """An engine step has run. done: number of requests with a record in the file. running: outputs so far of the others."""


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in the engine. `output` grows with each step; `tools` reads the calls out of it at the end."""

    request: BatchRequest
    output: RequestOutput
    tools: Tooling | None = None


def run(llm: LLM, source: Path, target: Path, *, overwrite: bool = False, **settings: Any) -> BatchOutput:
    """Answer the requests of `source`, one JSON object a line, and append one record each to `target`.

    A second call with the same file, model and settings continues a stopped run. A request that fails gets a record with
    "error". settings: sampling fields of the requests that do not set their own, as `LLM.generate` takes them.
    Returns the closed output: its path, the ids done, the number of errors. Raises ValueError.
    """
    output = BatchOutput.of(source, target, llm.opened.path, msgspec.to_builtins(settings))
    output.read_existing(overwrite)
    if not output.complete:
        own = {"max_tokens": None, **stated(llm.opened.defaults)}
        output.lock()
        try:
            output.start()
            answer(llm, read_requests(source), output, lambda **fields: params_of({**settings, **fields}, own))
        finally:
            output.remove_if_empty()
            output.close()
    return output


def answer(
    llm: LLM,
    requests: Iterable[BatchRequest | InvalidLine],
    output: BatchOutput,
    params: Callable[..., SamplingParams],
    observer: BatchObserver | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Answer the requests that have no record in `output` yet, until all are done or `stop` returns True.

    params: makes the sampling parameters of a request from its own fields.
    """
    window = READ_AHEAD * llm.engine.config.scheduler.max_num_seqs
    running: dict[str, RunningRequest] = {}
    ignored: set[str] = set()
    todo = (request for request in requests if request.id not in output.done)
    more = True
    while (more or running) and not stop():
        while more and len(running) < window:
            request = next(todo, None)
            if request is None:
                more = False
                continue
            if observer and isinstance(request, BatchRequest) and (new := request.ignored - ignored):
                observer.note(f"line {request.line}: {', '.join(sorted(new))}: no effect in a file (said once)")
                ignored |= new
            if isinstance(added := _add(llm, request, params), str):
                output.append(error_record(request, added))
            else:
                running[added.output.request_id] = added
        for finished in llm.step():
            ended = running.pop(finished.request_id)
            if ended.tools is not None:
                extract_calls(finished, ended.tools)
            if observer:
                observer.finished(finished)
            output.append({"id": ended.request.id, **record(finished, llm.tokenizer)})
        if observer:
            observer.stepped(len(output.done), [entry.output for entry in running.values()])


def _add(llm: LLM, request: BatchRequest | InvalidLine, params: Callable[..., SamplingParams]) -> RunningRequest | str:
    """Add a request to the engine. Returns the error message if it is invalid."""
    if isinstance(request, InvalidLine):
        return request.error
    try:
        if request.messages is not None:
            return _add_chat(llm, request, request.messages, params(**request.params))
        prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
        assert prompt is not None
        return RunningRequest(request, llm.add(prompt, params(**request.params)))
    except Exception as error:
        # Whatever is wrong with one request, the others go on.
        return f"line {request.line}: {error}"


def _add_chat(llm: LLM, request: BatchRequest, messages: list[Any], params: SamplingParams) -> RunningRequest:
    """Add a conversation to the engine, with its tools, as the server does."""
    template = dict(request.template)
    called = request.tools is not None and bool(request.tools.tools) and request.tools.tool_choice != "none"
    name = template.get("chat_template_kwargs", {}).get("chat_template")
    source = llm.opened.template.choose(name, tools=called).source
    tools = None if request.tools is None else tools_of(llm, request.tools, params.structured_outputs, source)
    if tools is not None:
        params = params.replace(structured_outputs=tools.spec)
        template |= {"tools": tools.tools} if tools.in_template else {}
    talk = conversation(llm.opened.with_system(validate_messages(messages)), tools, source)
    return RunningRequest(request, llm.add(llm.render(talk, **template), params), tools)


def error_record(request: BatchRequest | InvalidLine, error: str) -> dict[str, Any]:
    """The record of a request that cannot be answered."""
    return {"id": request.id, "outputs": [], "finish_reason": "error", "usage": None, "error": error}
