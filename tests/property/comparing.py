"""Comparison of two answers to one request, field by field."""

import math
from dataclasses import dataclass
from typing import Any

from headrace.data.outputs import CompletionOutput, RequestOutput

NEAR = 1e-9  # of log-probabilities and confidences where sums depend on the batch (torch, float64)


@dataclass(frozen=True)
class Difference:
    """A field in which an answer is not that of the same request alone."""

    request: str
    name: str
    alone: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.request}: {self.name} is {self.found!r:.400}, alone {self.alone!r:.400}"


def differences(request: str, alone: RequestOutput, found: RequestOutput, *, exact: bool, begins: bool) -> list[Difference]:
    """Fields that differ. `exact`: numbers are compared bit by bit; `begins`: an aborted answer, which is compared as far as it
    goes."""
    pairs: list[tuple[str, Any, Any]] = []
    if not begins:
        pairs.append(("error", alone.error, found.error))
        pairs.append(("prompt_logprobs", _entries(alone.prompt_logprobs), _entries(found.prompt_logprobs)))
        pairs.append(("number of outputs", len(alone.outputs), len(found.outputs)))
    for one, other in zip(alone.outputs, found.outputs, strict=False):
        here = f"output {one.index} "
        if begins and not other.token_ids:
            continue
        pairs += [(here + name, *pair) for name, pair in (_begun(one, other) if begins else _whole(one, other)).items()]
    return [Difference(request, name, a, b) for name, a, b in pairs if not same(a, b, exact)]


def _whole(one: CompletionOutput, other: CompletionOutput) -> dict[str, tuple[Any, Any]]:
    names = ("index", "token_ids", "text", "finish_reason", "stop_reason", "score", "cumulative_logprob")
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    pairs["logprobs"] = _entries(one.logprobs), _entries(other.logprobs)
    pairs["exits"] = _exits(one), _exits(other)
    return pairs


def _begun(one: CompletionOutput, other: CompletionOutput) -> dict[str, tuple[Any, Any]]:
    """The same of an answer that was cut off after some tokens."""
    count = len(other.token_ids)
    pairs: dict[str, tuple[Any, Any]] = {"token_ids": (one.token_ids[:count], other.token_ids)}
    text = other.text.rstrip("\ufffd")  # half a character
    pairs["text"] = one.text[: len(text)], text
    pairs["logprobs"] = _entries(one.logprobs, count), _entries(other.logprobs)
    pairs["exits"] = _exits(one)[:count], _exits(other)
    return pairs


def _entries(entries: Any, count: int | None = None) -> list[Any]:
    """Tokens, log-probabilities, ranks and alternatives."""
    return [
        None if entry is None else (entry.token, entry.logprob, entry.rank, *entry.top_ids, *entry.top_logprobs)
        for entry in (entries or [])[:count]
    ]


def _exits(output: CompletionOutput) -> list[Any]:
    return [(one.layers, one.confidence, *one.votes) for one in output.exits or ()]


def same(one: Any, other: Any, exact: bool) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b, exact) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        alike = one == other or (math.isnan(one) and math.isnan(other))
        return alike or (not exact and math.isclose(one, other, rel_tol=NEAR, abs_tol=NEAR))
    return bool(one == other)


def unlikely_logprobs(request: str, answer: RequestOutput, scored: RequestOutput, *, exact: bool) -> list[Difference]:
    """Whether the log-probabilities of an answer's tokens are those that the model gives them after the text before."""
    (output,) = answer.outputs
    told = [entry.logprob for entry in output.logprobs or ()]
    given = [entry.logprob for entry in (scored.prompt_logprobs or [])[-len(told) :] if entry is not None]
    return [] if same(given, told, exact) else [Difference(request, "logprobs", given, told)]
