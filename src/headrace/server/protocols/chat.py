"""/v1/chat/completions: a conversation through the model's chat template."""

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.data.params import SamplingParams, StructuredOutputs
from headrace.data.types import Delta
from headrace.decoding.tools import CallReader, Tooling, callable_tools, conversation, for_mask, schemas_of, tooling
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.inflight import Ticket, deltas
from headrace.server.engines.service import Service
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.body_limits import read_json
from headrace.server.http.ids import new_id, now
from headrace.server.protocols.chat_fields import CHAT_TEMPLATE, check_fields, template_variables
from headrace.server.protocols.chat_messages import CONTINUE, check_ending, read_messages
from headrace.server.protocols.fields import ChatRequest, StreamOptions
from headrace.server.protocols.logprobs import chat_logprobs, token_exits
from headrace.server.protocols.openai_types import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    Exits,
    ToolCall,
    ToolFunction,
    Trial,
    Usage,
    usage,
)
from headrace.server.protocols.sampling import sampling_params, tried
from headrace.server.protocols.stream import begun, event, unless_gone
from headrace.server.protocols.structured import (
    Looked,
    asked_form,
    check_form,
    check_text,
    fits_tool,
    prepared,
    schema_of,
    with_defaults,
)
from headrace.text.chat import ChatTemplate
from headrace.text.dialects.call_parser import Piece, new_call_id
from headrace.weights.defaults import values


@dataclass(slots=True)
class Job:
    """One request on its way."""

    service: Service
    request: ChatRequest
    tickets: list[Ticket]  # one
    tools: Tooling | None = None
    held: bool = False  # to a format, where no tool is called
    late: StructuredOutputs | None = None  # a form that no mask could hold the answer to: it is looked at when it is whole
    trial: Trial | None = None  # of a cascade
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=now)
    texts: dict[int, CallReader] = field(default_factory=dict)  # by answer, if there are tools
    generated: int = 0  # tokens of the deltas so far
    fingerprint: str = ""

    def __post_init__(self) -> None:
        self.fingerprint = self.service.fingerprint

    async def pieces(self, delta: Delta) -> list[Piece]:
        """The new text of an answer: plain text, or parts of calls."""
        if self.tools is None:
            return [Piece(delta.text)] if delta.text else []
        if delta.index not in self.texts:
            self.texts[delta.index] = CallReader(self.tools, held=self.held)
        steps = self.texts[delta.index].push(delta.text, final=delta.finish_reason is not None)
        try:
            call = next(steps)
            while True:
                spec = self.tools.schema_of(call.name)
                call = steps.send(await fits_tool(self.service, spec, call.arguments))
        except StopIteration as end:
            return list(end.value)

    def finish_reason(self, delta: Delta) -> str | None:
        text = self.texts.get(delta.index)
        return delta.finish_reason if text is None else text.finish_reason(delta.finish_reason)

    async def parts(self) -> AsyncIterator[tuple[Delta, list[Piece]]]:
        """The deltas of all answers with their pieces, up to the end of each: its own, or a call that it repeats."""
        left = set(range(self.request.n or 1))
        async for _, delta in deltas(self.tickets):
            self.generated += len(delta.token_ids)
            if delta.index not in left:
                continue
            pieces = await self.pieces(delta)
            ended = delta.index in self.texts and self.texts[delta.index].ended
            if ended or delta.finish_reason is not None:
                left.discard(delta.index)
            yield delta, pieces
            if ended and not left:
                return

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(self.service.llm.opened.tokenizer, delta.logprobs, self.request.top_logprobs or 0)

    def exits(self, delta: Delta) -> Exits:
        if not self.request.return_exits:
            return msgspec.UNSET
        return token_exits(self.service.llm.opened.tokenizer, delta.exits)

    def chunk(self, choices: list[ChatChunkChoice], **more: Any) -> bytes:
        return event(ChatChunk(self.id, self.created, self.name, choices, system_fingerprint=self.fingerprint, **more))

    @property
    def name(self) -> str:
        """What the client calls the model."""
        return self.service.name if self.trial is None else self.trial.name

    @property
    def usage(self) -> Usage:
        return usage(self.tickets, self.generated, self.trial)


async def chat(service: Service, request: ChatRequest, http: Request, salt: bytes) -> Response | Chat:
    """Answer a request, streamed or whole. Raises what `as_api_error` knows, and ClientGoneError."""
    return await answered(await begin(service, request, http, salt), http)


