"""Files and batches through the `openai` client; a batch outlives its server, and answers every line once."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.server import batches, files
from headrace.server.batch_worker import WIDTH, BatchWorker
from headrace.server.errors import ENGINE_LOST, ApiError
from headrace.server.fields import BatchRequest
from headrace.server.settings import Limits
from headrace.server.store import Store, StoreError
from tests.server.harness import PATIENCE, ROOT, Running, said, until

ENDED = ("completed", "failed", "cancelled", "expired")
ASK = {"model": "tiny", "prompt": "The mill", "max_tokens": 6, "temperature": 0}


def lines(bodies: list[dict[str, Any]], url: str = "/v1/completions") -> bytes:
    rows = [{"custom_id": f"r{at}", "method": "POST", "url": url, "body": body} for at, body in enumerate(bodies)]
    return "\n".join(json.dumps(row) for row in rows).encode()


def start(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/completions") -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def end(client: openai.OpenAI, name: str) -> Any:
    until(lambda: client.batches.retrieve(name).status in ENDED)
    return client.batches.retrieve(name)


def answers(client: openai.OpenAI, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


def test_files(server: Running) -> None:
    files = server.openai.files
    made = files.create(file=("../a/b.jsonl", b"one\n"), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.status) == ("b.jsonl", 4, "batch", "processed")
    assert files.retrieve(made.id) == made
    assert files.content(made.id).read() == b"one\n"
    other = files.create(file=b"two", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600})
    assert other.expires_at == other.created_at + 3600
    mine = (made.id, other.id)  # other tests' files may be there
    assert [file.id for file in files.list() if file.id in mine] == [other.id, made.id]
    paged = [file.id for file in files.list(limit=1)]  # the client asks for page after page
    assert [name for name in paged if name in mine] == [other.id, made.id]
    assert [file.id for file in files.list(purpose="batch") if file.id in mine] == [made.id]
    assert files.delete(made.id).deleted
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            call(made.id)
    files.delete(other.id)


def test_bad_uploads_are_refused(tiny: Path) -> None:
    limits = Limits(file=500, stored=600)
    with Running("no-model", begin=False, limits=limits) as server:
        post = server.http.post
        good = {"file": ("a", b"x" * 100)}
        for answer, says in (
            (post("/v1/files", files=good), "purpose must be one of"),
            (post("/v1/files", files=good, data={"purpose": "evil"}), "purpose must be one of"),
            (post("/v1/files", files=good, data={"purpose": "batch", "more": "x"}), "unknown field 'more'"),
            (post("/v1/files", files={"file": ("a", b"")}, data={"purpose": "batch"}), "is empty"),
            (post("/v1/files", files={"other": ("a", b"x")}, data={"purpose": "batch"}), "unknown field 'other'"),
            (post("/v1/files", files={"purpose": ("a", b"x")}), "file is missing"),
            (post("/v1/files", files=[("file", ("a", b"x")), ("file", ("b", b"y"))]), "one file"),
            (post("/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data"}), "no multipart form"),
            (post("/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data; boundary=a"}), "multipart form"),
        ):
            assert answer.status_code == 400, answer.text
            assert says in answer.json()["error"]["message"]
        assert post("/v1/files", files={"file": ("a", b"x" * 1000)}, data={"purpose": "batch"}).status_code == 413
        assert post("/v1/files", json={}).status_code == 400
        assert post("/tokenize", files=good).status_code == 415
        form = {"files": good, "data": {"purpose": "batch"}}
        assert post("/v1/files", **form, headers={"Origin": "https://evil.example"}).status_code == 403  # type: ignore[arg-type]
        assert post("/v1/files", **form, headers={"Origin": server.base}).status_code == 200  # type: ignore[arg-type]
        for _ in range(4):
            assert post("/v1/files", **form).status_code == 200  # type: ignore[arg-type]
        full = post("/v1/files", files={"file": ("a", b"x" * 101)}, data={"purpose": "batch"})
        assert full.json()["error"]["code"] == "storage_full"


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"anchor": "created_at", "seconds": 60}, "must be 3600 to 2592000"),
        ({"anchor": "created_at", "seconds": 3e6}, "has the anchor created_at, and seconds"),
        ({"anchor": "used_at", "seconds": 3600}, "has the anchor created_at, and seconds"),
        ({"seconds": 3600}, "has the anchor created_at, and seconds"),
        ({"anchor": "created_at", "seconds": 3600, "more": 1}, "has the anchor created_at, and seconds"),
        ({"anchor": "created_at", "seconds": True}, "has the anchor created_at, and seconds"),
    ],
)
def test_a_life_that_no_file_can_have_is_refused(server: Running, policy: dict[str, Any], says: str) -> None:
    asked = {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h", "output_expires_after": policy}
    error = server.post("/v1/batches", asked).json()["error"]
    assert (error["param"], says in error["message"]) == ("output_expires_after", True)
    form = {"purpose": "batch", **{f"expires_after[{name}]": str(value) for name, value in policy.items()}}
    assert server.http.post("/v1/files", files={"file": ("a", b"x")}, data=form).status_code == 400


def test_files_past_their_time_are_not_there_and_are_deleted(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Input of a batch is kept for 30 days, what a batch writes as long as the batch says, from when it is written."""
    client = server.openai
    file = client.files.create(file=("in.jsonl", lines([ASK, {**ASK, "top_k": "x"}])), purpose="batch")
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    life: Any = {"anchor": "created_at", "seconds": 3600}
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", output_expires_after=life
    )
    done = end(client, batch.id)
    written = [client.files.retrieve(name) for name in (done.output_file_id, done.error_file_id)]
    assert [one.expires_at - one.created_at for one in written] == [3600, 3600]
    plain = end(client, start(client, lines([ASK])).id)
    assert client.files.retrieve(plain.output_file_id).expires_at is None
    later = max(one.expires_at for one in written)
    monkeypatch.setattr("headrace.server.files.now", lambda: later)
    for call in (client.files.retrieve, client.files.content):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            call(done.output_file_id)
    names = [one.id for one in client.files.list()]
    assert plain.output_file_id in names
    assert not {one.id for one in written} & set(names)
    other = client.files.create(file=b"x", purpose="user_data")  # a look for what is over
    monkeypatch.undo()
    with pytest.raises(openai.NotFoundError, match="there is no file"):  # it is gone for good
        client.files.retrieve(done.output_file_id)
    for name in (file.id, plain.output_file_id, plain.input_file_id, other.id):
        client.files.delete(name)


