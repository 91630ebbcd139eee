"""What goes out: the protocol's responses as structs, encoded by msgspec."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.server.engines.inflight import InflightRequest
from headrace.text.dialects.call_parser import new_call_id


class TierUsage(msgspec.Struct):
    """What a model of a cascade read and wrote; `score`: how sure it was, null of the last, which is not asked."""

    model: str
    prompt_tokens: int
    completion_tokens: int
    score: float | None


class Usage(msgspec.Struct):
    """Of a cascade all tokens of all `tiers` that were asked, in their order; the last of them answered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]  # cached_tokens: 0 without a salt
    tiers: list[TierUsage] | msgspec.UnsetType = msgspec.UNSET


class TokenExit(msgspec.Struct, omit_defaults=True):
    """After how many layers a token was written, and how sure the exit was. `votes`: its and the whole model's, in an audit."""

    layers: int
    confidence: float | None = None
    votes: list[str] = []


Exits = list[TokenExit] | msgspec.UnsetType  # one a token; UNSET: not asked for


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    exits: Exits = msgspec.UNSET


class Completion(msgspec.Struct, omit_defaults=False):
    """Of /v1/completions, streamed or whole. `usage` UNSET: not sent."""

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
    """A call in a message, or a piece of one in a stream (then with its `index`)."""

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


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    exits: Exits = msgspec.UNSET


class Chat(msgspec.Struct):
    """A whole answer of /v1/chat/completions."""

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


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    exits: Exits = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """A piece of a streamed answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Calibrated(msgspec.Struct):
    """A threshold that was calibrated, by what somebody is so sure, how it falls, and for which inputs that promises what."""

    criterion: str
    threshold: float
    decay: float
    promise: str


class Exit(msgspec.Struct):
    """After how many of a model's layers tokens may leave."""

    after: int
    layers: int
    calibrated: Calibrated | msgspec.UnsetType = msgspec.UNSET


class TokenCascade(msgspec.Struct):
    """Who may write tokens in a model's place; its own are written after `layers` layers."""

    smaller: str
    layers: int
    calibrated: Calibrated | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int | None
    status: str  # the state of its engine
    defaults: dict[str, Any] | msgspec.UnsetType = {}  # by name the settings in force where a request says nothing
    tiers: list[str] | msgspec.UnsetType = msgspec.UNSET  # of a cascade: its models, who is asked first before the others
    exit: Exit | msgspec.UnsetType = msgspec.UNSET  # by which tokens may leave
    cascade: TokenCascade | msgspec.UnsetType = msgspec.UNSET  # a smaller model opened with it
    object: str = "model"
    owned_by: str = "headrace"


@dataclass(slots=True)
class CascadeAttempt:
    """A tier's try at a request to a cascade, which clients know as `name`."""

    name: str
    model: str
    scored: bool  # by its tokens, before it is known whether its answer stands
    before: tuple[Usage, ...] = ()  # of those that were asked and not sure enough, each with itself as its only tier
    score: float | None = None

    def usage(self, inflight: Sequence[InflightRequest], generated: int) -> Usage:
        """What this tier took."""
        own = usage(inflight, generated)
        own.tiers = [TierUsage(self.model, own.prompt_tokens, own.completion_tokens, self.score)]
        return own


def usage(inflight: Sequence[InflightRequest], generated: int, attempt: CascadeAttempt | None = None) -> Usage:
    """Tokens of these prompts and of `generated` answer tokens, with those of the tiers before. Cached tokens are counted under
    a salt only: without one the number would show what others have asked."""
    if attempt is not None:
        return _add_usages([*attempt.before, attempt.usage(inflight, generated)])
    prompt = sum(len(submitted.prompt) for submitted in inflight)
    cached = sum(submitted.metrics.cached_tokens for submitted in inflight if submitted.metrics is not None)
    own = all(submitted.salted for submitted in inflight)
    return Usage(prompt, generated, prompt + generated, {"cached_tokens": min(cached, prompt) if own else 0})


def _add_usages(each: Sequence[Usage]) -> Usage:
    prompt, generated = sum(one.prompt_tokens for one in each), sum(one.completion_tokens for one in each)
    cached = {"cached_tokens": sum(one.prompt_tokens_details["cached_tokens"] for one in each)}
    tiers = [tier for one in each for tier in one.tiers or []]
    return Usage(prompt, generated, prompt + generated, cached, tiers)
