"""Cascades as models of the server. The first tier answers; if its score is below its threshold, the next tier answers again.

The answer of a tier before the last is generated completely and scored by the log-probabilities of its tokens, as
`headrace.workflows.cascade` does offline. Only the last tier streams its answer as it comes. The usage counts the tokens of
all tiers that ran. A tier without an engine is skipped.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.data.fields import BIASES, ID_LISTS, IDS, declared
from headrace.data.params import SamplingParams
from headrace.decoding.tools import callable_tools
from headrace.server.access.principals import PRINCIPAL
from headrace.server.engines.async_llm import RequestFailedError, State
from headrace.server.engines.inflight import DeadlineError, TooLongError, collect_answer
from headrace.server.engines.metrics import LABELS
from headrace.server.engines.models import Models, Service
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.errors import ENGINE_LOST, UNFIT, as_api_error
from headrace.server.protocols.generation import Generation, GenerationRequest, Write, answer, start
from headrace.server.protocols.openai_types import CascadeAttempt, Model, Usage, now
from headrace.server.protocols.prompts import Conversation, Texts
from headrace.server.protocols.stream import unless_disconnected
from headrace.server.settings import CascadeSettings
from headrace.stats.confidence import cut_by_context, token_confidence
from headrace.text.dialects.call_formats import CallFormat, format_of

UNAVAILABLE = 503
SCORE_BUCKETS = tuple(i / 20 for i in range(1, 21))
# Fields with token ids, which belong to one model's vocabulary.
TOKEN_FIELDS = tuple(one.flat for one in declared(SamplingParams) if one.kind in (IDS, ID_LISTS, BIASES))
# Fields whose answers have no token probabilities, and the method that they ask for.
UNSCORED = {"penalty_alpha": "contrastive search", "refine_block": "what is filled in block by block"}


@dataclass(eq=False, slots=True)
class Cascade:
    """A served cascade. The answer of each tier but the last is accepted if its score is at least the tier's threshold."""

    settings: CascadeSettings
    models: Models
    created: int = field(default_factory=now)
    _call_formats: dict[str, CallFormat | None] = field(default_factory=dict)  # by tier, once its template was read
    _answers: Any = None
    _scores: Any = None
    _absences: Any = None

    def __post_init__(self) -> None:
        figures, labels = self.models.figures, (*LABELS, "tier")
        self._answers = figures.counter("cascade_answers", "Answers by the cascade's model that gave them.", labels)
        self._scores = figures.histogram("cascade_score", "Confidence of a model, from 0 to 1.", SCORE_BUCKETS, labels)
        text = "Requests passed to the next model of the cascade because this one was not running."
        self._absences = figures.counter("cascade_absences", text, labels)
        # The metrics show a zero before the first absence.
        for tier in self.settings.tiers[:-1]:
            self._absences.labels(self.settings.name, tier)

    async def generate(self, request: GenerationRequest, write: Write, http: Request) -> Any:
        """The response to a request, streamed or complete. Raises the errors that `as_api_error` knows, and ClientGoneError."""
        self._check(request)
        if isinstance(request.prompt, Conversation) and callable_tools(request.prompt.tools)[0]:
            await self._check_call_formats(http)
        given = request.sampling.deadline
        seconds = self.models.settings.limits.deadline if given is None else given
        ends = None if seconds is None else time.monotonic() + seconds
        before: tuple[Usage, ...] = ()
        for tier, threshold in zip(self.settings.tiers, (*self.settings.thresholds, None), strict=True):
            attempt = CascadeAttempt(self.settings.name, tier, threshold is not None, before)
            try:
                async with self._use(tier, http, ends) as service:
                    service.check_kind(speech=False)
                    generation = await start(service, _within(request, ends), http, attempt)
                    accepted = threshold is None or await self._score(service, generation, http, attempt, threshold)
                    if accepted and (response := await _answer(generation, write, http, threshold is None)) is not None:
                        self._answers.labels(self.settings.name, tier).inc()
                        return response
                    before = (*before, attempt.usage(generation.inflight, generation.inflight[0].generated))
            except TooLongError:
                # The context of the next tier may hold the prompt.
                if threshold is None:
                    raise
            except Exception as error:
                if threshold is None or not is_absent(error):
                    raise
                self._absences.labels(self.settings.name, tier).inc()
        raise AssertionError("the last tier's answer stands")

    async def _score(
        self, service: Service, generation: Generation, http: Request, attempt: CascadeAttempt, threshold: float
    ) -> bool:
        """Generate the answer of a tier, and score it. Returns whether it is accepted; if not, the generation is aborted."""
        accepted, (submitted,) = False, generation.inflight
        try:
            whole = await unless_disconnected(http, collect_answer(submitted))
            attempt.score = token_confidence([entry.logprob for entry in whole.logprobs], self.settings.score)
            cut = cut_by_context(whole.finish_reason, len(whole.token_ids), submitted.params.max_tokens)
            accepted = attempt.score >= threshold and not cut
        except RequestFailedError:
            attempt.score = 0.0
        finally:
            if not accepted:
                generation.abort()
        self._scores.labels(self.settings.name, attempt.model).observe(attempt.score)
        return accepted

    def _check(self, request: GenerationRequest) -> None:
        """Raises ApiError for requests without a score, and for fields that mean something else to each tier."""
        sampling = request.sampling
        instead = f"ask one of its models ({', '.join(self.settings.tiers)})"
        given = {"n": sampling.n, "best_of": sampling.best_of, "beam_width": sampling.beam_width}
        several = [name for name, width in given.items() if (width or 1) > 1]
        for name in [*several, *(["use_beam_search"] if sampling.use_beam_search else [])]:
            raise bad(f"{name}: a cascade gives one answer to a prompt; leave {name} out, or {instead}", name)
        for name, what in UNSCORED.items():
            if getattr(sampling, name):
                raise bad(f"{name}: {what} has no score; leave {name} out, or {instead}", name)
        for name in TOKEN_FIELDS:
            if getattr(sampling, name, None):
                raise bad(f"{name}: the models of a cascade may have different token ids; leave {name} out, or {instead}", name)
        if not isinstance(request.prompt, Texts):
            return
        if request.echo:
            raise bad(f"echo: not supported by a cascade; leave echo out, or {instead}", "echo")
        texts = request.prompt.prompts()
        if len(texts) != 1 or not isinstance(texts[0], str):
            raise bad(f"prompt: a cascade takes one text; send one request for each, or {instead}", "prompt")

    def _use(self, tier: str, http: Request, ends: float | None = None) -> AbstractAsyncContextManager[Service]:
        """Use a tier, which waits for its model at most until `ends` (time.monotonic) or the client's end."""
        seconds = None if ends is None else max(0.0, ends - time.monotonic())
        return self.models.use(tier, seconds=seconds, wait=partial(unless_disconnected, http), of_cascade=True)

    async def _check_call_formats(self, http: Request) -> None:
        """Raises ApiError if the templates of the tiers write tool calls in different formats, and what `Models.use` raises."""
        for tier in self.settings.tiers:
            if tier in self._call_formats:
                continue
            try:
                async with self._use(tier, http) as service:
                    self._call_formats[tier] = format_of(service.llm.opened.template.choose(tools=True).source)
            except Exception as error:
                # A tier without an engine writes no calls now.
                if not is_absent(error):
                    raise
        formats = list(self._call_formats.values())
        if any(one != formats[0] for one in formats[1:]):
            names = ", ".join(f"{tier}: {form.name if form else 'none'}" for tier, form in self._call_formats.items())
            raise bad(f"tools: the models of this cascade write calls differently ({names}); ask one of them", "tools")

    def model(self) -> Model:
        """Its entry in /v1/models: the context of the last tier, and the state of the first tier that is not ready."""
        services = [self.models.entry(tier, of_cascade=True).service for tier in self.settings.tiers]
        loaded = services[-1].llm.loaded
        states = [service.llm.state for service in services if service.llm.state is not State.READY]
        context = None if loaded is None else loaded.max_model_len
        state = states[0] if states else State.READY
        return Model(self.settings.name, self.created, context, state, msgspec.UNSET, list(self.settings.tiers))


def find_cascade(cascades: Mapping[str, Cascade], name: str | None) -> Cascade | None:
    """Return the cascade of this name, if the key of this request may use it."""
    return cascades.get(name) if name is not None and PRINCIPAL.get().may_use(name) else None


async def _answer(generation: Generation, write: Write, http: Request, last: bool) -> Any:
    """The response of a tier; None if it does not have the format of the request, and there is a next tier."""
    try:
        return await answer(generation, write, http)
    except ApiError as error:
        if last or error.code != UNFIT:
            raise
        return None


def is_absent(error: Exception) -> bool:
    """Whether a tier had no engine. False if the engine ended while it had the request, which may be why: such a request is
    not passed to the next tier."""
    known = as_api_error(error)
    return known is not None and known.status == UNAVAILABLE and known.code != ENGINE_LOST


def _within(request: GenerationRequest, ends: float | None) -> GenerationRequest:
    """The request with the time left until `ends` (time.monotonic) as its deadline. Raises DeadlineError."""
    if ends is None:
        return request
    left = ends - time.monotonic()
    if left <= 0:
        raise DeadlineError("the request was not answered within its deadline")
    return replace(request, sampling=msgspec.structs.replace(request.sampling, deadline=left))