async def begin(service: Service, request: ChatRequest, http: Request, salt: bytes, trial: Trial | None = None) -> Job:
    """Look at a request and queue it; who has it must answer or abort it. Raises what `as_api_error` knows, and
    ClientGoneError."""
    check_fields(request)
    request = with_defaults(service, request)
    form = asked_form(request)
    tools = await unless_gone(http, _tooling(service, request, form))
    params = tried(_params(service, request, tools.spec if tools is not None else form), trial)
    streams, late, looked = bool(request.stream), False, Looked()
    if form is not None:
        looked = await unless_gone(http, check_form(service, form, streams=streams, param="response_format"))
        late = bool(looked.late)
    if tools is not None:
        looked = await unless_gone(http, check_form(service, tools.spec, streams=streams, param="tools"))
    prompt = await unless_gone(http, _prompt(service.llm, request, tools))
    given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    service.check_room([prompt], given, "messages")
    deadline = service.deadline(request.deadline)
    tickets = service.llm.submit([prompt], params, salt=salt, deadline=deadline, grammar=looked.grammar)
    return Job(service, request, tickets, tools, form is not None, form if late else None, trial)


async def answered(job: Job, http: Request) -> Response | Chat:
    """The answer to what was begun, streamed or whole."""
    if job.request.stream:
        return await begun(_events(job), http, lambda: job.service.llm.abort(job.tickets))
    try:
        return await unless_gone(http, _checked(job))
    finally:
        job.service.llm.abort(job.tickets)


async def _tooling(service: Service, request: ChatRequest, form: StructuredOutputs | None) -> Tooling | None:
    """The tools of a request, and the form of answers that call none, looked at where that can be stopped. Raises ApiError."""
    usable, must = callable_tools(request)
    if not usable:
        return None
    schemas, answer = schemas_of(usable), None
    if form is not None and not must:
        if (schema := schema_of(form)) is None:
            raise bad("beside tools an answer's format is a JSON schema or json_object; leave one out", "response_format")
        schemas.append(schema)
    known = await prepared(service, schemas, open_objects=bool(request.open_objects))
    if len(schemas) > len(usable):
        answer = for_mask(known[-1])
    template = _template(service.llm, request).source
    return tooling(request, template, service.llm.opened.tokenizer.control_id, known[: len(usable)], answer)


async def prompt_of(service: Service, request: ChatRequest) -> list[int]:
    """The token ids that a request gives to the model, however many. Raises the errors that `as_api_error` knows."""
    return await _prompt(service.llm, request, await _tooling(service, request, asked_form(request)), limited=False)


def _template(llm: AsyncLLM, request: ChatRequest) -> ChatTemplate:
    """The model's template for a request. Raises TemplateError."""
    name = template_variables(request).get(CHAT_TEMPLATE)
    return llm.opened.template.choose(name, tools=bool(request.tools) and request.tool_choice != "none")


async def _prompt(llm: AsyncLLM, request: ChatRequest, tools: Tooling | None, *, limited: bool = True) -> list[int]:
    template, variables = _template(llm, request), template_variables(request)
    variables.pop(CHAT_TEMPLATE, None)
    if tools is not None and tools.in_template:
        variables["tools"] = tools.tools
    check_ending(request)
    talk = conversation(read_messages(request.messages), tools, template.source, read_json)
    if request.continue_final_message:
        return await render_open(llm, talk, template, limited, **variables)
    new_turn = request.add_generation_prompt is not False
    return await render(llm, talk, template, limited, add_generation_prompt=new_turn, **variables)


async def render(
    llm: AsyncLLM, messages: list[dict[str, Any]], template: ChatTemplate, limited: bool = True, /, **variables: Any
) -> list[int]:
    """Token ids of a conversation by one of the model's templates. With `limited` a conversation that is far longer than the
    context is not encoded to its end. Raises ApiError, TemplateError, TokenizerError, TooLongError."""
    if llm.opened.config.encoder:
        raise bad("this model is an encoder, which generates nothing; ask it for embeddings or classes", "model")
    text = await template.rendered_marked(llm.opened.with_system(messages), **variables)
    return await llm.encode(text, add_special=False, marked=template.marks, limited=limited)


async def render_open(
    llm: AsyncLLM, messages: list[dict[str, Any]], template: ChatTemplate, limited: bool = True, /, **variables: Any
) -> list[int]:
    """The same up to the end of the last message's text, which the answer goes on with. The template renders it with a mark
    at its end, and is cut there. Raises ApiError also where the template leaves the mark out."""
    mark = secrets.token_hex(16)
    messages = llm.opened.with_system([*messages[:-1], _marked(messages[-1], mark)])
    text = await template.rendered_marked(messages, add_generation_prompt=False, **variables)
    before, found, _ = text.rpartition(mark)
    if not found or mark in before:
        raise bad("the model's template does not let its final message be continued; leave the field out", CONTINUE)
    return await llm.encode(before, add_special=False, marked=template.marks, limited=limited)


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}
    if isinstance(content, list) and content and isinstance(content[-1], dict) and isinstance(content[-1].get("text"), str):
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]}
    raise bad("the final message has no text to be continued; give it a content", CONTINUE)


