"""What goes out: the protocol's responses as structs, encoded by msgspec."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.server.tickets import Ticket

DASHED = frozenset({"cmpl", "chatcmpl", "file"})  # kinds of names with a dash


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Completion(msgspec.Struct, omit_defaults=False):
    """Of /v1/completions, streamed or whole. `usage` UNSET: not sent."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
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


class Chat(msgspec.Struct):
    """A whole answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


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


class ChatChunk(msgspec.Struct):
    """A piece of a streamed answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int | None
    status: str  # the state of its engine
    defaults: dict[str, Any] = {}  # by name the settings in force where a request says nothing: value and origin
    object: str = "model"
    owned_by: str = "headrace"


def new_id(kind: str) -> str:
    """A name for an answer or a part of one, joined as OpenAI joins it: cmpl-…, chatcmpl-…, file-…, and else msg_…, fc_…"""
    return f"{kind}{'-' if kind in DASHED else '_'}{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def usage(tickets: Sequence[Ticket], generated: int) -> Usage:
    """What the answers to these prompts took; `generated` tokens are counted. What was found in the cache is told under a salt
    alone: without one it would tell what others have asked."""
    prompt = sum(len(ticket.prompt) for ticket in tickets)
    cached = sum(ticket.metrics.cached_tokens for ticket in tickets if ticket.metrics is not None)
    own = all(ticket.salted for ticket in tickets)
    return Usage(prompt, generated, prompt + generated, {"cached_tokens": min(cached, prompt)} if own else None)
