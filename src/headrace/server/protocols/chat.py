"""/v1/chat/completions: a conversation, answered through the model's chat template."""

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.decoding.tools import ToolChoice
from headrace.server.http.api_error import bad
from headrace.server.protocols.fields import CHAT_UNSUPPORTED, ChatRequest, StreamOptions
from headrace.server.protocols.generation import Answer, AnswerEvent, Generation, GenerationRequest, TextProtocol, Writer
from headrace.server.protocols.logprobs import EncodedLogprobs, chat_logprobs, joined
from headrace.server.protocols.openai_types import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ToolCall,
    ToolFunction,
    new_call,
    new_id,
    now,
)
from headrace.server.protocols.prompts import Conversation, check_effort
from headrace.server.protocols.sampling import check_stream_options, check_top_logprobs, refuse_unsupported
from headrace.server.protocols.stream import sse_event as sse
from headrace.text.dialects.call_parser import Piece


def read(body: ChatRequest) -> GenerationRequest:
    """Raises ApiError for fields that contradict each other, or that ask for something not built."""
    _check(body)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return GenerationRequest(
        body,
        read_conversation(body),
        max_tokens=most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        response_format=body.response_format,
        splits_reasoning=True,
        names={"logprobs": "top_logprobs", **({"max_tokens": "max_completion_tokens"} if body.max_tokens is None else {})},
    )


def read_conversation(body: ChatRequest) -> Conversation:
    tools = ToolChoice(
        body.tools, body.tool_choice, body.parallel_tool_calls, body.allow_repeated_tool_calls, body.open_objects
    )
    return Conversation(
        body.messages,
        tools,
        body.chat_template_kwargs,
        body.reasoning_effort,
        body.add_generation_prompt,
        body.continue_final_message,
    )


def _check(body: ChatRequest) -> None:
    refuse_unsupported(body, CHAT_UNSUPPORTED)
    check_effort(body.reasoning_effort)
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs goes with logprobs: true", "top_logprobs")
    check_top_logprobs(body.top_logprobs)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise bad("max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")


class ChatWriter(Writer):
    """The answers as choices: messages of the assistant."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._id, self._created = new_id("chatcmpl"), now()
        self._fingerprint = generation.service.fingerprint
        self._options = self.sampling.stream_options or StreamOptions()
        self._started: set[int] = set()

    async def logprobs(self, event: AnswerEvent) -> EncodedLogprobs | None:
        top = self.generation.request.logprobs
        return None if top is None else chat_logprobs(self.tokenizer, event.logprobs, top)

    def chunks(self, event: AnswerEvent, logprobs: EncodedLogprobs | None) -> Iterable[bytes]:
        if event.index not in self._started:
            self._started.add(event.index)
            yield self._chunk(ChatChunkChoice(event.index, ChatDelta("assistant", "")))
        exits, reason = self.exits(event), event.finish_reason
        deltas = list(map(_delta, event.pieces))
        if not deltas and ((logprobs and logprobs["content"]) or exits or reason is not None):
            deltas = [ChatDelta()]
        for delta in deltas[:-1]:
            yield self._chunk(ChatChunkChoice(event.index, delta))
        for delta in deltas[-1:]:
            choice = ChatChunkChoice(event.index, delta, _logprobs(logprobs), reason, event.stop_reason, exits)
            yield self._chunk(choice)

    def end(self) -> Iterable[bytes]:
        if self._options.include_usage:
            yield self._chunk(usage=self.generation.usage)

    def complete(self, answers: list[Answer]) -> Chat:
        choices = [
            ChatChoice(
                answer.index,
                _message(answer),
                _logprobs(answer.logprobs),
                answer.finish_reason,
                answer.stop_reason,
                answer.exits or msgspec.UNSET,
            )
            for answer in answers
        ]
        name, usage = self.generation.model, self.generation.usage
        return Chat(self._id, self._created, name, choices, usage, system_fingerprint=self._fingerprint)

    def _chunk(self, *choices: ChatChunkChoice, **more: Any) -> bytes:
        if choices and self._options.continuous_usage_stats:
            more["usage"] = self.generation.usage
        elif choices and self._options.include_usage:
            more["usage"] = None
        name = self.generation.model
        chunk = ChatChunk(self._id, self._created, name, list(choices), system_fingerprint=self._fingerprint, **more)
        return sse(chunk)


def _logprobs(written: EncodedLogprobs | None) -> dict[str, Any] | None:
    return None if written is None else {**joined(written), "refusal": None}


def _message(answer: Answer) -> ChatMessage:
    reasoning = answer.reasoning or msgspec.UNSET
    if not answer.calls:
        return ChatMessage(answer.text, reasoning_content=reasoning)
    return ChatMessage(answer.text or None, tool_calls=answer.calls, reasoning_content=reasoning)


def _delta(piece: Piece) -> ChatDelta:
    if piece.call is None:
        return ChatDelta(reasoning_content=piece.text) if piece.reasoning else ChatDelta(content=piece.text)
    if piece.name is not None:
        return ChatDelta(tool_calls=[new_call(piece.name, piece.call)])
    return ChatDelta(tool_calls=[ToolCall(ToolFunction(piece.text), index=piece.call)])


CHAT = TextProtocol(read, ChatWriter)