def _params(service: Service, request: ChatRequest, spec: StructuredOutputs | None) -> SamplingParams:
    given = [value for value in (request.max_completion_tokens, request.max_tokens) if value is not None]
    if len(set(given)) > 1:
        raise bad("max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")
    try:
        return _sampled(service, request, spec, given[0] if given else None)
    except ApiError as error:
        error = error.renamed("logprobs", "top_logprobs")
        raise (error.renamed("max_tokens", "max_completion_tokens") if request.max_tokens is None else error) from None


def _sampled(service: Service, request: ChatRequest, spec: StructuredOutputs | None, most: int | None) -> SamplingParams:
    return sampling_params(
        request,
        values(service.defaults),
        service.limits,
        max_tokens=most,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured_outputs=spec,
    )


async def _checked(job: Job) -> Chat:
    """The answer, and a last look at its texts where no mask could hold them to all of their form."""
    answer = await _whole(job)
    for choice in answer.choices:
        if job.late is not None and choice.finish_reason == "stop" and choice.message.tool_calls is msgspec.UNSET:
            await check_text(job.service, job.late, choice.message.content or "")
    return answer


def _add(message: ChatMessage, piece: Piece) -> None:
    """Put a part of a text where it belongs."""
    if piece.call is None:
        message.content = (message.content or "") + piece.text
        return
    if message.tool_calls is msgspec.UNSET:
        message.tool_calls = []
    if piece.name is not None:
        message.tool_calls.append(ToolCall(ToolFunction("", piece.name), new_call_id(), "function"))
    function = message.tool_calls[piece.call].function
    function.arguments = (function.arguments or "") + piece.text


def _delta(piece: Piece) -> ChatDelta:
    """A part of a text as a stream has it."""
    if piece.call is None:
        return ChatDelta(content=piece.text)
    if piece.name is not None:
        return ChatDelta(tool_calls=[ToolCall(ToolFunction("", piece.name), new_call_id(), "function", piece.call)])
    return ChatDelta(tool_calls=[ToolCall(ToolFunction(piece.text), index=piece.call)])


async def _whole(job: Job) -> Chat:
    choices: dict[int, ChatChoice] = {}
    scores: dict[int, list[bytes]] = {}  # by answer: log-probabilities in JSON, which take far less room so
    async for delta, pieces in job.parts():
        choice = choices.setdefault(delta.index, ChatChoice(delta.index, ChatMessage("")))
        for piece in pieces:
            _add(choice.message, piece)
        if found_exits := job.exits(delta):
            choice.exits = [*(choice.exits or []), *found_exits]
        choice.finish_reason, choice.stop_reason = job.finish_reason(delta), delta.stop_reason
        if (found := job.logprobs(delta)) is not None:
            parts = scores.setdefault(delta.index, [])
            parts += [msgspec.json.encode(found["content"])[1:-1]] if found["content"] else []
            choice.logprobs = found
    for index, parts in scores.items():
        choices[index].logprobs = {"content": msgspec.Raw(b"[" + b",".join(parts) + b"]"), "refusal": None}
    ordered = [choices[index] for index in sorted(choices)]
    for choice in ordered:
        if choice.message.tool_calls is not msgspec.UNSET:
            choice.message.content = choice.message.content or None
    return Chat(job.id, job.created, job.name, ordered, job.usage, system_fingerprint=job.fingerprint)


async def _events(job: Job) -> AsyncIterator[bytes]:
    options = job.request.stream_options or StreamOptions()
    more: dict[str, Any] = {"usage": None} if options.include_usage else {}
    begun: set[int] = set()
    async for delta, found in job.parts():
        if options.continuous_usage_stats:
            more["usage"] = job.usage
        if delta.index not in begun:
            begun.add(delta.index)
            yield job.chunk([ChatChunkChoice(delta.index, ChatDelta("assistant", ""))], **more)
        logprobs, exits = job.logprobs(delta), job.exits(delta)
        pieces = [_delta(piece) for piece in found]
        reason = job.finish_reason(delta)
        if not pieces and ((logprobs is not None and logprobs["content"]) or exits or reason is not None):
            pieces = [ChatDelta()]
        for at, piece in enumerate(pieces):
            last = at == len(pieces) - 1
            reasons = (reason, delta.stop_reason) if last else (None, None)
            extras = (logprobs, *reasons, exits) if last else (None, *reasons)
            yield job.chunk([ChatChunkChoice(delta.index, piece, *extras)], **more)
    if options.include_usage:
        yield job.chunk([], usage=job.usage)
