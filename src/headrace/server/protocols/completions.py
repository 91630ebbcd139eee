"""/v1/completions: prompts as texts or token ids, continued as they are."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.data.params import SamplingParams, StructuredOutputs
from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta
from headrace.server.engines.inflight import Ticket, deltas
from headrace.server.engines.service import Service
from headrace.server.http.api_error import bad
from headrace.server.http.ids import new_id, now
from headrace.server.protocols.fields import CompletionRequest, StreamOptions
from headrace.server.protocols.logprobs import CompletionLogprobs, Written, joined, token_exits
from headrace.server.protocols.openai_types import Completion, CompletionChoice, Exits, Trial, Usage, usage
from headrace.server.protocols.sampling import not_built, sampling_params, tried
from headrace.server.protocols.stream import begun, event, unless_gone
from headrace.server.protocols.structured import Looked, asked_form, check_form, check_text, with_defaults
from headrace.server.protocols.time_slices import decoded
from headrace.weights.defaults import values

DEFAULT_MAX_TOKENS = 16  # the protocol's
MAX_SCORES = 1 << 20  # log-probabilities of the prompts of a request


@dataclass(slots=True)
class Job:
    """One request on its way: its prompts, their tickets, and what has been said of each answer."""

    service: Service
    request: CompletionRequest
    texts: list[str]  # of the prompts, for echo
    tickets: list[Ticket]
    late: StructuredOutputs | None = None  # a form that no mask could hold answers to: they are looked at when they are whole
    trial: Trial | None = None  # of a cascade
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=now)
    generated: int = 0
    logprobs: dict[int, CompletionLogprobs] = field(default_factory=dict)  # by choice
    echoed: set[int] = field(default_factory=set)

    async def choice(self, place: int, delta: Delta) -> tuple[CompletionChoice, Written | None]:
        """What a delta adds to its answer, without and with its log-probabilities; the first brings the prompt where it is
        echoed."""
        index = place * (self.request.n or 1) + delta.index
        text, tokens = delta.text, delta.token_ids
        entries: Sequence[TokenLogprob | None] = delta.logprobs
        finish = delta.finish_reason
        if self.request.max_tokens == 0:  # one token was drawn, for the protocol's sake
            text, tokens, entries, finish = "", [], [], "length"
        self.generated += len(tokens)
        if self.request.echo and index not in self.echoed:
            self.echoed.add(index)
            text = self.texts[place] + text
            tokens = self.tickets[place].prompt + tokens
            entries = [*self.tickets[place].prompt_logprobs, *entries]
        written = await self._logprobs(index, place, tokens, entries)
        exits: Exits = msgspec.UNSET
        if self.request.return_exits:
            exits = token_exits(self.service.llm.opened.tokenizer, delta.exits)
        return CompletionChoice(index, text, None, finish, delta.stop_reason, exits), written

    async def _logprobs(
        self, index: int, place: int, tokens: list[int], entries: Sequence[TokenLogprob | None]
    ) -> Written | None:
        top = self.request.logprobs
        if top is None:
            return None
        if index not in self.logprobs:
            prompt = self.tickets[place].prompt
            self.logprobs[index] = CompletionLogprobs(self.service.llm.opened.tokenizer, top, prompt, bool(self.request.echo))
        return await self.logprobs[index].written(tokens, entries)

    def answer(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        name = self.service.name if self.trial is None else self.trial.name
        return Completion(self.id, self.created, name, choices, system_fingerprint=self.service.fingerprint, **more)

    @property
    def usage(self) -> Usage:
        return usage(self.tickets, self.generated, self.trial)


async def complete(service: Service, request: CompletionRequest, http: Request, salt: bytes) -> Response | Completion:
    """Answer a request, streamed or whole. Raises what `as_api_error` knows, and ClientGoneError."""
    return await answered(await begin(service, request, http, salt), http)


async def begin(service: Service, request: CompletionRequest, http: Request, salt: bytes, trial: Trial | None = None) -> Job:
    """Look at a request and queue it; who has it must answer or abort it. Raises what `as_api_error` knows, and
    ClientGoneError."""
    request = with_defaults(service, request)
    spec = asked_form(request)
    params = tried(_params(service, request).replace(structured_outputs=spec), trial)
    _check(service, request)
    looked = Looked()
    if spec is not None:
        looked = await unless_gone(http, check_form(service, spec, streams=bool(request.stream), param="structured_outputs"))
    prompts, texts = await unless_gone(http, _prompts(service, request))
    service.check_room(prompts, request.max_tokens, "prompt")
    deadline = service.deadline(request.deadline)
    tickets = service.llm.submit(prompts, params, salt=salt, deadline=deadline, grammar=looked.grammar)
    return Job(service, request, texts, tickets, spec if looked.late else None, trial)


async def answered(job: Job, http: Request) -> Response | Completion:
    """The answer to what was begun, streamed or whole."""
    if job.request.stream:
        return await begun(_events(job), http, lambda: job.service.llm.abort(job.tickets))
    try:
        answer = await unless_gone(http, _whole(job))
        for choice in answer.choices:
            if job.late is not None and choice.finish_reason == "stop":
                await check_text(job.service, job.late, choice.text)
        return answer
    finally:
        job.service.llm.abort(job.tickets)


def _check(service: Service, request: CompletionRequest) -> None:
    limits = service.limits
    not_built(bool(request.suffix), "suffix", "text cannot be inserted before a suffix")
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options goes with stream: true", "stream_options")
    prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    many = len(prompts) if prompts and not isinstance(prompts[0], int) else 1
    each = max(request.n or 1, request.best_of or 1, request.beam_width or 1)
    if many > limits.prompts or many * each > limits.choices:
        most = f"at most {limits.prompts} prompts (--limit-prompts) and {limits.choices} answers in a request"
        raise bad(f"{most}; send several", "prompt")


def _params(service: Service, request: CompletionRequest) -> SamplingParams:
    most = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if most == 0 and request.echo:
        most = 1
    return sampling_params(
        request,
        values(service.defaults),
        service.limits,
        max_tokens=most,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )


async def _prompts(service: Service, request: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Token ids of every prompt, and the texts to echo."""
    given: list[Any] = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    if not given:
        raise bad("prompt is empty; give a text, token ids, or a list of those", "prompt")
    prompts: list[list[int]] = await service.llm.encode_all(given) if isinstance(given[0], str) else given
    bos = service.llm.opened.tokenizer.bos_id
    if isinstance(given[0], str) and bos is not None:
        prompts = [ids or [bos] for ids in prompts]  # the beginning of a document, as with OpenAI
    if not all(prompts):
        raise bad("a prompt is empty, and this model has no BOS token to begin with; give at least one token", "prompt")
    if not request.echo:
        return prompts, []
    if request.logprobs is not None and (many := sum(map(len, prompts)) * (request.logprobs + 1)) > MAX_SCORES:
        raise bad(f"echo with logprobs makes {many} entries and {MAX_SCORES} are the most; send fewer prompts", "prompt")
    tokenizer = service.llm.opened.tokenizer
    texts = [one if isinstance(one, str) else await decoded(tokenizer, ids) for one, ids in zip(given, prompts, strict=True)]
    return prompts, texts


