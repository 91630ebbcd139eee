"""/v1/responses: a chat in items. Responses are stored, and a later request continues one by its id."""

import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.decoding.tools import ToolError
from headrace.server.access.principals import PRINCIPAL
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.body_limits import read_json
from headrace.server.http.errors import as_api_error
from headrace.server.http.ids import new_id, now
from headrace.server.protocols.chat_messages import without_nulls
from headrace.server.protocols.fields import BRIEFLY, ChatRequest, InputTokensRequest, ResponseRequest, StreamOptions
from headrace.server.protocols.openai_types import Chat
from headrace.server.protocols.response_events import Events, chunks, ending, usage
from headrace.server.protocols.response_items import (
    Item,
    as_items,
    chat_choice,
    chat_format,
    chat_tools,
    messages,
    output_items,
)
from headrace.server.protocols.sampling import not_built
from headrace.server.protocols.stream import EventStream
from headrace.server.settings import Limits
from headrace.server.storage.store import StorageError, Store, listing

log = logging.getLogger("headrace.server")

# Fields that mean the same in a chat.
SAME = (
    *BRIEFLY,
    "seed",
    "deadline",
    "parallel_tool_calls",
    "allow_repeated_tool_calls",
    "open_objects",
    "chat_template_kwargs",
    "cache_salt",
)
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
# What may be asked for besides; the second is of reasoning items, which no answer here has.
INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")
REASONING = ("effort", "summary", "generate_summary")
MAX_ITEMS = 10_000
Answer = Callable[[ChatRequest, Request, bytes], Awaitable[Any]]  # a model's to a chat, or a cascade's


async def respond(chat: Answer, limits: Limits, store: Store, request: ResponseRequest, http: Request, salt: bytes) -> Any:
    """Answer a request by `chat`, streamed or whole, and store the response. A response that cannot be stored is delivered
    with `store` false and a warning. Raises the errors that `as_api_error` knows, and ClientGoneError."""
    _check(request)
    items = await _items(store, limits, request)
    asked = _as_chat(request, messages(items, request.instructions))
    response = _new(request)
    with _renamed():
        answer = await chat(asked, http, salt)
    keep = _Keeper(store, response, items, limits) if request.store is not False else None
    if isinstance(answer, EventStream):
        events = Events(response)
        return EventStream(events.begin(), _events(events, answer, keep), answer.on_end, done=b"")
    assert isinstance(answer, Chat)
    (choice,) = answer.choices
    response["output"] = output_items(msgspec.to_builtins(choice.message), choice.logprobs)
    response["usage"] = usage(msgspec.to_builtins(answer.usage))
    response |= ending(str(choice.finish_reason))
    if keep is not None:
        await keep()
    return response


async def count_input(
    prompt_of: Callable[[ChatRequest], Awaitable[list[int]]], limits: Limits, store: Store, request: InputTokensRequest
) -> dict[str, Any]:
    """The number of tokens in the prompt of a response. Raises the errors that `as_api_error` knows."""
    asked = ResponseRequest(**msgspec.structs.asdict(request))
    _check(asked)
    items = await _items(store, limits, asked)
    with _renamed():
        tokens = await prompt_of(_as_chat(asked, messages(items, request.instructions)))
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


async def _items(store: Store, limits: Limits, request: ResponseRequest) -> list[Item]:
    """The conversation of a request, the history of `previous_response_id` first. Raises ApiError."""
    items = [*await _history(store, request.previous_response_id, limits.body), *as_items(request.input)]
    if len(items) > MAX_ITEMS:
        raise bad(f"a conversation has at most {MAX_ITEMS} items; begin a new one", "input")
    return items


@contextlib.contextmanager
def _renamed() -> Iterator[None]:
    """Errors about a field of a chat name the field of the response."""
    try:
        yield
    except (ApiError, ToolError) as error:
        made = error if isinstance(error, ApiError) else ApiError(400, str(error), param=error.param, code=error.code)
        raise made.renamed(made.param or "", RENAMED.get(made.param or "", made.param or "")) from None


def _check(request: ResponseRequest) -> None:
    not_built(bool(request.background), "background", "answers are given at once; a batch waits")
    not_built(request.conversation is not None, "conversation", "conversations are gone on with by previous_response_id")
    not_built(request.prompt is not None, "prompt", "there are no prompt templates here")
    not_built(request.moderation is not None, "moderation", "this server does not moderate")
    counted = "there are no built-in tools, whose calls it would count; parallel_tool_calls: false allows one call"
    not_built(request.max_tool_calls is not None, "max_tool_calls", counted)
    not_built(request.truncation not in (None, "disabled"), "truncation", "nothing is cut off silently")
    for name in request.include or []:
        if name not in INCLUDES:
            raise bad(f"include must be of {', '.join(INCLUDES)}, not {name[:60]!r}", "include")
    if unknown := without_nulls(request.reasoning or {}).keys() - set(REASONING):
        raise bad(f"unknown field reasoning.{min(unknown)[:40]}; remove it", "reasoning")
    if not isinstance((request.reasoning or {}).get("effort"), str | None):
        raise bad("reasoning.effort must be text", "reasoning")
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options goes with stream: true", "stream_options")
    if not request.input:
        raise bad("input is empty; give a text or items", "input")


