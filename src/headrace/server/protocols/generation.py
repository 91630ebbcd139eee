"""Text generation for every protocol: one request, one stream of events, one writer.

A protocol parses its body into a `GenerationRequest` and has a `Writer`. `start` checks the request against a model and
queues it. `answer` passes the events of the generation to the writer and returns its response, streamed or complete.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec
from starlette.requests import Request

from headrace.data.params import SamplingParams, StructuredOutputs
from headrace.data.plan import Exited, TokenLogprob
from headrace.data.types import Delta
from headrace.decoding.tools import CallReader, ToolError, Tooling
from headrace.server.engines.inflight import InflightRequest, stream_deltas
from headrace.server.engines.models import Service
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.errors import as_api_error
from headrace.server.protocols.fields import Sampling
from headrace.server.protocols.logprobs import EncodedLogprobs, token_exits
from headrace.server.protocols.openai_types import CascadeAttempt, Exits, ToolCall, Usage, new_call, usage
from headrace.server.protocols.prompts import Conversation, Prompt, Texts
from headrace.server.protocols.sampling import sampling_params
from headrace.server.protocols.stream import DONE, start_stream, unless_disconnected
from headrace.server.protocols.structured import CompiledFormat, check_answer, compile_format, fits_tool, requested_format
from headrace.server.protocols.time_slices import decode_in_slices
from headrace.server.settings import Limits
from headrace.text.dialects.call_parser import Piece
from headrace.text.dialects.reasoning import ReasoningSplitter, reasoning_of
from headrace.weights.defaults import values

# Log-probabilities of the prompts of one request.
MAX_PROMPT_LOGPROBS = 1 << 20


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asks for, in the terms of no protocol."""

    sampling: Sampling
    prompt: Prompt
    max_tokens: int | None = None  # as given by the client
    default_max_tokens: int | None = None  # None: the model's own setting, then the limit of the server
    logprobs: int | None = None  # best tokens to report for each token
    echo: bool = False  # answers begin with their prompt
    response_format: Any = None
    form_field: str = "response_format"  # the field that errors about the format name
    splits_reasoning: bool = False  # reasoning in tags is no part of an answer's text
    names: Mapping[str, str] = field(default_factory=dict)  # names of fields here -> in the protocol, for errors

    @property
    def echo_alone(self) -> bool:
        """The prompt is returned without an answer. The engine generates one token, which is dropped."""
        return self.echo and self.max_tokens == 0

    async def prompt_tokens(self, service: Service) -> list[int]:
        """Token ids of the only prompt, whatever its length. Raises the errors that `as_api_error` knows."""
        with self.errors_renamed():
            open_objects = bool(self.sampling.open_objects)
            form = requested_format(self.sampling, self.response_format, open_objects)
            tools = await self.prompt.tooling(service, form, open_objects)
            (tokens,) = await self.prompt.encode(service, tools, limited=False)
            return tokens

    @contextlib.contextmanager
    def errors_renamed(self) -> Iterator[None]:
        """Errors raised inside name the protocol's fields."""
        try:
            yield
        except (ApiError, ToolError) as error:
            known = as_api_error(error)
            if known is None or known.param is None or known.param not in self.names:
                raise
            raise known.renamed(known.param, self.names[known.param]) from None


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What one step of the engine adds to one answer. The event with a `finish_reason` is the answer's last."""

    index: int
    pieces: list[Piece]  # text and parts of tool calls
    token_ids: list[int]
    logprobs: Sequence[TokenLogprob | None]
    exits: Sequence[Exited]
    finish_reason: str | None
    stop_reason: int | str | None
    in_reasoning: bool = False  # its tokens are of the reasoning, or of its tags

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces if piece.call is None and not piece.reasoning)


