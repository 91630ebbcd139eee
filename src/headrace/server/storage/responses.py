"""Stored responses: a later request continues one by its id, until the newest ones need the room."""

import logging
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.server.access.principals import PRINCIPAL
from headrace.server.engines.models import Service
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.body_limits import read_json
from headrace.server.protocols.fields import InputTokensRequest, ResponseRequest
from headrace.server.protocols.generation import GenerationRequest, Write
from headrace.server.protocols.response_items import Item, as_items
from headrace.server.protocols.responses import ResponseWriter, check_answer_fields, check_fields, new_response, read
from headrace.server.protocols.stream import EventStream
from headrace.server.settings import Limits
from headrace.server.storage.store import StorageError, Store, listing

log = logging.getLogger("headrace.server")

MAX_ITEMS = 10_000
Generate = Callable[[GenerationRequest, Write, Request], Awaitable[Any]]  # by one model, or by a cascade


async def respond(generate: Generate, limits: Limits, store: Store, body: ResponseRequest, http: Request) -> Any:
    """Answer a request, streamed or complete, and store the response. A response that cannot be stored is delivered with
    `store` false and a warning. Raises the errors that `as_api_error` knows, and ClientGoneError."""
    check_fields(body)
    items = await _items(store, limits, body)
    request, response = read(body, items), new_response(body)
    check_answer_fields(body)
    keep = partial(keep_response, store, response, items, limits) if body.store is not False else None
    result = await generate(request, lambda generation: ResponseWriter(generation, response, keep), http)
    if keep is not None and not isinstance(result, EventStream):
        await keep()
    return result


async def count_input(service: Service, limits: Limits, store: Store, body: InputTokensRequest) -> dict[str, Any]:
    """The number of tokens in the prompt of a response. Raises the errors that `as_api_error` knows."""
    asked = ResponseRequest(**msgspec.structs.asdict(body))
    check_fields(asked)
    tokens = await read(asked, await _items(store, limits, asked)).prompt_tokens(service)
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


async def _items(store: Store, limits: Limits, body: ResponseRequest) -> list[Item]:
    """The conversation of a request: the history of `previous_response_id`, then its input. Raises ApiError."""
    items = [*await _history(store, body.previous_response_id, limits.body), *as_items(body.input)]
    if len(items) > MAX_ITEMS:
        raise bad(f"a conversation has at most {MAX_ITEMS} items; begin a new one", "input")
    return items


async def keep_response(store: Store, response: dict[str, Any], items: list[Item], limits: Limits) -> None:
    """Store a complete response and its input. If the store refuses, the response gets a warning, and is delivered."""
    try:
        await _insert(store, response, items, limits)
    except StorageError as error:
        log.warning("response %s was not stored: %s", response["id"], error.message)
        why = f"this response was not stored and cannot be continued by its id: {error.message}"
        response |= {"store": False, "warnings": [{"code": error.code, "message": why}]}


async def _insert(store: Store, response: dict[str, Any], items: list[Item], limits: Limits) -> None:
    """Store a response. Above a limit the owner who uses most of it loses his oldest response, until both limits hold."""
    encoded, given = (msgspec.json.encode(value).decode() for value in (response, items))
    row = (response["id"], response["created_at"], len(encoded) + len(given), encoded, given, PRINCIPAL.get().name)

    def work(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO responses (id, created, bytes, object, input, owner) VALUES (?, ?, ?, ?, ?, ?)", row)
        while _over(db, limits):
            share = "sum(bytes) / :bytes + count(*) / :count"
            biggest = f"SELECT owner FROM responses GROUP BY owner ORDER BY {share} DESC LIMIT 1"
            oldest = f"SELECT min(number) FROM responses WHERE owner = ({biggest})"
            most = {"bytes": float(limits.response_bytes), "count": float(limits.responses)}
            db.execute(f"DELETE FROM responses WHERE number = ({oldest})", most)

    await store.run(work)


def _over(db: sqlite3.Connection, limits: Limits) -> bool:
    count, size = db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM responses").fetchone()
    return bool(count > limits.responses or size > limits.response_bytes)


async def _history(store: Store, name: str | None, most: int) -> list[Item]:
    """The items before a request that continues the response `name`. Raises ApiError if they have more than `most` bytes."""
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
    """A response and its input items, both in JSON. Raises ApiError (404) naming the field `param`."""
    query, given = "SELECT object, input FROM responses WHERE id = ? AND owner = ?", (name, PRINCIPAL.get().name)
    row = await store.read(lambda db: db.execute(query, given).fetchone())
    if row is None:
        raise ApiError(404, f"there is no response {name[:100]!r}; was it stored?", param=param, code="response_not_found")
    return str(row[0]).encode(), str(row[1]).encode()


async def find(store: Store, name: str) -> msgspec.Raw:
    return msgspec.Raw((await _load(store, name))[0])


async def input_items(store: Store, name: str, after: str | None, limit: int, order: str) -> dict[str, Any]:
    """The input of a response, with the conversation that it continued."""
    _, encoded = await _load(store, name)
    items: list[Item] = msgspec.json.decode(encoded)
    named = [{"id": f"item_{number}", "type": "message", **item} for number, item in enumerate(items)]
    return listing(named if order == "asc" else named[::-1], after, limit)


async def cancel(store: Store, name: str) -> dict[str, Any]:
    """Raises ApiError: 404 for an unknown response, 400 for any other, as none runs in the background."""
    await _load(store, name)
    raise ApiError(400, "only a response made with background: true can be cancelled; close the connection to end a stream")


async def delete(store: Store, name: str) -> dict[str, Any]:
    await _load(store, name)  # raises if the client has no such response
    await store.run(lambda db: db.execute("DELETE FROM responses WHERE id = ?", (name,)))
    return {"id": name, "object": "response", "deleted": True}
