"""The events of a streamed /v1/responses, made from the chunks of a streamed chat."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from headrace.server.http.ids import new_id
from headrace.server.protocols.response_items import Item, call_item, message_item, text_part

BEGIN, END = b"data: ", b"\n\n"


class Events:
    """Numbers the events of one response and keeps its items as they grow. `response` is changed as it goes."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._number = -1
        self._open: int | None = None  # the item that is being written
        self._logprobs: list[Any] = []
        self._calls: dict[int, int] = {}  # a call's place among the calls -> among the items

    @property
    def _items(self) -> list[Item]:
        items: list[Item] = self.response["output"]
        return items

    def event(self, kind: str, **more: Any) -> bytes:
        """One event as it is sent."""
        self._number += 1
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **more})
        return b"event: " + kind.encode() + b"\n" + BEGIN + data + END

    def begin(self) -> bytes:
        return self.event("response.created", response=self.response) + self.event(
            "response.in_progress", response=self.response
        )

    def take(self, chunk: dict[str, Any]) -> Iterator[bytes]:
        """What a chunk of the chat adds."""
        if chunk.get("usage"):
            self.response["usage"] = usage(chunk["usage"])
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                yield from self._text(delta["content"], (choice.get("logprobs") or {}).get("content") or [])
            for call in delta.get("tool_calls") or []:
                yield from self._call(call)
            if choice.get("finish_reason") is not None:
                if not self._items:
                    yield from self._begin_text()
                yield from self._close()
                self.response |= ending(choice["finish_reason"])

    def _text(self, text: str, logprobs: list[Any]) -> Iterator[bytes]:
        if self._open is None or self._items[self._open]["type"] != "message":
            yield from self._begin_text()
        assert self._open is not None
        item = self._items[self._open]
        item["content"][0]["text"] += text
        item["content"][0]["logprobs"] += logprobs
        yield self.event("response.output_text.delta", **self._where(item), content_index=0, delta=text, logprobs=logprobs)

    def _begin_text(self) -> Iterator[bytes]:
        yield from self._close()
        item = message_item("", [], status="in_progress")
        yield from self._add(item, {**item, "content": []})
        yield self.event("response.content_part.added", **self._where(item), content_index=0, part=text_part("", []))

    def _call(self, call: Item) -> Iterator[bytes]:
        """The first piece of a call brings its name, the others its arguments."""
        function = call.get("function") or {}
        if call["index"] not in self._calls:
            yield from self._close()
            made = {"id": call.get("id") or new_id("call"), "function": {"name": function.get("name") or "", "arguments": ""}}
            item = call_item(made, status="in_progress")
            yield from self._add(item, item)
            self._calls[call["index"]] = len(self._items) - 1
        item = self._items[self._calls[call["index"]]]
        if function.get("arguments"):
            item["arguments"] += function["arguments"]
            yield self.event("response.function_call_arguments.delta", **self._where(item), delta=function["arguments"])

    def _add(self, item: Item, shown: Item) -> Iterator[bytes]:
        self._items.append(item)
        self._open = len(self._items) - 1
        yield self.event("response.output_item.added", output_index=self._open, item=shown)

    def _close(self) -> Iterator[bytes]:
        """The open item is complete."""
        if self._open is None:
            return
        item = self._items[self._open]
        item["status"] = "completed"
        if item["type"] == "message":
            part = item["content"][0]
            where = {**self._where(item), "content_index": 0}
            yield self.event("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
            yield self.event("response.content_part.done", **where, part=part)
        else:
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self.event("response.function_call_arguments.done", **self._where(item), **done)
        yield self.event("response.output_item.done", output_index=self._open, item=item)
        self._open = None

    def _where(self, item: Item) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._items.index(item)}


async def chunks(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed chat, decoded."""
    async for data in parts:
        for piece in data.split(END):
            if piece.startswith(BEGIN):
                yield msgspec.json.decode(piece.removeprefix(BEGIN))


def ending(reason: str) -> dict[str, Any]:
    """How a response ended, from the finish_reason of a chat."""
    if reason in ("length", "content_filter"):
        cause = {"length": "max_output_tokens"}.get(reason, reason)
        return {"status": "incomplete", "incomplete_details": {"reason": cause}}
    return {"status": "completed"}


def usage(counted: dict[str, Any]) -> dict[str, Any]:
    """A chat's usage as responses have it."""
    details = counted.get("prompt_tokens_details") or {}
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": details.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted["total_tokens"],
        **({"tiers": counted["tiers"]} if "tiers" in counted else {}),
    }