def _as_chat(request: ResponseRequest, talk: list[Item]) -> ChatRequest:
    given = {name: getattr(request, name) for name in SAME}
    wants = request.top_logprobs is not None or "message.output_text.logprobs" in (request.include or [])
    return ChatRequest(
        **given,
        model=request.model,
        messages=talk,
        max_completion_tokens=request.max_output_tokens,
        stream=request.stream,
        stream_options=StreamOptions(include_usage=True) if request.stream else None,
        logprobs=wants or None,
        top_logprobs=request.top_logprobs,
        tools=chat_tools(request.tools),
        tool_choice=chat_choice(request.tool_choice),
        response_format=chat_format(request.text),
        reasoning_effort=(request.reasoning or {}).get("effort"),
    )


def _new(request: ResponseRequest) -> dict[str, Any]:
    """The response as it is when it begins."""
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": (request.text or {}).get("format") or {"type": "text"}},
        "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


async def _events(events: Events, answer: EventStream, keep: "_Keeper | None") -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks(answer.parts()):
            for event in events.take(chunk):
                yield event
        if keep is not None:
            await keep()
        yield events.event(f"response.{events.response['status']}", response=events.response)
    except Exception as error:
        known = as_api_error(error)
        if known is None:
            raise
        code = known.code or "server_error"
        events.response |= {"status": "failed", "error": {"code": "server_error", "message": known.message}}
        yield events.event("error", code=code, message=known.message, param=known.param)
        yield events.event("response.failed", response=events.response)


class _Keeper:
    """Stores a response when it is complete."""

    def __init__(self, store: Store, response: dict[str, Any], items: list[Item], limits: Limits) -> None:
        self._store, self._response, self._items, self._limits = store, response, items, limits

    async def __call__(self) -> None:
        """Store the response. If the store refuses, the response says so, and is delivered all the same."""
        try:
            await self._insert()
        except StorageError as error:
            log.warning("response %s was not stored: %s", self._response["id"], error.message)
            why = f"this response was not stored and cannot be continued by its id: {error.message}"
            self._response |= {"store": False, "warnings": [{"code": error.code, "message": why}]}

    async def _insert(self) -> None:
        response, items = (msgspec.json.encode(one).decode() for one in (self._response, self._items))
        size, owner = len(response) + len(items), PRINCIPAL.get().name
        row = (self._response["id"], self._response["created_at"], size, response, items, owner)

        def work(db: sqlite3.Connection) -> None:
            db.execute("INSERT INTO responses (id, created, bytes, object, input, owner) VALUES (?, ?, ?, ?, ?, ?)", row)
            while _over(db, self._limits):
                share = "sum(bytes) / :bytes + count(*) / :count"
                biggest = f"SELECT owner FROM responses GROUP BY owner ORDER BY {share} DESC LIMIT 1"
                oldest = f"SELECT min(number) FROM responses WHERE owner = ({biggest})"
                limits = {"bytes": float(self._limits.response_bytes), "count": float(self._limits.responses)}
                db.execute(f"DELETE FROM responses WHERE number = ({oldest})", limits)

        await self._store.run(work)


def _over(db: sqlite3.Connection, limits: Limits) -> bool:
    """Whether more is kept than may be; the oldest of whoever has the most make room."""
    count, size = db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM responses").fetchone()
    return bool(count > limits.responses or size > limits.response_bytes)


async def _history(store: Store, name: str | None, most: int) -> list[Item]:
    """The items before a request that goes on from another: at most as much as one request may say."""
    if name is None:
        return []
    response, items = await _load(store, name, "previous_response_id")
    try:
        if len(response) + len(items) <= most:
            return [*read_json(items), *read_json(response)["output"]]
    except ApiError:
        pass  # too many values
    raise bad("the conversation holds more than one request may; begin a new one", "previous_response_id")


async def _load(store: Store, name: str, param: str | None = None) -> tuple[bytes, bytes]:
    """A response and the items that it answers, in JSON."""
    query, given = "SELECT object, input FROM responses WHERE id = ? AND owner = ?", (name, PRINCIPAL.get().name)
    row = await store.read(lambda db: db.execute(query, given).fetchone())
    if row is None:
        raise ApiError(404, f"there is no response {name[:100]!r}; was it stored?", param=param, code="response_not_found")
    return str(row[0]).encode(), str(row[1]).encode()


async def find(store: Store, name: str) -> msgspec.Raw:
    return msgspec.Raw((await _load(store, name))[0])


async def input_items(store: Store, name: str, after: str | None, limit: int, order: str) -> dict[str, Any]:
    """What was said to the model, the answers before included."""
    _, encoded = await _load(store, name)
    items: list[Item] = msgspec.json.decode(encoded)
    named = [{"id": f"item_{number}", "type": "message", **item} for number, item in enumerate(items)]
    return listing(named if order == "asc" else named[::-1], after, limit)


async def cancel(store: Store, name: str) -> dict[str, Any]:
    """Raises ApiError: 404 for an unknown response, 400 for any other, as none runs in the background."""
    await _load(store, name)
    raise ApiError(400, "only a response made with background: true can be cancelled; close the connection to end a stream")


async def delete(store: Store, name: str) -> dict[str, Any]:
    await _load(store, name)  # which is its owner's
    await store.run(lambda db: db.execute("DELETE FROM responses WHERE id = ?", (name,)))
    return {"id": name, "object": "response", "deleted": True}