def test_a_waiting_worker_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing is to be done the files whose time is over are deleted."""

    async def run() -> int:
        store = Store(tmp_path / "state")
        await store.run(lambda db: files.add(db, "a", "batch", b"x", -1))
        worker = BatchWorker(None, store, 1)  # type: ignore[arg-type]
        worker.begin()
        while await store.run(lambda db: db.execute("SELECT count(*) FROM files").fetchone()[0]):
            await asyncio.sleep(0.01)
        await worker.stop()
        await worker.close()
        (left,) = await store.run(lambda db: db.execute("SELECT count(*) FROM files").fetchone())
        store.close()
        return int(left)

    assert asyncio.run(asyncio.wait_for(run(), PATIENCE)) == 0


def test_a_batch_is_answered_line_by_line(server: Running, offline: LLM) -> None:
    prompts = ["The mill", "A river", "water", "wheel"]
    bodies = [{**ASK, "prompt": prompt} for prompt in prompts]
    bodies[2]["top_k"] = "many"  # this line is refused, the others go on
    batch = start(server.openai, lines(bodies))
    assert batch.request_counts.total == 4
    done = end(server.openai, batch.id)
    assert (done.status, done.metadata, done.endpoint) == ("completed", {"a": "b"}, "/v1/completions")
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 1)
    expected = {
        output.prompt: output.outputs[0].text
        for output in offline.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    }
    good = answers(server.openai, done.output_file_id)
    assert [row["custom_id"] for row in good] == ["r0", "r1", "r3"]
    for row, prompt in zip(good, ("The mill", "A river", "wheel"), strict=True):
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["choices"][0]["text"] == expected[prompt]
    (bad,) = answers(server.openai, done.error_file_id)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("r2", 400)
    assert "top_k" in bad["response"]["body"]["error"]["message"]
    assert batch.id in [one.id for one in server.openai.batches.list(limit=1)]
    with pytest.raises(openai.ConflictError, match="is completed"):
        server.openai.batches.cancel(batch.id)


def test_every_endpoint_of_a_batch(server: Running) -> None:
    talk = [{"role": "user", "content": "Name a river."}]
    for url, body in (
        ("/v1/chat/completions", {"model": "tiny", "messages": talk, "max_tokens": 4}),
        ("/v1/embeddings", {"model": "tiny", "input": "water"}),
    ):
        done = end(server.openai, start(server.openai, lines([body], url), url).id)
        (row,) = answers(server.openai, done.output_file_id)
        assert row["response"]["body"]["object"] in ("chat.completion", "list")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"\n\n", "no lines"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', "body must be"),
        (b'{"custom_id": 7, "url": "/v1/completions", "body": {}}', "custom_id must be"),
        (b'{"custom_id": "a", "url": "/v1/files", "body": {}}', "method and url"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {}, "x": 1}', "unknown field 'x'"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "stream has no meaning"),
        (lines([ASK]) + b"\n" + lines([ASK]), "used twice"),
    ],
)
def test_a_file_that_is_no_batch_fails_and_says_where(server: Running, content: bytes, says: str) -> None:
    batch = start(server.openai, content)
    assert batch.status == "failed"
    assert says in batch.errors.data[0].message


def test_bad_batches_are_refused(server: Running) -> None:
    create = server.openai.batches.create
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        create(input_file_id="file-1' OR 1=1", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
        create(input_file_id="x", endpoint="/v1/batches", completion_window="24h")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="there is no batch"):
        server.openai.batches.retrieve("batch_none")


def test_a_cancelled_batch_ends_with_what_was_done(server: Running) -> None:
    with server.paused():
        batch = start(server.openai, lines([ASK] * 60))
        assert server.openai.batches.cancel(batch.id).status == "cancelling"
    done = end(server.openai, batch.id)
    assert done.status == "cancelled"
    given = answers(server.openai, done.output_file_id) if done.output_file_id else []
    left = answers(server.openai, done.error_file_id)
    assert len(given) + len(left) == 60
    assert len(left) >= 60 - WIDTH
    assert {row["error"]["code"] for row in left} == {"batch_cancelled"}


def test_a_batch_is_cancelled_by_a_request_without_a_body(server: Running) -> None:
    with server.paused():
        batch = start(server.openai, lines([ASK] * 40))
        answer = server.http.post(f"/v1/batches/{batch.id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
    assert end(server.openai, batch.id).status == "cancelled"


class Fragile:
    """An application whose engine ends whenever a poisoned request runs, together with all that runs beside it."""

    def __init__(self) -> None:
        self.deaths = 0
        self.begun: list[str] = []
        self.most = 0
        self._running = 0
        self._died = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        self.begun.append(prompt)
        self._running += 1
        self.most = max(self.most, self._running)
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


async def through(app: Any, store: Store, prompts: list[str], limits: Limits, ends: Any = ENDED) -> tuple[Any, list[Any]]:
    """A batch run by a worker of its own, and its answers, the good and the others."""
    content = lines([{**ASK, "prompt": prompt} for prompt in prompts])
    file = await store.run(lambda db: files.add(db, "in", "batch", content))
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await batches.create(store, BatchRequest(**asked), limits)
    worker = BatchWorker(app, store, limits.stored)
    worker.begin()
    while (found := await batches.find(store, batch["id"]))["status"] not in ends:
        await asyncio.sleep(0.01)
    await worker.close()
    kept = [found["output_file_id"], found["error_file_id"]]
    texts = [await files.content(store, name) if name else b"" for name in kept]
    return found, [[json.loads(line) for line in text.splitlines()] for text in texts]


def test_a_line_that_ends_the_engine_is_tried_three_times_and_ends_only_itself() -> None:
    async def run() -> None:
        app, store = Fragile(), Store()
        prompts = [f"p{at}" for at in range(40)]
        prompts[5] = "poison"
        batch, (good, bad) = await through(app, store, prompts, Limits())
        assert batch["status"] == "completed"
        assert [row["response"]["body"]["said"] for row in good] == [one for one in prompts if one != "poison"]
        (line,) = bad
        assert (line["custom_id"], line["response"], line["error"]["code"]) == ("r5", None, ENGINE_LOST)
        assert "ended 3 times" in line["error"]["message"]
        assert app.deaths == app.begun.count("poison") == 3
        assert app.most == WIDTH  # lines run together
        first = app.begun.index("poison")
        again = app.begun[app.begun.index("poison", first + 1) :]
        assert again[0] == again[1] == "poison"  # alone, the second and the third time
        assert max(map(app.begun.count, prompts)) == 3
        assert max(app.begun.count(one) for one in prompts if one != "poison") == 2
        store.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_line_that_finds_the_server_busy_is_not_asked_after_the_end_of_its_batch() -> None:
    """It waits as long as its batch is open, and no attempt is counted."""

    async def run() -> None:
        asked: list[int] = []

        async def busy(scope: Any, receive: Any, send: Any) -> None:
            asked.append(1)
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error": {"code": "no_room"}}'})

        store = Store()

        async def cancel() -> None:
            while len(asked) < 3:
                await asyncio.sleep(0.01)
            (name,) = await store.run(lambda db: db.execute("SELECT id FROM batches").fetchone())
            await batches.cancel(store, name)

        (batch, (good, bad)), _ = await asyncio.gather(through(busy, store, ["a"], Limits()), cancel())
        assert (batch["status"], good, len(bad)) == ("cancelled", [], 1)
        assert bad[0]["error"]["code"] == "batch_cancelled"
        store.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that says a great deal."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps({"said": "x" * 300}).encode()})


def test_what_batches_keep_counts_as_files_do() -> None:
    """The requests of open batches, and what they write; a batch whose answers have no room has failed, and says why."""

    async def run() -> None:
        store = Store()
        size = len(lines([{**ASK, "prompt": "a"}] * 10))
        batch, _ = await through(echo, store, ["a"] * 10, Limits(stored=4 * size + 4000))
        assert batch["status"] == "completed"
        before = await store.run(lambda db: db.execute("SELECT sum(bytes) FROM files").fetchone()[0])
        limits = Limits(stored=before + 2 * size + 1000)  # room for the requests, twice, and not for the answers
        batch, _ = await through(echo, store, ["a"] * 10, limits)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "storage_full")
        left = "SELECT count(*), (SELECT sum(bytes) FROM batches) FROM lines"
        assert await store.run(lambda db: db.execute(left).fetchone()) == (0, 0)
        with pytest.raises(ApiError, match="is full; delete some"):  # its copy of the requests counts
            await through(echo, store, ["a"] * 10, Limits(stored=before + 2 * size + size // 2))
        store.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_database_of_an_earlier_version_is_gone_on_with(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    with sqlite3.connect(tmp_path / "server.sqlite") as database:
        database.executescript(
            "ALTER TABLE lines DROP COLUMN attempts; ALTER TABLE batches DROP COLUMN bytes; PRAGMA user_version = 1;"
        )
    database.close()

    async def run() -> None:
        store = Store(tmp_path)
        batch, _ = await through(echo, store, ["a"], Limits())
        assert batch["status"] == "completed"
        store.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


# Put before a server's own code: it is killed when so many lines of a batch have been answered, wherever it is then.
KILLED_AT = """
import os, signal
from headrace.server.batch_worker import BatchWorker
line, done = BatchWorker._line, 0
async def counted(self, *arguments):
    global done
    await line(self, *arguments)
    done += 1
    if done == {count}:
        os.kill(os.getpid(), signal.SIGKILL)
