"""Files and batches through the `openai` client; a batch outlives its server, and answers every line once."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.server.http.api_error import ApiError
from headrace.server.settings import Limits
from headrace.server.storage.batch_worker import MAX_RUNNING
from headrace.workflows.batch_requests import InvalidLine, read_requests
from tests.server.batching import ASK, answers, end, lines, start
from tests.server.harness import PATIENCE, ROOT, Running, next_match
from tests.server.test_uploads import stored_counts, upload


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
            (post("/v1/files", files=[("file", ("a", b"x")), ("file", ("b", b"y"))]), "file is given twice"),
            (post("/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data"}), "not a multipart form"),
            (post("/v1/files", content=b"x", headers={"Content-Type": "multipart/form-data; boundary=a"}), "multipart form"),
            (post("/v1/files", content=b"x", headers={"Content-Type": f"multipart/form-data; boundary={'a' * 257}"}), "form"),
            (
                post("/v1/files", content=b"x", headers={"Content-Type": f"multipart/form-data; boundary={'a' * 30_000}"}),
                "form",
            ),
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


def test_health_and_uploads_report_a_full_disk(tiny: Path) -> None:
    """A full disk: uploads hear a 507, /health says why batches wait and stays ready, as all else goes on."""
    with Running(tiny) as server:
        file = server.openai.files.create(file=("in", lines([ASK])), purpose="batch")
        assert "batches" not in server.health()
        writer = server.server.store.writer
        (pages,) = writer.execute("PRAGMA page_count").fetchone()
        writer.execute(f"PRAGMA max_page_count = {pages}")
        answer = upload(server, 1 << 20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "disk_full")
        assert "make room there" in answer.json()["error"]["message"]
        assert stored_counts(server)[1] == 1
        server.server.worker._wait_for(None, ApiError(507, "the disk is full"))
        assert server.health() == {"status": "ready", "detail": "", "restarts": 0, "batches": "the disk is full"}
        writer.execute(f"PRAGMA max_page_count = {pages + 1000}")
        made = server.openai.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert end(server.openai, made.id).status == "completed"
        assert "batches" not in server.health()


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
    monkeypatch.setattr("headrace.server.storage.files.now", lambda: later)
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
        (b'{"custom_id": "\xff"}', "not UTF-8 at byte 15"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "must be a JSON object"),
        (b"\n\n", "no lines"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', "body must be"),
        (b'{"custom_id": 7, "url": "/v1/completions", "body": {}}', "custom_id must be"),
        (b'{"custom_id": "a", "url": "/v1/files", "body": {}}', "url must be /v1/completions, not"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {}, "x": 1}', "unknown field 'x'"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "stream has no meaning"),
        (b'{"custom_id": "a", "custom_id": "b", "url": "/v1/completions", "body": {}}', "field 'custom_id' occurs twice"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"seed": 1e400}}', "a number is out of range"),
        (lines([ASK]) + b"\n" + lines([ASK]), "used twice"),
    ],
)
def test_an_invalid_batch_file_fails_with_its_line(server: Running, content: bytes, says: str) -> None:
    batch = start(server.openai, content)
    assert batch.status == "failed"
    assert says in batch.errors.data[0].message


def test_a_file_may_begin_with_a_byte_order_mark(server: Running) -> None:
    done = end(server.openai, start(server.openai, b"\xef\xbb\xbf" + lines([ASK, {**ASK, "max_tokens": 6.0}])).id)
    first, second = answers(server.openai, done.output_file_id)
    assert first["response"]["body"]["choices"] == second["response"]["body"]["choices"]


LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "a"}}'
FILES = {
    "one line": LINE,
    "a byte order mark": b"\xef\xbb\xbf" + LINE,
    "a byte order mark alone, and a line": b"\xef\xbb\xbf\n" + LINE,
    "a byte order mark later": LINE.replace(b'"a"', b'"b"', 1) + b"\n\xef\xbb\xbf" + LINE,
    "Windows line ends and blank lines": b"\r\n" + LINE + b"\r\n \t\r\n",
    "no method": LINE.replace(b'"method": "POST", ', b""),
    "null for a method and an unknown field": LINE.replace(b'"POST"', b'null, "extra": null'),
    "an unknown field": LINE.replace(b'"POST"', b'"POST", "extra": 1'),
    "no custom_id": LINE.replace(b'"custom_id": "a", ', b""),
    "a number as custom_id": LINE.replace(b'"custom_id": "a"', b'"custom_id": 7'),
    "an empty custom_id": LINE.replace(b'"custom_id": "a"', b'"custom_id": ""'),
    "a custom_id like those that generate gives": LINE.replace(b'"custom_id": "a"', b'"custom_id": "line-7"'),
    "a custom_id of two lines": LINE.replace(b'"custom_id": "a"', b'"custom_id": "a\\nb"'),
    "a long custom_id": LINE.replace(b'"custom_id": "a"', b'"custom_id": "%s"' % (b"a" * 513)),
    "the same custom_id twice": LINE + b"\n" + LINE,
    "a field twice": LINE.replace(b'"prompt"', b'"prompt": "b", "prompt"'),
    "NaN": LINE.replace(b'"prompt"', b'"seed": NaN, "prompt"'),
    "a number out of range": LINE.replace(b'"prompt"', b'"top_p": 1e400, "prompt"'),
    "a number of 5,000 digits": LINE.replace(b'"prompt"', b'"seed": %s, "prompt"' % (b"1" * 5000)),
    "a lone surrogate": LINE.replace(b'"prompt": "a"', b'"prompt": "\\ud800"'),
    "a trailing comma": LINE.replace(b"}}", b"},}"),
    "not UTF-8": LINE.replace(b'"prompt": "a"', b'"prompt": "\xff"'),
    "UTF-16": LINE.decode().encode("utf-16"),
    "deep": b"[" * 100_000,
    "a list": b"[" + LINE + b"]",
    "an URL without a version": LINE.replace(b"/v1/completions", b"completions"),
    "a body that is text": LINE.replace(b'{"model": "tiny", "prompt": "a"}', b'"a"'),
    "a stream": LINE.replace(b'"prompt"', b'"stream": true, "prompt"'),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_valid_for_the_server_and_offline_or_for_neither(server: Running, name: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(FILES[name])
    invalid = [one for one in read_requests(tmp_path / "in.jsonl") if isinstance(one, InvalidLine)]
    batch = start(server.openai, FILES[name])
    assert (batch.status == "failed") == bool(invalid), (batch.errors, invalid)
    if batch.status != "failed":
        counts = end(server.openai, batch.id).request_counts
        assert counts.completed == counts.total > 0


def test_bad_batches_are_refused(server: Running) -> None:
    create = server.openai.batches.create
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        create(input_file_id="file-1' OR 1=1", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
        create(input_file_id="x", endpoint="/v1/batches", completion_window="24h")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="there is no batch"):
        server.openai.batches.retrieve("batch_none")


def test_a_cancelled_batch_returns_its_finished_lines(server: Running) -> None:
    with server.paused():
        batch = start(server.openai, lines([ASK] * 60))
        assert server.openai.batches.cancel(batch.id).status == "cancelling"
    done = end(server.openai, batch.id)
    assert done.status == "cancelled"
    given = answers(server.openai, done.output_file_id) if done.output_file_id else []
    left = answers(server.openai, done.error_file_id)
    assert len(given) + len(left) == 60
    assert len(left) >= 60 - MAX_RUNNING
    assert {row["error"]["code"] for row in left} == {"batch_cancelled"}


def test_a_batch_is_cancelled_by_a_request_without_a_body(server: Running) -> None:
    with server.paused():
        batch = start(server.openai, lines([ASK] * 40))
        answer = server.http.post(f"/v1/batches/{batch.id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
    assert end(server.openai, batch.id).status == "cancelled"


# Put before a server's own code: it is killed when so many lines of a batch have been answered, wherever it is then.
KILLED_AT = """
import os, signal
from headrace.server.storage.batch_worker import BatchWorker
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
    base = next_match(process, r"^tiny on (http://127\.0\.0\.1:\d+/v1)$")[1]
    next_match(process, r"^ready: ")
    plain = httpx.Client(timeout=PATIENCE, trust_env=False)
    return process, openai.OpenAI(base_url=base, api_key="none", max_retries=0, http_client=plain)