@dataclass(slots=True)
class Answer:
    """A complete answer: its events added up."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: EncodedLogprobs | None = None
    exits: Exits = msgspec.UNSET
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: AnswerEvent, logprobs: EncodedLogprobs | None, exits: Exits) -> None:
        for piece in event.pieces:
            if piece.call is None:
                if piece.reasoning:
                    self.reasoning += piece.text
                else:
                    self.text += piece.text
                continue
            if piece.name is not None:
                self.calls.append(new_call(piece.name))
            function = self.calls[piece.call].function
            function.arguments = (function.arguments or "") + piece.text
        if logprobs is not None:
            self.logprobs = self.logprobs or {}
            for name, parts in logprobs.items():
                self.logprobs.setdefault(name, []).extend(parts)
        if exits is not msgspec.UNSET:
            self.exits = [*(self.exits or []), *exits]
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason


@dataclass(slots=True)
class Generation:
    """A request in the engine. Its owner calls `abort` in the end, also after a complete answer."""

    service: Service
    request: GenerationRequest
    inflight: list[InflightRequest]  # one for each prompt
    tools: Tooling | None = None
    form: StructuredOutputs | None = None  # the format of answers without tool calls
    late: bool = False  # no mask enforces all of the format: complete answers are checked
    attempt: CascadeAttempt | None = None
    generated: int = 0  # tokens of the events so far
    reasoned: int = 0  # tokens of them that are reasoning or its tags
    new_splitter: Callable[[int], ReasoningSplitter] | None = None  # of a prompt; None: reasoning stays text
    _readers: dict[int, CallReader] = field(default_factory=dict)  # by answer, if there are tools
    _splitters: dict[int, ReasoningSplitter] = field(default_factory=dict)  # by answer

    @property
    def model(self) -> str:
        """The name that the client used."""
        return self.service.name if self.attempt is None else self.attempt.name

    @property
    def usage(self) -> Usage:
        return usage(self.inflight, self.generated, self.attempt)

    def abort(self) -> None:
        self.service.llm.abort(self.inflight)

    async def events(self) -> AsyncIterator[AnswerEvent]:
        """Events of all answers as they come. Answer `index` belongs to prompt `index // n`. Ends early if every answer
        ended, or was ended because it repeats a tool call. Raises what the engine reports."""
        n = self.request.sampling.n or 1
        running, started = set(range(n * len(self.inflight))), set[int]()
        async for place, delta in stream_deltas(self.inflight):
            if self.request.echo_alone:
                delta = msgspec.structs.replace(delta, text="", token_ids=[], logprobs=(), finish_reason="length")
            self.generated += len(delta.token_ids)
            index = place * n + delta.index
            if index not in running:
                continue
            event = await self._event(index, delta)
            if self.request.echo and index not in started:
                started.add(index)
                event = await self._with_prompt(event, place)
            ended = index in self._readers and self._readers[index].ended
            if ended or delta.finish_reason is not None:
                running.discard(index)
            yield event
            if ended and not running:
                return

    async def _event(self, index: int, delta: Delta) -> AnswerEvent:
        reason = delta.finish_reason
        pieces = [Piece(delta.text)] if delta.text else []
        thoughts, in_reasoning = list[Piece](), False
        if self.new_splitter is not None:
            if index not in self._splitters:
                self._splitters[index] = self.new_splitter(index // (self.request.sampling.n or 1))
            decode, final = self.service.llm.opened.tokenizer.decode, reason is not None
            splitter = self._splitters[index]
            before = splitter.inside
            split = splitter.push(delta.text, delta.token_ids, decode, final=final)
            in_reasoning = before or splitter.inside
            self.reasoned += len(delta.token_ids) if in_reasoning else 0
            thoughts, pieces = [one for one in split if one.reasoning], [one for one in split if not one.reasoning]
            delta = msgspec.structs.replace(delta, text="".join(piece.text for piece in pieces))
        if self.tools is not None:
            if (reader := self._readers.get(index)) is None:
                reader = self._readers[index] = CallReader(self.tools, held=self.form is not None)
            pieces = await self._read_calls(self.tools, reader, delta)
            reason = reader.finish_reason(reason)
        return AnswerEvent(
            index, thoughts + pieces, delta.token_ids, delta.logprobs, delta.exits, reason, delta.stop_reason, in_reasoning
        )

    async def _read_calls(self, tools: Tooling, reader: CallReader, delta: Delta) -> list[Piece]:
        """Split the text of a delta into plain text and tool calls. A JSON object that may be a call is one if its arguments
        fit the schema of the tool."""
        steps = reader.push(delta.text, final=delta.finish_reason is not None)
        try:
            call = next(steps)
            while True:
                call = steps.send(await fits_tool(self.service, tools.schema_of(call.name), call.arguments))
        except StopIteration as end:
            return list(end.value)

    async def _with_prompt(self, event: AnswerEvent, place: int) -> AnswerEvent:
        """The first event of an answer, with the prompt before it."""
        submitted, prompt = self.inflight[place], self.request.prompt
        text = prompt.prompts()[place] if isinstance(prompt, Texts) else submitted.prompt
        if not isinstance(text, str):
            text = await decode_in_slices(self.service.llm.opened.tokenizer, text)
        pieces, tokens = [Piece(text), *event.pieces], submitted.prompt + event.token_ids
        logprobs = [*submitted.prompt_logprobs, *event.logprobs]
        return replace(event, pieces=pieces, token_ids=tokens, logprobs=logprobs)


class Writer:
    """Writes the answers of one generation in the form of one protocol. A subclass has `chunks` and `end` for streams, and
    `complete`."""

    done: ClassVar[bytes] = DONE  # the last bytes of a stream, also after an error

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.sampling = generation.request.sampling
        self.tokenizer = generation.service.llm.opened.tokenizer

    async def logprobs(self, event: AnswerEvent) -> EncodedLogprobs | None:
        """Log-probabilities of an event's tokens in JSON; None if the client did not ask for them."""
        return None

    def exits(self, event: AnswerEvent) -> Exits:
        return token_exits(self.tokenizer, event.exits) if self.sampling.return_exits else msgspec.UNSET

    def chunks(self, event: AnswerEvent, logprobs: EncodedLogprobs | None) -> Iterable[bytes]:
        """The parts of a stream that an event makes."""
        raise NotImplementedError

    def end(self) -> Iterable[bytes]:
        """The parts of a stream after the last event."""
        return ()

    def complete(self, answers: list[Answer]) -> Any:
        """A Response, or an object to encode as JSON."""
        raise NotImplementedError

    async def stream(self) -> AsyncIterator[bytes]:
        async for event in self.generation.events():
            for part in self.chunks(event, await self.logprobs(event)):
                yield part
        for part in self.end():
            yield part

    async def collect(self) -> Any:
        """The complete answer. Raises ApiError (422) if an answer does not have the format of the request."""
        by_index: dict[int, Answer] = {}
        async for event in self.generation.events():
            answer = by_index.setdefault(event.index, Answer(event.index))
            answer.add(event, await self.logprobs(event), self.exits(event))
        answers = [by_index[index] for index in sorted(by_index)]
        for answer in answers:
            if self.generation.late and answer.finish_reason == "stop" and not answer.calls:
                assert self.generation.form is not None
                await check_answer(self.generation.service, self.generation.form, answer.text)
        return self.complete(answers)