BatchWorker._line = counted
"""


def serve(tiny: Path, state: Path, before: str = "") -> tuple["subprocess.Popen[str]", openai.OpenAI]:
    """`headrace serve` in a process of its own."""
    command = [
        sys.executable, "-c", f"{before}\nimport sys\nfrom headrace.cli.app import main\nsys.exit(main())",
        "serve", str(tiny), "--port", "0", "--dtype", "float32", "--threads", "1", "--state", str(state),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    base = said(process, r"^tiny on (http://127\.0\.0\.1:\d+/v1)$")[1]
    said(process, r"^ready: ")
    plain = httpx.Client(timeout=PATIENCE, trust_env=False)
    return process, openai.OpenAI(base_url=base, api_key="none", max_retries=0, http_client=plain)


def test_after_kill_9_a_batch_goes_on_and_every_line_is_answered_once(tiny: Path, tmp_path: Path) -> None:
    count = 120
    bodies = [{**ASK, "prompt": f"The mill {at}", "max_tokens": 24, "ignore_eos": True} for at in range(count)]
    process, client = serve(tiny, tmp_path / "state", KILLED_AT.format(count=10))
    batch = start(client, lines(bodies))
    assert process.wait(PATIENCE) == -signal.SIGKILL
    with sqlite3.connect(tmp_path / "state" / "server.sqlite") as database:
        rows = database.execute("SELECT custom_id, answer FROM lines WHERE answer IS NOT NULL").fetchall()
        kept = {custom_id: json.loads(answer)["id"] for custom_id, answer in rows}
    assert 10 <= len(kept) <= 10 + WIDTH < count, "it was to be killed in the middle"
    process, client = serve(tiny, tmp_path / "state")
    done = end(client, batch.id)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", count, 0)
    rows = answers(client, done.output_file_id)
    assert [row["custom_id"] for row in rows] == [f"r{at}" for at in range(count)]
    again = {row["custom_id"]: row["id"] for row in rows}
    assert {name: again[name] for name in kept} == kept, "what was answered before the end was not asked again"
    process.terminate()
    assert process.wait(PATIENCE) == 0


def test_one_server_at_a_time_keeps_a_folder(tmp_path: Path) -> None:
    first = Store(tmp_path / "state")
    with pytest.raises(StoreError, match="in use by another server"):
        Store(tmp_path / "state")
    first.close()
    Store(tmp_path / "state").close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "server.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Store(tmp_path / "file")


def test_who_is_cancelled_leaves_no_transaction_behind(tmp_path: Path) -> None:
    """One is under way when its task is cancelled, twice; the next begins after it, and it is kept."""
    began, go_on = threading.Event(), threading.Event()

    def slow(db: sqlite3.Connection) -> None:
        began.set()
        assert go_on.wait(PATIENCE)
        files.add(db, "a", "batch", b"x")

    async def main() -> list[str]:
        store = Store(tmp_path / "state")
        first = asyncio.create_task(store.run(slow))
        assert await asyncio.to_thread(began.wait, PATIENCE)
        second = asyncio.create_task(store.run(lambda db: db.execute("SELECT filename FROM files").fetchall()))
        for _ in range(2):
            first.cancel()
            await asyncio.sleep(0)
        left = first.done()
        go_on.set()
        assert not left
        with pytest.raises(asyncio.CancelledError):
            await first
        found = [name for (name,) in await second]
        store.close()
        return found

    assert asyncio.run(main()) == ["a"]
