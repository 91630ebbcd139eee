"""Results for callers: one RequestOutput per prompt, assembled from the engine's deltas."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.data.plan import Exited, TokenLogprob
from headrace.data.structured import StructuredOutputs
from headrace.data.types import Delta, Request, RequestMetrics


class JsonRecord:
    """Base of results that convert to plain JSON data."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields by name. Log-probabilities and exits, which msgspec encodes as arrays, become dicts."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("logprobs", "prompt_logprobs", "exits"):
            entries = getattr(self, name, None)
            if entries and isinstance(next((one for one in entries if one is not None), None), TokenLogprob | Exited):
                found[name] = [one and msgspec.structs.asdict(one) for one in entries]
        return found


@dataclass(slots=True)
class CompletionOutput(JsonRecord):
    """One of the n outputs of a request.

    logprobs: one entry per token if requested, else None. finish_reason: stop, length, tool_calls, abort or error.
    tool_calls: as in OpenAI's protocol; `text` is the rest of the answer.
    exits: one record per token if the request may exit early or cascades, else None.
    score: what beam search ranks by, the length-normalised log-probability.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    exits: list[Exited] | None = None

    def __repr__(self) -> str:
        return f"CompletionOutput({self.text!r}, {_tokens(self.token_ids)}, finish_reason={self.finish_reason!r})"


@dataclass(slots=True)
class Embedding(JsonRecord):
    """The embedding of a text, a vector of length 1."""

    token_ids: list[int]
    values: list[float]

    def __repr__(self) -> str:
        return f"Embedding({len(self.values)} numbers of {_tokens(self.token_ids)})"


@dataclass(slots=True)
class RankedDocument(JsonRecord):
    """A document of a ranking: its index among the documents, and its relevance to the query (higher is better)."""

    index: int
    score: float
    token_ids: list[int]

    def __repr__(self) -> str:
        return f"RankedDocument({self.index}, {self.score:.4f}, {_tokens(self.token_ids)})"


@dataclass(slots=True)
class Vote(JsonRecord):
    """The prediction of one exit: number of layers below it, most probable label, and its probability.

    value: the predicted number, if the exits predict numbers; there is no label then.
    """

    layers: int
    label: str = ""
    probability: float | None = None
    value: float | None = None

    def record(self) -> dict[str, Any]:
        """Plain JSON data: layers, and the number or label and probability."""
        if self.value is not None:
            return {"layers": self.layers, "value": self.value}
        return {"layers": self.layers, "label": self.label, "probability": self.probability}


@dataclass(slots=True)
class Classification(JsonRecord):
    """The class of a text: label, probabilities of all labels, number of computed layers, and the votes of the computed exits.

    The last vote is the prediction. value: the predicted number, if the exits predict numbers; there are no labels then.
    """

    token_ids: list[int]
    label: str
    probabilities: dict[str, float]
    layers: int
    votes: list[Vote] = field(default_factory=list)
    value: float | None = None

    def record(self, *, votes: bool = False) -> dict[str, Any]:
        """Label and probabilities, or the number, and layers as plain JSON data, for commands and the server; with `votes` also
        the exits'."""
        found: dict[str, Any] = {"label": self.label, "probabilities": self.probabilities}
        if self.value is not None:
            found = {"value": self.value}
        found["layers"] = self.layers
        return found | ({"exits": [vote.record() for vote in self.votes]} if votes else {})

    def __repr__(self) -> str:
        if self.value is not None:
            return f"Classification({self.value:.4g}, {self.layers} layers)"
        return f"Classification({self.label!r}, {self.probabilities[self.label]:.3f}, {self.layers} layers)"


@dataclass(slots=True)
class Score(JsonRecord):
    """Log-probabilities (natural log) of a text's last tokens, each given those before it. The text's first token has none."""

    token_ids: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, output: "RequestOutput") -> "Score":
        known = [entry.logprob for entry in (output.prompt_logprobs or []) if entry is not None]
        return cls(output.prompt_token_ids, known)

    def __repr__(self) -> str:
        return f"Score({_tokens(self.token_ids)}, total={self.total:.2f}, perplexity={self.perplexity:.2f})"

    @property
    def total(self) -> float:
        return sum(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / len(self.logprobs)) if self.logprobs else math.nan


@dataclass(slots=True)
class RequestOutput(JsonRecord):
    """A prompt and its outputs.

    prompt_logprobs[i] scores prompt token i given those before it; the first entry is None. structured: the constraint of its
    outputs. pooled, classified: rows of an embedding, logits of the exits of a classification.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    error: str | None = None
    structured: StructuredOutputs | None = None
    pooled: list[float] = field(default_factory=list)
    classified: list[tuple[float, ...]] = field(default_factory=list)

    def __repr__(self) -> str:
        state = f", error={self.error!r}" if self.error else "" if self.finished else ", not finished"
        return f"RequestOutput({self.request_id}, {_tokens(self.prompt_token_ids)} of prompt, {self.outputs}{state})"

    def to_dict(self) -> dict[str, Any]:
        """Prompt, outputs and metrics as plain JSON data."""
        found = super(RequestOutput, self).to_dict() | {"outputs": [one.to_dict() for one in self.outputs]}
        return {name: value for name, value in found.items() if name not in ("structured", "pooled", "classified")}

    def add(self, delta: Delta) -> None:
        """Add the delta of one step."""
        if delta.error is not None:
            self.error = delta.error
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        if output.logprobs is not None:
            output.logprobs += delta.logprobs
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(e.logprob for e in delta.logprobs)
        if output.exits is not None:
            output.exits += delta.exits
        if delta.score is not None:
            output.cumulative_logprob, output.score = delta.cumulative_logprob, delta.score
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finished:
            self.finished = True
            self._drop_unborn()

    def _drop_unborn(self) -> None:
        """Drop outputs that never got a hypothesis: beam search may end with fewer than requested."""
        born = [output for output in self.outputs if output.finish_reason is not None]
        self.outputs = born or self.outputs[:1]


def whole(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return the outputs. Raises ValueError with the first error if a request failed."""
    if failed := next((output.error for output in outputs if output.error is not None), None):
        raise ValueError(failed)
    return outputs


def empty_output(request: Request, prompt: str | None) -> RequestOutput:
    """The output of a new request. It shares its metrics and prompt log-probabilities with the request, which fills them."""
    params = request.params
    wants_logprobs = params.logprobs is not None
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=request.input_ids,
        prompt_logprobs=request.prompt_logprobs if params.prompt_logprobs is not None else None,
        outputs=[
            CompletionOutput(
                index,
                logprobs=[] if wants_logprobs else None,
                cumulative_logprob=0.0 if wants_logprobs else None,
                exits=[] if params.leaves else None,
            )
            for index in range(params.n)
        ],
        metrics=request.metrics,
        structured=params.structured_outputs,
        pooled=request.pooled,
        classified=request.classified,
    )


def unit_vector(values: Sequence[float], dimensions: int | None = None) -> list[float]:
    """The first `dimensions` numbers, scaled to length 1. Raises ValueError if their length is 0 or not finite."""
    kept = list(values[:dimensions])
    length = math.hypot(*kept)
    if not 0 < length < math.inf:
        raise ValueError("the embedding has length 0 or is not finite; check the model's weights")
    return [value / length for value in kept]


def _tokens(ids: Sequence[int]) -> str:
    return "1 token" if len(ids) == 1 else f"{len(ids)} tokens"
