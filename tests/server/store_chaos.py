"""Two batches from upload to output, without luck: `python -m tests.server.store_chaos HOW FIRST STRIDE SECONDS`.

HOW `kill`: the process is killed before the n-th statement to the database, and another goes on. `full`, `busy`, `disk`: the
n-th statement and the two behind it fail as on a disk that is full, in a database that somebody holds, on a disk that does not
write. So for n = FIRST, FIRST + STRIDE … until nothing is hit any more. Prints a line for each mistake, and last the n that hit
nothing. A process that goes on for SECONDS is a mistake. With LOOSE in the environment there are no transactions: the control.
"""

import asyncio
import json
import logging
import os
import signal
import sqlite3
import sys
import tempfile
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from headrace.server.http.errors import ENGINE_LOST
from headrace.server.protocols.fields import BatchRequest
from headrace.server.settings import Limits
from headrace.server.storage import batch_worker, batches, files
from headrace.server.storage.store import StorageError, Store, StoreError
from tests.server.batching import ASK, ENDED, answering, check_counters, keep, lines, read_file, working

FAULTS = {
    "full": (sqlite3.SQLITE_FULL, (507, "disk_full")),
    "busy": (sqlite3.SQLITE_BUSY, (503, "storage_busy")),
    "disk": (sqlite3.SQLITE_IOERR, (503, "storage_busy")),
}
BATCHES = {"first": ["good", "bad", "lost"], "second": ["never"]}  # the second is cancelled before it begins
LOOSE = "HEADRACE_TEST_LOOSE"
IN_A_ROW = 3  # statements that fail
MEMORY = Path("/dev/shm")  # quicker than a disk
connect = sqlite3.connect


class Unlucky:
    """Connections whose n-th statement, counted over all of them, is their process's last, or fails."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how, self.seen = at, how, 0

    def connect(self, *given: Any, **more: Any) -> "Connection":
        return Connection(connect(*given, **more), self)

    @property
    def hit(self) -> bool:
        return self.seen >= self.at

    def count(self) -> None:
        self.seen += 1
        if self.how == "kill" and self.seen == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how != "kill" and self.at <= self.seen < self.at + IN_A_ROW:
            error = sqlite3.OperationalError("it was to fail")
            error.sqlite_errorcode = FAULTS[self.how][0]
            raise error


class Connection:
    """One of them."""

    def __init__(self, db: sqlite3.Connection, luck: Unlucky) -> None:
        self.db, self.luck = db, luck

    def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
        loose = os.environ.get(LOOSE)
        if loose and statement in ("BEGIN", "BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
            return self.db.cursor()
        if statement.startswith(loose) if loose else statement != "ROLLBACK":
            self.luck.count()
        return self.db.execute(statement, *given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.db, name)


class App:
    """An application that notes what it was asked; one prompt is bad, under another the engine ends once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message, given = await receive(), list[dict[str, Any]]()

        async def again() -> Any:
            return message

        async def nowhere(message: Any) -> None:
            return None

        await answering(asked=given)(scope, again, nowhere)
        prompt = given[0]["prompt"]
        with (self.folder / "asked").open("a") as file:
            file.write(f"{prompt}\n")
        status, error = (400, "invalid_value") if prompt == "bad" else (200, "")
        if prompt == "lost" and not (self.folder / "lost").exists():
            (self.folder / "lost").touch()
            status, error = 503, ENGINE_LOST
        await answering(10, status, error)(scope, again, send)


async def patiently(work: Any, how: str) -> Any:
    """What a client does that is told to ask again."""
    while True:
        try:
            return await work()
        except StorageError as error:
            if how == "kill" or (error.status, error.code) != FAULTS[how][1]:
                raise
            await asyncio.sleep(0)


async def work(folder: Path, how: str) -> list[str]:
    """Do what is not done yet, and look at all of it: the mistakes."""
    store = opened(folder)
    kept, before = answered(folder), requested(folder)

    async def client() -> list[str]:
        found = (await files.list_files(store, None, None, 100, "asc"))["data"]
        inputs = {one["filename"]: one["id"] for one in found if one["purpose"] == "batch"}
        made = {one["input_file_id"]: one for one in (await batches.list_batches(store, None, 100))["data"]}
        for name, prompts in BATCHES.items():
            if name not in inputs:
                text = lines([{**ASK, "prompt": prompt} for prompt in prompts])
                inputs[name] = (await store.run(partial(keep, name=name, content=text)))["id"]
            if inputs[name] not in made:
                asks = BatchRequest(input_file_id=inputs[name], endpoint="/v1/completions", completion_window="24h")
                made[inputs[name]] = await batches.create(store, asks, Limits())
        first, second = (made[inputs[name]] for name in BATCHES)
        if second["status"] == "in_progress":
            await batches.cancel(store, second["id"])
        return [first["id"], second["id"]]

    names = await patiently(client, how)
    async with working(App(folder), store):
        for name in names:
            while (await patiently(partial(batches.find, store, name), how))["status"] not in ENDED:
                await asyncio.sleep(0.001)
    found: list[str] = await patiently(partial(mistakes, store, names), how)
    store.close()
    now, again = answered(folder), requested(folder) - before
    found += [f"the answer to {name} was kept, and has changed" for name in kept if now.get(name) != kept[name]]
    found += [f"{name} was asked again, though its answer was kept" for name in kept if again[name]]
    if how != "kill" and again != Counter(good=1, bad=1, lost=2):
        found.append(f"asked: {dict(again)}")
    return found


