"""A flood by one principal does not take the others' share of the queue, of batches, or of the storage."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from headrace.server.access.principals import PRINCIPAL, Principal
from headrace.server.access.queueing import AdmissionQueue, QueueFullError
from headrace.server.http.api_error import ApiError
from headrace.server.protocols.fields import BatchRequest
from headrace.server.settings import Limits
from headrace.server.storage import batch_rows, batches, files, responses, store_schema
from headrace.server.storage.store import Store
from tests.server.batching import answering, ended, keep, lines, run, working, written
from tests.server.harness import Running, in_thread, until
from tests.server.key_principals import ALICE, BOB, as_, http, several, write


def flood(queue: AdmissionQueue, who: Principal, tokens: int = 1) -> int:
    """How many of one principal's requests the queue takes."""
    count = 0
    with as_(who), contextlib.suppress(QueueFullError):
        while True:
            queue.enter([tokens])
            count += 1
    return count


@pytest.mark.parametrize("hogs", [1, 2, 5])
def test_floods_leave_queue_places_for_other_principals(hogs: int) -> None:
    for queue, size in ((AdmissionQueue(256, 10**9), 1), (AdmissionQueue(10**9, 256_000), 1000)):
        taken = [flood(queue, several(f"hog{at}"), size) for at in range(hogs)]
        assert taken[0] == 128
        assert flood(queue, several("other"), size) >= 1
    queue = AdmissionQueue(256, 10**9)
    assert flood(queue, Principal()) == 256, "who has no others beside him has all of it"
    assert flood(queue, Principal()) == 0, "and then there is none, which the test above would see"


