"""/v1/responses: a chat in items. `storage.responses` stores responses and continues them."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import msgspec

from headrace.decoding.tools import ToolChoice
from headrace.server.http.api_error import bad
from headrace.server.http.errors import as_api_error
from headrace.server.protocols.chat_messages import without_nulls
from headrace.server.protocols.fields import RESPONSE_SAMPLING_FIELDS, RESPONSE_UNSUPPORTED, ResponseRequest, Sampling
from headrace.server.protocols.generation import Answer, AnswerEvent, Generation, GenerationRequest, Writer
from headrace.server.protocols.logprobs import EncodedLogprobs, chat_logprobs, joined
from headrace.server.protocols.openai_types import Usage, new_call, new_id, now
from headrace.server.protocols.prompts import Conversation, check_effort
from headrace.server.protocols.response_items import (
    Item,
    call_item,
    chat_choice,
    chat_format,
    chat_tools,
    message_item,
    messages,
    reasoning_item,
    reasoning_part,
    text_part,
)
from headrace.server.protocols.sampling import check_top_logprobs, refuse_unsupported
from headrace.text.dialects.call_parser import Piece

# Fields that have the same name and meaning in `Sampling`.
SHARED = (*RESPONSE_SAMPLING_FIELDS, "model", "stream", "seed", "deadline", "open_objects", "cache_salt")
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text",
}
# Valid values of `include`. The second one has no effect: the text of reasoning items is their content.
INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
REASONING = ("effort", "summary", "generate_summary")


def check_fields(body: ResponseRequest) -> None:
    """Raises ApiError for fields that contradict each other, or that ask for something not built."""
    refuse_unsupported(body, RESPONSE_UNSUPPORTED)
    for name in body.include or []:
        if name not in INCLUDES:
            raise bad(f"include must be of {', '.join(INCLUDES)}, not {name[:60]!r}", "include")
    if unknown := without_nulls(body.reasoning or {}).keys() - set(REASONING):
        raise bad(f"unknown field reasoning.{min(unknown)[:40]}; remove it", "reasoning")
    if not isinstance((body.reasoning or {}).get("effort"), str | None):
        raise bad("reasoning.effort must be text", "reasoning")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options goes with stream: true", "stream_options")
    if not body.input:
        raise bad("input is empty; give a text or items", "input")


def check_answer_fields(body: ResponseRequest) -> None:
    """The same for fields that the count of input tokens ignores."""
    check_effort((body.reasoning or {}).get("effort"), "reasoning")
    check_top_logprobs(body.top_logprobs)


def read(body: ResponseRequest, items: list[Item]) -> GenerationRequest:
    """`items`: the conversation, with the responses before. Raises ApiError."""
    wants_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or [])
    talk, tools = messages(items, body.instructions), chat_tools(body.tools)
    choice, form = chat_choice(body.tool_choice), chat_format(body.text)
    effort = (body.reasoning or {}).get("effort")
    asked = ToolChoice(tools, choice, body.parallel_tool_calls, body.allow_repeated_tool_calls, body.open_objects)
    return GenerationRequest(
        Sampling(**{name: getattr(body, name) for name in SHARED}),
        Conversation(talk, asked, body.chat_template_kwargs, effort),
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        response_format=form,
        splits_reasoning=True,
        names=NAMES,
    )


def new_response(body: ResponseRequest) -> dict[str, Any]:
    """The response object before the first token."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