async def _whole(job: Job) -> Completion:
    choices: dict[int, CompletionChoice] = {}
    scores: dict[int, Written] = {}
    async for place, delta in deltas(job.tickets):
        new, written = await job.choice(place, delta)
        old = choices.setdefault(new.index, new)
        if old is not new:
            old.text += new.text
            old.exits = [*(old.exits or []), *new.exits] if new.exits else old.exits
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
        for name, parts in (written or {}).items():
            scores.setdefault(new.index, {}).setdefault(name, []).extend(parts)
    for index, all_parts in scores.items():
        choices[index].logprobs = joined(all_parts)
    return job.answer([choices[index] for index in sorted(choices)], usage=job.usage)


async def _events(job: Job) -> AsyncIterator[bytes]:
    options = job.request.stream_options or StreamOptions()
    more: dict[str, Any] = {"usage": None} if options.include_usage else {}
    async for place, delta in deltas(job.tickets):
        choice, written = await job.choice(place, delta)
        if options.continuous_usage_stats:
            more["usage"] = job.usage
        choice.logprobs = None if written is None else joined(written)
        if choice.text or choice.logprobs is not None or choice.exits or choice.finish_reason is not None:
            yield event(job.answer([choice], **more))
    if options.include_usage:
        yield event(job.answer([], usage=job.usage))