def opened(folder: Path) -> Store:
    """The store of a server that is started again when it cannot open it."""
    while True:
        try:
            return Store(folder)
        except StoreError:  # it says why in one line
            pass


def requested(folder: Path) -> Counter[str]:
    path = folder / "asked"
    return Counter(path.read_text().split() if path.exists() else [])


def answered(folder: Path) -> dict[str, bytes]:
    """The answers that are kept, by prompt."""
    query = "SELECT custom_id, answer FROM rows WHERE answer IS NOT NULL AND total = 3"
    try:
        with closing(connect(folder / "server.sqlite")) as db:
            rows = db.execute(query.replace("rows", "rows JOIN batches ON batch = batches.number", 1)).fetchall()
    except sqlite3.OperationalError:  # there is nothing yet
        return {}
    return {BATCHES["first"][int(name[1:])]: answer for name, answer in rows}


async def mistakes(store: Store, names: list[str]) -> list[str]:
    """What is not as it must be at the end."""
    found: list[str] = []
    listed = (await batches.list_batches(store, None, 100))["data"]
    if sorted(one["id"] for one in listed) != sorted(names):
        found.append(f"{len(listed)} batches")
    uploads = [one for one in (await files.list_files(store, None, None, 100, "asc"))["data"] if one["purpose"] == "batch"]
    if [one["filename"] for one in uploads] != list(BATCHES):
        found.append(f"uploads: {uploads}")
    for name, status, good, bad in zip(names, ("completed", "cancelled"), (["r0", "r2"], []), (["r1"], ["r0"]), strict=True):
        batch = await batches.find(store, name)
        counts = {"total": len(good + bad), "completed": len(good), "failed": len(bad)}
        if (batch["status"], batch["request_counts"]) != (status, counts):
            found.append(f"{batch['status']}, not {status}: {batch['request_counts']}")
        for kind, wanted in (("output", good), ("error", bad)):
            file = batch[f"{kind}_file_id"]
            texts = (await read_file(store, file)).splitlines() if file else []
            ids = [json.loads(text)["custom_id"] for text in texts]
            if sorted(ids) != wanted:
                found.append(f"{kind} of a batch {status}: {ids}, not {wanted}")
    await store.read(check_counters)
    states = await store.read(lambda db: db.execute("SELECT DISTINCT state FROM rows ORDER BY state").fetchall())
    if states != [("done",), ("failed",)]:
        found.append(f"rows are {states}")
    (whole,) = await store.read(lambda db: db.execute("PRAGMA integrity_check").fetchone())
    return found if whole == "ok" else [*found, whole]


def process(folder: Path, how: str, luck: Unlucky, seconds: int) -> tuple[bool, list[str]]:
    """Do the work in a process of its own: whether it was hit, and the mistakes."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        signal.alarm(seconds)
        sqlite3.connect = luck.connect  # type: ignore[assignment]
        try:
            found = asyncio.run(work(folder, how))
        except BaseException as error:
            found = [repr(error)]
        os.write(writing, json.dumps([luck.hit, found]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return True, []
    hit, found = json.loads(said) if status == 0 else (True, [f"no end within {seconds} s"])
    return hit, found


def attempt(at: int, how: str, seconds: int) -> tuple[bool, list[str]]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.exists() else None) as name:
        hit, found = process(Path(name), how, Unlucky(at, how), seconds)
        if hit and how == "kill":
            _, found = process(Path(name), how, Unlucky(sys.maxsize, how), seconds)
        return hit, found


def main(how: str, first: int, stride: int, seconds: int) -> None:
    logging.disable(logging.CRITICAL)
    batch_worker.RETRY_SECONDS = (0.01, 0.02)
    at, hit = first, True
    while hit:
        hit, found = attempt(at, how, seconds)
        for one in found:
            print(f"{how} {at}: {one}")
        at += stride
    print(at - stride)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