Write = Callable[[Generation], Writer]


@dataclass(frozen=True, slots=True)
class TextProtocol:
    """A protocol whose answers are generated text: how a body is read, and how answers are written."""

    read: Callable[[Any], GenerationRequest]
    write: Write

    async def __call__(self, service: Service, body: Any, http: Request, salt: bytes) -> Any:
        """Raises the errors that `as_api_error` knows, and ClientGoneError."""
        return await generate(service, self.read(body), self.write, http)


async def generate(service: Service, request: GenerationRequest, write: Write, http: Request) -> Any:
    """The response to a request, streamed or complete. Raises the errors that `as_api_error` knows, and ClientGoneError."""
    return await answer(await start(service, request, http), write, http)


async def start(
    service: Service, request: GenerationRequest, http: Request, attempt: CascadeAttempt | None = None
) -> Generation:
    """Check a request against a model and queue it. `attempt`: the tier of a cascade that this model is.

    Raises the errors that `as_api_error` knows, and ClientGoneError.
    """
    with request.errors_renamed():
        open_objects = request.sampling.open_objects
        open_objects = service.settings.open_objects if open_objects is None else open_objects
        form = requested_format(request.sampling, request.response_format, open_objects)
        tools = await unless_disconnected(http, request.prompt.tooling(service, form, open_objects))
        params = service.with_adapter(_params(service, request, form if tools is None else tools.spec))
        if attempt is not None and attempt.scored and params.logprobs is None:
            params = params.replace(logprobs=0)
        _check_size(service.limits, request)
        checked, late = CompiledFormat(), False
        streams = bool(request.sampling.stream)
        if form is not None:
            checked = await unless_disconnected(http, compile_format(service, form, streams=streams, param=request.form_field))
            late = bool(checked.late)
        if tools is not None:
            checked = await unless_disconnected(http, compile_format(service, tools.spec, streams=streams, param="tools"))
        prompts = await unless_disconnected(http, request.prompt.encode(service, tools))
        _check_echo(request, prompts)
        service.check_room(prompts, request.max_tokens, request.prompt.name)
        deadline, salt = service.deadline(request.sampling.deadline), (request.sampling.cache_salt or "").encode()
        inflight = service.llm.submit(prompts, params, salt=salt, deadline=deadline, grammar=checked.grammar)
    splitter = None
    if request.splits_reasoning and form is None and (tools is None or tools.reads_json):
        splitter = _splitter_of(service, request.prompt, prompts)
    return Generation(service, request, inflight, tools, form, late, attempt, new_splitter=splitter)