class ResponseWriter(Writer):
    """The answer as items of `response`, which grows as events come. `keep` stores the response once it is complete."""

    done = b""

    def __init__(
        self, generation: Generation, response: dict[str, Any], keep: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        super().__init__(generation)
        self._response, self._keep = response, keep
        self._items: list[Item] = response["output"]
        self._number = -1  # of the last event of the stream
        self._open: int | None = None  # index of the item that is being written
        self._calls: dict[int, int] = {}  # number of a call -> index of its item

    async def logprobs(self, event: AnswerEvent) -> EncodedLogprobs | None:
        top = self.generation.request.logprobs
        if top is None:
            return None
        return chat_logprobs(self.tokenizer, () if event.in_reasoning else event.logprobs, top)

    async def stream(self) -> AsyncIterator[bytes]:
        """An error after the first event ends the stream with the events `error` and `response.failed`."""
        started = False
        try:
            async for event in self.generation.events():
                if not started:
                    started = True
                    yield self._event("response.created", response=self._response) + self._event(
                        "response.in_progress", response=self._response
                    )
                for part in self.chunks(event, await self.logprobs(event)):
                    yield part
            self._response["usage"] = self._usage()
            if self._keep is not None:
                await self._keep()
            yield self._event(f"response.{self._response['status']}", response=self._response)
        except Exception as error:
            known = as_api_error(error)
            if known is None or not started:
                raise
            self._response |= {"status": "failed", "error": {"code": "server_error", "message": known.message}}
            yield self._event("error", code=known.code or "server_error", message=known.message, param=known.param)
            yield self._event("response.failed", response=self._response)

    def chunks(self, event: AnswerEvent, logprobs: EncodedLogprobs | None) -> Iterable[bytes]:
        entries = [msgspec.Raw(entry) for entry in (logprobs or {}).get("content", [])]
        for piece in event.pieces:
            if piece.call is not None:
                yield from self._call(piece, piece.call)
            elif piece.reasoning:
                yield from self._reasoning(piece.text)
            elif piece.text:
                # Log-probabilities go with the last piece.
                yield from self._text(piece.text, entries if piece is event.pieces[-1] else [])
        if event.finish_reason is not None:
            if not self._items:
                yield from self._begin_text()
            yield from self._close()
            self._response |= _ending(event.finish_reason)

    def complete(self, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        if answer.reasoning:
            self._items.append(reasoning_item(answer.reasoning))
        if answer.text or not (answer.calls or answer.reasoning):
            logprobs = joined(answer.logprobs)["content"] if answer.logprobs else []
            self._items.append(message_item(answer.text, logprobs))
        self._items += map(call_item, answer.calls)
        self._response["usage"] = self._usage()
        self._response |= _ending(str(answer.finish_reason))
        return self._response

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _text(self, text: str, logprobs: list[msgspec.Raw]) -> Iterable[bytes]:
        if self._open is None or self._items[self._open]["type"] != "message":
            yield from self._begin_text()
        assert self._open is not None
        item = self._items[self._open]
        item["content"][0]["text"] += text
        item["content"][0]["logprobs"] += logprobs
        where = _place(item, self._open)
        yield self._event("response.output_text.delta", **where, content_index=0, delta=text, logprobs=logprobs)

    def _reasoning(self, text: str) -> Iterable[bytes]:
        if self._open is None or self._items[self._open]["type"] != "reasoning":
            yield from self._close()
            item = reasoning_item("", status="in_progress")
            where = _place(item, len(self._items))
            yield self._add(item, {**item, "content": []})
            yield self._event("response.content_part.added", **where, content_index=0, part=reasoning_part(""))
        assert self._open is not None
        item = self._items[self._open]
        item["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", **_place(item, self._open), content_index=0, delta=text)

    def _begin_text(self) -> Iterable[bytes]:
        yield from self._close()
        item = message_item("", [], status="in_progress")
        where = _place(item, len(self._items))
        yield self._add(item, {**item, "content": []})
        yield self._event("response.content_part.added", **where, content_index=0, part=text_part("", []))

    def _call(self, piece: Piece, number: int) -> Iterable[bytes]:
        """The first piece of a call has its name, the others have its arguments."""
        if piece.name is not None:
            yield from self._close()
            item = call_item(new_call(piece.name), status="in_progress")
            self._calls[number] = len(self._items)
            yield self._add(item, item)
        elif piece.text:
            index = self._calls[number]
            item = self._items[index]
            item["arguments"] += piece.text
            yield self._event("response.function_call_arguments.delta", **_place(item, index), delta=piece.text)

    def _add(self, item: Item, shown: Item) -> bytes:
        self._open = len(self._items)
        self._items.append(item)
        return self._event("response.output_item.added", output_index=self._open, item=shown)

    def _close(self) -> Iterable[bytes]:
        """Complete the open item, if there is one."""
        if self._open is None:
            return
        item = self._items[self._open]
        item["status"], where = "completed", _place(item, self._open)
        if item["type"] == "message":
            part = item["content"][0]
            text, logprobs = part["text"], part["logprobs"]
            yield self._event("response.output_text.done", **where, content_index=0, text=text, logprobs=logprobs)
            yield self._event("response.content_part.done", **where, content_index=0, part=part)
        elif item["type"] == "reasoning":
            part = item["content"][0]
            yield self._event("response.reasoning_text.done", **where, content_index=0, text=part["text"])
            yield self._event("response.content_part.done", **where, content_index=0, part=part)
        else:
            call = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **where, **call)
        yield self._event("response.output_item.done", output_index=self._open, item=item)
        self._open = None

    def _usage(self) -> dict[str, Any]:
        return _usage(self.generation.usage, self.generation.reasoned)


def _place(item: Item, index: int) -> dict[str, Any]:
    return {"item_id": item["id"], "output_index": index}


def _ending(reason: str) -> dict[str, Any]:
    """Fields of a response whose answer ended with this finish_reason."""
    if reason not in ("length", "content_filter"):
        return {"status": "completed"}
    cause = "max_output_tokens" if reason == "length" else reason
    return {"status": "incomplete", "incomplete_details": {"reason": cause}}


def _usage(counted: Usage, reasoned: int) -> dict[str, Any]:
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.prompt_tokens_details["cached_tokens"], "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": counted.total_tokens,
        **({} if counted.tiers is msgspec.UNSET else {"tiers": counted.tiers}),
    }