FIND = "SELECT custom_id, answer FROM rows WHERE answer IS NOT NULL"


def kill_9_and_again(tiny: Path, state: Path, count: int, kills: int, every: int, ask: dict[str, Any], url: str) -> int:
    """A batch of `count` lines whose server is killed so many times, each time when `every` more lines have their answer;
    returns the bytes that its folder has at most. Every line is answered once, and what was answered before a death stays."""
    process, client = serve(tiny, state, KILLED_AT.format(count=every))
    batch = start(
        client, lines([ask | ({"prompt": f"The mill {at}"} if "prompt" in ask else {}) for at in range(count)], url), url
    )
    kept: dict[str, bytes] = {}
    most = 0
    for kill in range(kills):
        assert process.wait(PATIENCE) == -signal.SIGKILL
        with sqlite3.connect(state / "server.sqlite") as database:
            found = dict(database.execute(FIND).fetchall())
        database.close()
        assert len(kept) + every <= len(found) <= len(kept) + every + MAX_RUNNING
        assert len(found) < count, "it was to be killed in the middle"
        assert {name: found[name] for name in kept} == kept
        kept = found
        most = max(most, sum(path.stat().st_size for path in state.iterdir()))
        process, client = serve(tiny, state, KILLED_AT.format(count=every) if kill < kills - 1 else "")
    done = end(client, batch.id)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", count, 0)
    rows = client.files.content(done.output_file_id).read().splitlines()
    assert [json.loads(row)["custom_id"] for row in rows] == [f"r{at}" for at in range(count)]
    assert set(kept.values()) <= set(rows), "what was answered before the end was not asked again"
    process.terminate()
    assert process.wait(PATIENCE) == 0
    return max(most, sum(path.stat().st_size for path in state.iterdir()))


def test_after_kill_9_a_batch_goes_on_and_every_line_is_answered_once(tiny: Path, tmp_path: Path) -> None:
    ask = {**ASK, "max_tokens": 12, "ignore_eos": True}
    assert kill_9_and_again(tiny, tmp_path / "state", 120, 2, 15, ask, "/v1/completions") < 4 << 20


@pytest.mark.slow
def test_fifty_thousand_embeddings_killed_five_times(tiny: Path, tmp_path: Path) -> None:
    """The disk holds what the quotas of uploads and batches allow, and the log of SQLite."""
    ask = {"model": "tiny", "input": "The mill stands by the river."}
    most = kill_9_and_again(tiny, tmp_path / "state", 50_000, 5, 8_000, ask, "/v1/embeddings")
    limits = Limits()
    assert most < limits.stored + limits.batch_bytes
    assert most < 400 << 20