async def answer(generation: Generation, write: Write, http: Request) -> Any:
    """The response of a started generation, streamed or complete. Aborts the generation in the end.

    Raises the errors that `as_api_error` knows, and ClientGoneError.
    """
    writer = write(generation)
    with generation.request.errors_renamed():
        if generation.request.sampling.stream:
            return await start_stream(writer.stream(), http, generation.abort, writer.done)
        try:
            return await unless_disconnected(http, writer.collect())
        finally:
            generation.abort()


def _splitter_of(
    service: Service, prompt: Prompt, prompts: Sequence[Sequence[int]]
) -> Callable[[int], ReasoningSplitter] | None:
    """Makes the splitter of an answer to one of the prompts; None if the template has no tags of reasoning."""
    form = reasoning_of(prompt.template(service).source) if isinstance(prompt, Conversation) else None
    if form is None:
        return None
    tokenizer = service.llm.opened.tokenizer
    ids = tokenizer.control_id(form.opening), tokenizer.control_id(form.closing)
    opening = tokenizer.encode(form.opening, add_special=False)

    def make(number: int) -> ReasoningSplitter:
        end = list(prompts[number][-len(opening) - 2 :])
        at = next((at for at in range(len(end) - len(opening), -1, -1) if end[at : at + len(opening)] == opening), None)
        inside = at is not None and not tokenizer.decode(end[at + len(opening) :]).strip()
        return ReasoningSplitter(form, inside=inside, ids=ids)

    return make


def _params(service: Service, request: GenerationRequest, spec: StructuredOutputs | None) -> SamplingParams:
    most = request.default_max_tokens if request.max_tokens is None else request.max_tokens
    return sampling_params(
        request.sampling,
        values(service.defaults),
        service.limits,
        max_tokens=1 if request.echo_alone else most,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        structured_outputs=spec,
    )


def _check_size(limits: Limits, request: GenerationRequest) -> None:
    """Raises ApiError for more prompts or answers than the limits of one request."""
    if not isinstance(request.prompt, Texts):
        return
    count, sampling = len(request.prompt.prompts()) or 1, request.sampling
    answers = count * max(sampling.n or 1, sampling.best_of or 1, sampling.beam_width or 1)
    if count > limits.prompts or answers > limits.choices:
        most = f"at most {limits.prompts} prompts (--limit-prompts) and {limits.choices} answers in a request"
        raise bad(f"{most}; send several", "prompt")


def _check_echo(request: GenerationRequest, prompts: list[list[int]]) -> None:
    if not request.echo or request.logprobs is None:
        return
    if (count := sum(map(len, prompts)) * (request.logprobs + 1)) > MAX_PROMPT_LOGPROBS:
        most = f"{MAX_PROMPT_LOGPROBS} are the most"
        raise bad(f"echo with logprobs makes {count} entries and {most}; send fewer prompts", "prompt")