def test_clients_alternate_in_the_queue() -> None:
    """Of two who ask, one a hundred times and then the other five times, the answers begin in turns; alone in order."""

    def order(fair: bool) -> list[str]:
        queue = AdmissionQueue(1000, 10**9)
        turns: list[tuple[int, int, str]] = []
        for at, who in enumerate(["a"] * 100 + ["b"] * 5):
            queue.enter([1])
            turns.append((queue.turn(who) if fair else 0, at, who))
        return [who for _, _, who in sorted(turns)]

    assert order(True).index("b") == 1
    assert [at for at, who in enumerate(order(True)) if who == "b"] == [1, 3, 5, 7, 9]
    assert order(False).index("b") == 100, "without turns the other waits for all of them"
    queue = AdmissionQueue(1000, 10**9)
    alone = []
    for _ in range(50):
        queue.enter([1, 1])
        alone += [queue.turn("a"), queue.turn("a")]
        queue.leave(1, client="a", turn=alone[len(alone) // 3])
    assert alone == sorted(alone)


def test_a_flood_does_not_block_other_principals(endless: Path, tmp_path: Path) -> None:
    """Alice fills batch and queue with answers that do not end by themselves; Bob is let in, and is the next to be answered."""
    file = write(tmp_path / "keys.toml", f"[alice]\nkey = '{ALICE}'\n[bob]\nkey = '{BOB}'")
    body = {"model": "tiny", "prompt": "The mill", "max_tokens": 90_000, "ignore_eos": True}
    with Running(endless, keys=file, max_num_seqs=2, max_queued_requests=8) as server:
        alice, bob = http(server, ALICE), http(server, BOB)
        floods = [in_thread(lambda: alice.post("/v1/completions", json=body)) for _ in range(2)]
        until(lambda: sum(one.generated > 0 for one in list(server.llm.inflight.values())) == 2)
        floods += [in_thread(lambda: alice.post("/v1/completions", json=body)) for _ in range(10)]
        until(lambda: len(server.llm.inflight) == 2 + 4)  # two run, four wait: half of the queue
        until(lambda: sum(not one.running for one in floods) == 6)
        assert {one.result().status_code for one in floods if not one.running} == {429}
        asked = in_thread(lambda: bob.post("/v1/completions", json={**body, "max_tokens": 3}))
        until(lambda: len(server.llm.inflight) == 2 + 5)
        running = server.on_loop(lambda: [one for one in server.llm.inflight.values() if one.generated])
        server.on_loop(lambda: server.llm.abort(running))  # two places in the batch: one is for Bob, and three of Alice's wait
        assert asked.result().status_code == 200
        server.on_loop(lambda: server.llm.abort(list(server.llm.inflight.values())))
        alice.close()


def test_batch_lines_alternate_between_principals(tmp_path: Path) -> None:
    async def test() -> None:
        store = Store(tmp_path)
        for who, count in (("a", 40), ("b", 3)):
            with as_(several(who)):
                content = lines([{"prompt": f"{who}{at}"} for at in range(count)])
                file = await store.run(lambda db, c=content, w=who: keep(db, "in", c, who=several(w)))  # type: ignore[misc]
                asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
                await batches.create(store, BatchRequest(**asked), Limits())
        owners = await store.read(batch_rows.active_owners)
        assert owners == ["a", "b"]
        begun = await store.run(lambda db: batch_rows.start_rows(db, 8, True, dict.fromkeys(owners, 0)))
        assert [row.owner for row in begun] == ["a", "b"] * 3 + ["a", "a"]
        begun = await store.run(lambda db: batch_rows.start_rows(db, 2, False, {"a": 5, "b": 3}))
        assert [row.owner for row in begun] == ["a", "a"], "the other has no more"
        store.close()

    run(test())


def test_batch_lines_of_a_removed_key_are_not_answered(tmp_path: Path) -> None:
    async def test() -> None:
        store = Store(tmp_path)
        made = {}
        for who in ("gone", "there"):
            with as_(several(who)):
                file = await store.run(lambda db, w=who: keep(db, "in", lines([{"prompt": "a"}]), who=several(w)))  # type: ignore[misc]
                asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
                made[who] = (await batches.create(store, BatchRequest(**asked), Limits()))["id"]
        seen: list[str] = []
        answer = answering()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(PRINCIPAL.get().name)
            await answer(scope, receive, send)

        async with working(app, store, named=lambda name: several(name) if name == "there" else None):
            for who in made:
                with as_(several(who)):
                    found = await ended(store, made[who])
                    good, bad = await written(store, found)
                    assert (len(good), len(bad)) == ((1, 0) if who == "there" else (0, 1))
                    assert not bad or bad[0]["error"]["code"] == "key_removed"
        assert seen == ["there"], "and lines are asked in their owner's name"
        store.close()

    run(test())


def test_one_principal_cannot_fill_the_storage(tmp_path: Path) -> None:
    """Files by number and bytes, and bytes of batches; who is alone may fill them."""
    limits = Limits(files=8, stored=1000, batches=8)

    def fill(db: sqlite3.Connection, who: Principal, size: int) -> int:
        count = 0
        with contextlib.suppress(ApiError):
            while True:
                file = files.create(db, limits, who)
                files.append(db, file, bytes(size), limits.stored, who)
                files.complete(db, file, "a", "batch", None)
                count += 1
        return count

    for size, most in ((1, 4), (200, 2)):
        store = Store()
        assert fill(store.writer, several("hog"), size) == most
        assert fill(store.writer, several("other"), size) >= 1
        store.close()
    for size, most in ((1, 8), (200, 5)):
        store = Store()
        assert fill(store.writer, Principal(), size) == most
        store.close()


def test_responses_of_one_principal_do_not_evict_those_of_another() -> None:
    async def test() -> None:
        store = Store()
        limits = Limits(responses=10)

        async def put(owner: str, name: str) -> None:
            with as_(several(owner)):
                await responses.keep_response(store, {"id": name, "created_at": 1}, [], limits)

        for at in range(3):
            await put("b", f"b{at}")
        for at in range(30):
            await put("a", f"a{at}")
        kept = await store.read(lambda db: [name for (name,) in db.execute("SELECT id FROM responses ORDER BY number")])
        assert kept == ["b0", "b1", "b2", *(f"a{at}" for at in range(23, 30))]
        store.close()

    run(test())


def test_objects_of_an_older_database_belong_to_the_anonymous_principal(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "server.sqlite") as db:
        now = store_schema.SCHEMA + store_schema.RESPONSES
        owner = "owner TEXT NOT NULL DEFAULT 'anonymous'"
        before = now.replace(f",\n    {owner}", "").replace(f", {owner}", "")
        before = before.replace("files_held ON files (batch, owner, bytes)", "files_batch ON files (batch, bytes)")
        before = before.replace("batches_held ON batches (owner, bytes)", "batches_bytes ON batches (bytes)")
        assert "owner" not in before
        db.executescript(before)
        add = "INSERT INTO files (id, created, filename, purpose, bytes, complete) VALUES ('file-1', 1, 'a', 'batch', 1, 1)"
        db.execute(add)
        db.execute("INSERT INTO responses (id, created, bytes, object, input) VALUES ('resp_1', 1, 2, '{}', '[]')")
        db.execute("PRAGMA user_version = 3")
    db.close()

    async def test() -> None:
        store = Store(tmp_path)
        assert (await files.describe(store, "file-1"))["id"] == "file-1"
        assert bytes(await responses.find(store, "resp_1")) == b"{}"
        with as_(several("alice")):
            with pytest.raises(ApiError, match="there is no file"):
                await files.describe(store, "file-1")
            with pytest.raises(ApiError, match="there is no response"):
                await responses.find(store, "resp_1")
        indices = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        old, new = (one.execute(indices).fetchall() for one in (store.reader, Store().reader))
        assert len(old) == len(new)
        assert [text for (text,) in old if "INDEX" in text] == [text for (text,) in new if "INDEX" in text]
        store.close()

    run(test())
