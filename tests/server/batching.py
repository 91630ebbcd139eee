"""Batches without a server: input files, a store, a worker, and stub applications that answer."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import openai

from headrace.server.access.principals import Principal
from headrace.server.http.errors import ENGINE_LOST
from headrace.server.protocols.fields import BatchRequest
from headrace.server.settings import Limits
from headrace.server.storage import batches, files, store_schema
from headrace.server.storage.batch_worker import BatchWorker
from headrace.server.storage.store import Store
from tests.server.harness import PATIENCE, until

T = TypeVar("T")
ENDED = ("completed", "failed", "cancelled", "expired")
ASK = {"model": "tiny", "prompt": "The mill", "max_tokens": 6, "temperature": 0}


def lines(bodies: list[dict[str, Any]], url: str = "/v1/completions") -> bytes:
    rows = [{"custom_id": f"r{at}", "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies)]
    return "\n".join(json.dumps(row) for row in rows).encode()


def of(count: int) -> bytes:
    """Completions."""
    return lines([{**ASK, "prompt": f"p{at}"} for at in range(count)])


def start(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions") -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def end(client: openai.OpenAI, name: str) -> Any:
    until(lambda: client.batches.retrieve(name).status in ENDED)
    return client.batches.retrieve(name)


def answers(client: openai.OpenAI, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


def keep(
    db: sqlite3.Connection, name: str, content: bytes, life: int | None = None, who: Principal | None = None
) -> dict[str, Any]:
    """A file, as an upload keeps it."""
    file = files.create(db, Limits(), who or Principal())
    files.append(db, file, content, Limits().stored, who or Principal())
    return files.complete(db, file, name, "batch", life)


async def read_file(store: Store, name: str) -> bytes:
    _, pieces = await files.content(store, name)
    return b"".join([piece async for piece in pieces])


class Fragile:
    """An application whose engine ends whenever a poisoned request runs, together with all that runs beside it."""

    def __init__(self) -> None:
        self.deaths = 0
        self.begun: list[str] = []
        self.most = 0
        self.beside: list[int] = []  # how many ran together with the poison, each time
        self._running = 0
        self._died = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        self.begun.append(prompt)
        self._running += 1
        self.most = max(self.most, self._running)
        if prompt == "poison":
            self.beside.append(self._running - 1)
        died = self._died
        await asyncio.sleep(0.01)
        if prompt == "poison":
            self.deaths += 1
            self._died.set()
            self._died = asyncio.Event()
        elif not died.is_set():
            await asyncio.wait({asyncio.create_task(died.wait())}, timeout=0.01)
        self._running -= 1
        error = {"error": {"message": "it ended", "code": ENGINE_LOST}}
        status, body = (503, error) if died.is_set() else (200, {"said": prompt})
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def answering(size: int = 300, status: int = 200, error: str = "", asked: list[dict[str, Any]] | None = None) -> Any:
    """An application that answers at once, with so many characters or an error of this code; it notes what it was asked."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        if asked is not None:
            asked.append(body)
        await asyncio.sleep(0)
        said = {"error": {"message": "no", "code": error}} if error else {"said": "x" * size}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})

    return app


async def make(store: Store, content: bytes, limits: Limits | None = None, url: str = "/v1/completions") -> str:
    """A batch of a file of lines; its id."""
    file = await store.run(lambda db: keep(db, "in", content))
    asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    return str((await batches.create(store, BatchRequest(**asked), limits or Limits()))["id"])


@asynccontextmanager
async def working(app: Any, store: Store, most: int = Limits().batch_bytes, **more: Any) -> AsyncIterator[BatchWorker]:
    """A worker of one's own."""
    worker = BatchWorker(app, store, most, **more)
    worker.begin()
    try:
        yield worker
    finally:
        await worker.close()


async def ended(store: Store, name: str) -> dict[str, Any]:
    """A batch when it has ended."""
    while (found := await batches.find(store, name))["status"] not in ENDED:
        await asyncio.sleep(0.01)
    return found


async def written(store: Store, batch: dict[str, Any]) -> list[list[Any]]:
    """What a batch has written: its output, its errors."""
    names = [batch["output_file_id"], batch["error_file_id"]]
    texts = [await read_file(store, name) if name else b"" for name in names]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


async def through(app: Any, store: Store, prompts: list[str], limits: Limits) -> tuple[Any, list[Any]]:
    """A batch run by a worker of its own, and its answers, the good and the others."""
    name = await make(store, lines([{**ASK, "prompt": prompt} for prompt in prompts]), limits)
    async with working(app, store, limits.batch_bytes):
        found = await ended(store, name)
    return found, await written(store, found)


def run(test: Coroutine[Any, Any, T]) -> T:
    """A test that waits for what must come."""

    async def bounded() -> T:
        return await asyncio.wait_for(test, PATIENCE)

    return asyncio.run(bounded())


async def come(condition: Callable[[], Any]) -> None:
    """Wait for it."""
    while not condition():
        await asyncio.sleep(0.01)


def check_counters(db: sqlite3.Connection) -> None:
    """What batches say of themselves is what their rows say."""
    for number, *said in db.execute(
        "SELECT number, done, failed, output_bytes, error_bytes, bytes, total FROM batches"
    ).fetchall():
        rows = db.execute("SELECT state, body, answer FROM rows WHERE batch = ?", (number,)).fetchall()
        if not rows:
            continue
        sizes = {state: [len(answer) + 1 for one, _, answer in rows if one == state] for state in ("done", "failed")}
        held = sum(
            store_schema.ROW_OVERHEAD + len(body or b"") + (len(answer) + 1 if answer else 0) for _, body, answer in rows
        )
        counted = [len(sizes["done"]), len(sizes["failed"]), sum(sizes["done"]), sum(sizes["failed"]), held, len(rows)]
        assert said == counted
