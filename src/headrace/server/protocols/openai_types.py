"""Response objects of the OpenAI protocol as structs, which msgspec encodes; their identifiers and timestamps."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.server.engines.inflight import InflightRequest
from headrace.text.dialects.call_parser import new_call_id

# Kinds of objects whose identifier has a dash after the kind.
DASHED = frozenset({"cmpl", "chatcmpl", "file"})


class TierUsage(msgspec.Struct):
    """Tokens of one tier of a cascade. `score`: confidence in its answer; null for the last tier, which is not scored."""

    model: str
    prompt_tokens: int
    completion_tokens: int
    score: float | None


class Usage(msgspec.Struct):
    """Token counts of a request. For a cascade: totals over the `tiers` that ran, in their order; the last one answered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]  # cached_tokens: 0 without a salt
    tiers: list[TierUsage] | msgspec.UnsetType = msgspec.UNSET


class TokenExit(msgspec.Struct, omit_defaults=True):
    """Layers that computed a token, and the confidence of its exit. `votes`, in an audit: the tokens of exit and full model."""

    layers: int
    confidence: float | None = None
    votes: list[str] = []


# One for each token; UNSET if the client did not ask for them.
Exits = list[TokenExit] | msgspec.UnsetType


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    exits: Exits = msgspec.UNSET


class Completion(msgspec.Struct, omit_defaults=False):
    """Answer of /v1/completions, or one chunk of its stream. `usage` UNSET: not sent."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ToolFunction(msgspec.Struct, omit_defaults=True):
    arguments: str | None = None
    name: str | None = None


class ToolCall(msgspec.Struct, omit_defaults=True):
    """A tool call in a message, or a part of one in a stream, then with its `index`."""

    function: ToolFunction
    id: str | None = None
    type: str | None = None
    index: int | None = None


def new_call(name: str, index: int | None = None) -> ToolCall:
    """A call of the function `name`, whose arguments follow."""
    return ToolCall(ToolFunction("", name), new_call_id(), "function", index)


class ChatMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    exits: Exits = msgspec.UNSET


class Chat(msgspec.Struct):
    """A complete answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    exits: Exits = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """One chunk of a streamed answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Calibrated(msgspec.Struct):
    """A calibrated threshold: its criterion, its decay over tokens, and a summary of the guarantee."""

    criterion: str
    threshold: float
    decay: float
    promise: str


class Exit(msgspec.Struct):
    """The early exit of a model with `layers` layers. after: number of layers below the exit."""

    after: int
    layers: int
    calibrated: Calibrated | msgspec.UnsetType = msgspec.UNSET


class TokenCascade(msgspec.Struct):
    """A smaller model whose tokens may be accepted without the full model, which has `layers` layers."""

    smaller: str
    layers: int
    calibrated: Calibrated | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int | None
    status: str  # the state of its engine
    defaults: dict[str, Any] | msgspec.UnsetType = {}  # settings of requests that give none
    tiers: list[str] | msgspec.UnsetType = msgspec.UNSET  # models of a cascade, in the order in which they answer
    exit: Exit | msgspec.UnsetType = msgspec.UNSET
    cascade: TokenCascade | msgspec.UnsetType = msgspec.UNSET  # a smaller model opened with it
    state: str | msgspec.UnsetType = msgspec.UNSET  # of its memory: loaded, loading or unloaded
    mode: str | msgspec.UnsetType = msgspec.UNSET  # pinned or on demand
    bytes: int | msgspec.UnsetType = msgspec.UNSET  # in memory, planned until it was loaded once
    progress: float | msgspec.UnsetType = msgspec.UNSET  # share of the bytes that are loaded, while it loads
    aliases: list[str] | msgspec.UnsetType = msgspec.UNSET  # other names of it
    transcribes: bool | msgspec.UnsetType = msgspec.UNSET  # a speech model, for /v1/audio
    root: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter: its folder or file
    parent: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter: the model that it adapts
    object: str = "model"
    owned_by: str = "headrace"


@dataclass(slots=True)
class CascadeAttempt:
    """One tier's attempt at a request to the cascade `name`."""

    name: str
    model: str
    scored: bool  # its answer is accepted or not by the log-probabilities of its tokens
    before: tuple[Usage, ...] = ()  # of the earlier tiers, each with itself as its only tier
    score: float | None = None

    def usage(self, inflight: Sequence[InflightRequest], generated: int) -> Usage:
        """Token counts of this tier alone."""
        own = usage(inflight, generated)
        own.tiers = [TierUsage(self.model, own.prompt_tokens, own.completion_tokens, self.score)]
        return own


def usage(inflight: Sequence[InflightRequest], generated: int, attempt: CascadeAttempt | None = None) -> Usage:
    """Token counts of these prompts and of `generated` answer tokens, with those of earlier tiers.

    Cached tokens are counted only with a cache salt: without one the number would tell a client what others have asked.
    """
    if attempt is not None:
        return _add_usages([*attempt.before, attempt.usage(inflight, generated)])
    prompt = sum(len(submitted.prompt) for submitted in inflight)
    cached = sum(submitted.metrics.cached_tokens for submitted in inflight if submitted.metrics is not None)
    own = all(submitted.salted for submitted in inflight)
    return Usage(prompt, generated, prompt + generated, {"cached_tokens": min(cached, prompt) if own else 0})


def _add_usages(usages: Sequence[Usage]) -> Usage:
    prompt, generated = sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages)
    cached = {"cached_tokens": sum(one.prompt_tokens_details["cached_tokens"] for one in usages)}
    tiers = [tier for one in usages for tier in one.tiers or []]
    return Usage(prompt, generated, prompt + generated, cached, tiers)


def new_id(kind: str) -> str:
    """A new random identifier: cmpl-…, chatcmpl-…, file-…; with an underscore for other kinds (msg_…, fc_…)."""
    return f"{kind}{'-' if kind in DASHED else '_'}{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())
