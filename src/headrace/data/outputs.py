"""What a caller gets back: one RequestOutput a prompt, put together from the engine's deltas."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.data.plan import Exited, TokenLogprob
from headrace.data.structured import StructuredOutputs
from headrace.data.types import Delta, Request, RequestMetrics


class Plain:
    """A record that can be written as plain JSON data."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """By the names of its fields; log-probabilities and exits as objects, too."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("logprobs", "prompt_logprobs", "exits"):
            entries = getattr(self, name, None)
            if entries and isinstance(next((one for one in entries if one is not None), None), TokenLogprob | Exited):
                found[name] = [one and msgspec.structs.asdict(one) for one in entries]
        return found


@dataclass(slots=True)
class CompletionOutput(Plain):
    """One of the n outputs of a request. `logprobs`: one entry a token where they were asked for, else None.
    `tool_calls`: those of a conversation with tools, as OpenAI's protocol writes them; `text` is what stands beside them.

    `exits`: after how many layers each token was written, where the request may leave early or cascades, else None.

    Beam search ranks its outputs by `score` (the length-normalised log-probability) and gives `cumulative_logprob`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None  # stop | length | tool_calls | abort | error
    stop_reason: int | str | None = None
    score: float | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    exits: list[Exited] | None = None

    def __repr__(self) -> str:
        return f"CompletionOutput({self.text!r}, {_tokens(self.token_ids)}, finish_reason={self.finish_reason!r})"


@dataclass(slots=True)
class Embedding(Plain):
    """A text's vector, of length 1."""

    token_ids: list[int]
    values: list[float]

    def __repr__(self) -> str:
        return f"Embedding({len(self.values)} numbers of {_tokens(self.token_ids)})"


@dataclass(slots=True)
class Vote(Plain):
    """What an exit said of a text: after how many layers, its likeliest label, and that one's probability."""

    layers: int
    label: str
    probability: float


@dataclass(slots=True)
class Classification(Plain):
    """A text's class: its label, the probabilities of all labels, after how many layers it was said, and the votes of all exits
    that it came by, the last of which said it."""

    token_ids: list[int]
    label: str
    probabilities: dict[str, float]
    layers: int
    votes: list[Vote] = field(default_factory=list)

    def record(self, *, votes: bool = False) -> dict[str, Any]:
        """Label, probabilities and layers as plain JSON data, as commands print them and the server sends them; `votes`: those
        of the exits, too."""
        found: dict[str, Any] = {"label": self.label, "probabilities": self.probabilities, "layers": self.layers}
        return found | ({"exits": [vote.to_dict() for vote in self.votes]} if votes else {})

    def __repr__(self) -> str:
        return f"Classification({self.label!r}, {self.probabilities[self.label]:.3f}, {self.layers} layers)"


@dataclass(slots=True)
class Score(Plain):
    """Log-probabilities (natural log) of a text's last tokens, each given those before; the first token of all has none."""

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
class RequestOutput(Plain):
    """A prompt and what came of it. `prompt_logprobs[i]` scores prompt token i given those before; the first is None."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    error: str | None = None
    structured: StructuredOutputs | None = None  # what its outputs are held to
    pooled: list[float] = field(default_factory=list)  # what an embedding is made of, where one was asked for
    classified: list[tuple[float, ...]] = field(default_factory=list)  # logits of the exits, where a class was asked for

    def __repr__(self) -> str:
        state = f", error={self.error!r}" if self.error else "" if self.finished else ", not finished"
        return f"RequestOutput({self.request_id}, {_tokens(self.prompt_token_ids)} of prompt, {self.outputs}{state})"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data: what was asked, the outputs, what it took."""
        found = super(RequestOutput, self).to_dict() | {"outputs": [one.to_dict() for one in self.outputs]}
        return {name: value for name, value in found.items() if name not in ("structured", "pooled", "classified")}

    def add(self, delta: Delta) -> None:
        """Take in what one step added."""
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
        """Beam search may end with fewer hypotheses than were asked for."""
        born = [output for output in self.outputs if output.finish_reason is not None]
        self.outputs = born or self.outputs[:1]


def whole(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """The outputs, where none has failed. Raises ValueError."""
    if failed := next((output.error for output in outputs if output.error is not None), None):
        raise ValueError(failed)
    return outputs


def empty_output(request: Request, prompt: str | None) -> RequestOutput:
    """The output of a request that has just been added; its metrics and prompt scores fill in as the engine goes."""
    params = request.params
    wants_logprobs = params.logprobs is not None
    return RequestOutput(
        request_id=request.id,
        prompt=prompt,
        prompt_token_ids=request.prompt,
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


def unit(values: Sequence[float], dimensions: int | None = None) -> list[float]:
    """The first `dimensions` numbers, scaled to length 1. Raises ValueError where there is no direction to keep."""
    kept = list(values[:dimensions])
    length = math.hypot(*kept)
    if not 0 < length < math.inf:
        raise ValueError("the model's hidden states are broken: an embedding has no length; check the weights")
    return [value / length for value in kept]


def _tokens(ids: Sequence[int]) -> str:
    return "1 token" if len(ids) == 1 else f"{len(ids)} tokens"
