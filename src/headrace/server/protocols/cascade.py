"""A cascade as a model of the server: who is asked first answers where it is sure enough, else the next one answers again.

What a tier before the last says is taken whole and scored by its tokens, as `headrace.workflows.cascade` does offline; so only
the last one's answer is streamed as it comes. Every tier that was asked is counted. Where there is no engine to ask, the next
tier answers.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.data.fields import BIASES, ID_LISTS, IDS, declared
from headrace.data.params import SamplingParams
from headrace.decoding.tools import callable_tools
from headrace.server.engines.async_llm import RequestFailedError, State
from headrace.server.engines.inflight import DeadlineError, TooLongError, gathered
from headrace.server.engines.metrics import LABELS
from headrace.server.engines.models import Models
from headrace.server.engines.service import Service
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.errors import ENGINE_LOST, UNFIT, as_api_error
from headrace.server.http.ids import now
from headrace.server.protocols import chat, completions
from headrace.server.protocols.fields import ChatRequest, CompletionRequest
from headrace.server.protocols.openai_types import Chat, Completion, Model, Trial, Usage
from headrace.server.protocols.stream import unless_gone
from headrace.server.settings import CascadeSettings
from headrace.stats.confidence import cut_by_context, token_confidence
from headrace.text.dialects.call_parser import CallFormat, format_of

Asked = ChatRequest | CompletionRequest
Way = tuple[Callable[..., Awaitable[Any]], Callable[..., Awaitable[Any]]]
WAYS: dict[type, Way] = {
    ChatRequest: (chat.begin, chat.answered),
    CompletionRequest: (completions.begin, completions.answered),
}
UNAVAILABLE = 503
SHARES = tuple(i / 20 for i in range(1, 21))
# Fields with token ids, which mean something in one model's vocabulary.
OF_TOKENS = tuple(one.flat for one in declared(SamplingParams) if one.kind in (IDS, ID_LISTS, BIASES))
# Fields that ask for answers whose tokens have no probabilities, and what they ask for.
UNSCORED = {"penalty_alpha": "contrastive search", "refine_block": "what is filled in block by block"}


@dataclass(eq=False, slots=True)
class Cascade:
    """One that is served. Every tier but the last has a threshold: what it says stands where its score is at least that."""

    settings: CascadeSettings
    models: Models
    created: int = field(default_factory=now)
    _calls: dict[str, CallFormat | None] = field(default_factory=dict)  # how each tier writes them, once it was looked at
    _answers: Any = None
    _scores: Any = None
    _absences: Any = None

    def __post_init__(self) -> None:
        figures, labels = self.models.figures, (*LABELS, "tier")
        self._answers = figures.counter("cascade_answers", "Answers by the model of the cascade that gave them.", labels)
        self._scores = figures.histogram("cascade_score", "How sure a model was, from 0 to 1.", SHARES, labels)
        text = "Requests that went to the next model of the cascade, as this one had no engine to ask."
        self._absences = figures.counter("cascade_absences", text, labels)
        for tier in self.settings.tiers[:-1]:  # a zero is there before the first
            self._absences.labels(self.settings.name, tier)

    async def ask(self, request: Asked, http: Request, salt: bytes) -> Response | Chat | Completion:
        """Answer a request, streamed or whole. Raises what `as_api_error` knows, and ClientGoneError."""
        self._check(request)
        if isinstance(request, ChatRequest) and callable_tools(request)[0]:
            await self._check_calls()
        seconds = self.models.settings.limits.deadline if request.deadline is None else request.deadline
        ends = None if seconds is None else time.monotonic() + seconds
        before: tuple[Usage, ...] = ()
        for tier, threshold in self._tiers():
            trial = Trial(self.settings.name, tier, threshold is not None, before)
            try:
                async with self.models.use(tier) as service:
                    job, stands = await self._tried(service, _within(request, ends), http, salt, trial, threshold)
                    if stands and (response := await self._said(job, http, last=threshold is None)) is not None:
                        self._answers.labels(self.settings.name, tier).inc()
                        return response
                    before = (*before, trial.usage(job.tickets, job.tickets[0].generated))
            except TooLongError:  # the next tier's context may hold it
                if threshold is None:
                    raise
            except Exception as error:
                if threshold is None or not is_absent(error):
                    raise
                self._absences.labels(self.settings.name, tier).inc()
        raise AssertionError("the last tier's answer stands")

    async def _tried(
        self, service: Service, request: Asked, http: Request, salt: bytes, trial: Trial, threshold: float | None
    ) -> tuple[Any, bool]:
        """What a tier was asked, and whether its answer stands; where it does not, the tier has ended."""
        job = await WAYS[type(request)][0](service, request, http, salt, trial)
        if threshold is None:
            return job, True
        stands = False
        try:
            whole = await unless_gone(http, gathered(job.tickets[0]))
            trial.score = token_confidence([entry.logprob for entry in whole.logprobs], self.settings.score)
            stands = trial.score >= threshold and not cut_by_context(
                whole.finish_reason, len(whole.token_ids), job.tickets[0].params.max_tokens
            )
        except RequestFailedError:
            trial.score = 0.0
        finally:
            if not stands:
                service.llm.abort(job.tickets)
        self._scores.labels(self.settings.name, trial.model).observe(trial.score)
        return job, stands

    async def _said(self, job: Any, http: Request, last: bool) -> Response | Chat | Completion | None:
        """The answer; None where it has not the form that was asked for, and another tier is there to ask."""
        try:
            forms: Response | Chat | Completion = await WAYS[type(job.request)][1](job, http)
        except ApiError as error:
            if last or error.code != UNFIT:
                raise
            return None
        return forms

    def _tiers(self) -> list[tuple[str, float | None]]:
        return list(zip(self.settings.tiers, (*self.settings.thresholds, None), strict=True))

    def _check(self, request: Asked) -> None:
        """Refuse what has no score, and what means another thing to each tier. Raises ApiError."""
        instead = f"ask one of its models ({', '.join(self.settings.tiers)})"
        given = {"n": request.n, "best_of": request.best_of, "beam_width": request.beam_width}
        several = [name for name, width in given.items() if (width or 1) > 1]
        for name in [*several, *(["use_beam_search"] if request.use_beam_search else [])]:
            raise bad(f"{name}: a cascade gives one answer to a prompt; leave {name} out, or {instead}", name)
        for name, what in UNSCORED.items():
            if getattr(request, name):
                raise bad(f"{name}: {what} has no score; leave {name} out, or {instead}", name)
        for name in OF_TOKENS:
            if getattr(request, name, None):
                raise bad(f"{name}: token ids are of one model's vocabulary; leave {name} out, or {instead}", name)
        if not isinstance(request, CompletionRequest):
            return
        if request.echo:
            raise bad(f"echo: a cascade gives an answer alone; leave echo out, or {instead}", "echo")
        texts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        if len(texts) != 1 or not isinstance(texts[0], str):
            raise bad(f"prompt: a cascade takes one text; send others by themselves, or {instead}", "prompt")

    async def _check_calls(self) -> None:
        """Refuse tools where the tiers' templates write calls of them differently. Raises what `Models.use` raises."""
        for tier in self.settings.tiers:
            if tier in self._calls:
                continue
            try:
                async with self.models.use(tier) as service:
                    self._calls[tier] = format_of(service.llm.opened.template.choose(tools=True).source)
            except Exception as error:
                if not is_absent(error):  # else it writes no calls now
                    raise
        known = list(self._calls.values())
        if any(one != known[0] for one in known[1:]):
            forms = ", ".join(f"{tier}: {form.name if form else 'none'}" for tier, form in self._calls.items())
            raise bad(f"tools: the models of this cascade write calls differently ({forms}); ask one of them", "tools")

    def model(self) -> Model:
        """As /v1/models lists it: its context is the last tier's, its state that of the first tier that is not ready."""
        services = [self.models.find(tier) for tier in self.settings.tiers]
        loaded = services[-1].llm.loaded
        states = [service.llm.state for service in services if service.llm.state is not State.READY]
        context = None if loaded is None else loaded.max_model_len
        state = states[0] if states else State.READY
        return Model(self.settings.name, self.created, context, state, msgspec.UNSET, list(self.settings.tiers))


def is_absent(error: Exception) -> bool:
    """Whether there was no engine to ask. Under whose request an engine ended is not handed on: it may have ended by it."""
    known = as_api_error(error)
    return known is not None and known.status == UNAVAILABLE and known.code != ENGINE_LOST


def _within(request: Asked, ends: float | None) -> Asked:
    """The request with what is left of its time. Raises DeadlineError."""
    if ends is None:
        return request
    left = ends - time.monotonic()
    if left <= 0:
        raise DeadlineError("the request was not answered within its deadline")
    return msgspec.structs.replace(request, deadline=left)
