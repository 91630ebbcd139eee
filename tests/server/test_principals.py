"""Several principals: separate data, separate prefix caches, and quotas."""

import contextvars
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from headrace.server.access import principals
from headrace.server.access.principals import PRINCIPAL, Principal, QuotaMeter
from headrace.server.http.api_error import ApiError
from headrace.server.protocols.sampling import priority_of
from headrace.server.settings import Limits
from tests.server.batching import end, lines, start
from tests.server.harness import Running
from tests.server.key_principals import ALICE, BOB, FILE, SCRAPER, client, http, write


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = write(tmp_path_factory.mktemp("keys") / "keys.toml", FILE)
    running = Running(tiny, keys=file, max_queued_requests=8)
    with running:
        yield running


def test_a_principal_cannot_read_objects_of_another(two: Running) -> None:
    """Files, batches, what they wrote, responses: another's are not there, in lists, by name, and as inputs."""
    alice, bob = client(two, ALICE), client(two, BOB)
    batch = start(alice, lines([{"model": "tiny", "prompt": "a", "max_tokens": 2}]))
    batch = end(alice, batch.id)
    response = alice.responses.create(model="tiny", input="The mill", max_output_tokens=16)
    names = [batch.input_file_id, batch.output_file_id]
    assert batch.status == "completed"
    for name in names:
        assert alice.files.content(name).text
        for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                call(name)
    for call in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            call(batch.id)
    for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            call(response.id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.create(model="tiny", input="and", previous_response_id=response.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(input_file_id=names[0], endpoint="/v1/completions", completion_window="24h")
    mine = bob.files.create(file=("b.jsonl", b"{}"), purpose="batch").id
    assert [one.id for one in bob.files.list()] == [mine]
    assert [one.id for one in bob.files.list(after=names[0])] == [], "another's file is no place to begin from"
    assert [one.id for one in bob.batches.list()] == []
    assert {one.id for one in alice.files.list()} == set(names)
    assert [one.id for one in alice.batches.list()] == [batch.id]
    assert alice.responses.retrieve(response.id).id == response.id
    assert alice.files.delete(names[1]).deleted


def test_without_separate_names_principals_share_objects(two: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: where both have one name, each sees it all."""
    monkeypatch.setattr(principals.Principal, "name", "one")  # a class attribute in place of the slot: the same for all
    alice, bob = client(two, ALICE), client(two, BOB)
    made = alice.files.create(file=("b.jsonl", b"{}"), purpose="batch").id
    assert bob.files.retrieve(made).id == made
    bob.files.delete(made)


def test_cached_prefixes_are_shared_only_under_the_same_salt(two: Running) -> None:
    def cached(key: str, prompt: str, **more: Any) -> int | None:
        made = client(two, key).completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=more)
        return made.usage.prompt_tokens_details.cached_tokens if made.usage.prompt_tokens_details else None  # type: ignore[union-attr]

    prompt = "a prompt of alice that is long enough for several blocks of the cache, I should think" * 2
    assert cached(ALICE, prompt) == 0
    assert (cached(ALICE, prompt) or 0) > 0
    assert cached(BOB, prompt) == 0, "nobody is told of another's"
    assert cached(BOB, prompt, cache_salt="x") == 0
    assert cached(ALICE, prompt, cache_salt="x") == 0, "one salt of two principals is two"


def test_salts_of_principals_are_distinct() -> None:
    """Nothing that a client can say in `cache_salt` is under the salt of a principal."""
    mine, other = Principal("a", b"m" * 32), Principal("b", b"o" * 32)
    assert len({mine.salted(b""), mine.salted(b"x"), other.salted(b""), other.salted(b"x"), Principal().salted(b"x")}) == 5
    with pytest.raises(UnicodeDecodeError):
        mine.salted(b"").decode()


def test_metrics_and_logs_name_the_principal(two: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace.requests")
    client(two, BOB).completions.create(model="tiny", prompt="The mill", max_tokens=2)
    said = [record for record in caplog.records if getattr(record, "principal", None) == "bob"]
    assert [record for record in said if hasattr(record, "generated_tokens")]
    assert [record for record in said if hasattr(record, "status")]
    texts = {key: http(two, key).get("/metrics").text for key in (ALICE, BOB, SCRAPER)}
    assert "bob" not in texts[ALICE]
    assert "alice" not in texts[BOB]
    assert 'principal="bob"' in texts[BOB]
    assert ['principal="alice"' in texts[SCRAPER], 'principal="bob"' in texts[SCRAPER]] == [True, True]
    assert http(two, "no-such-key-at-all").get("/v1/models").status_code == 401
    assert "no-such" not in http(two, SCRAPER).get("/metrics").text


def test_no_window_exceeds_the_quota() -> None:
    """A client that takes all it can, at odd times: every window of every place holds at most the quota, and nearly that."""
    now = [1000.0]
    meter = QuotaMeter(10, 7.0, lambda: now[0])
    taken: list[float] = []
    for step in range(4000):
        now[0] += 0.013 * (1 + step % 7)
        if not meter.seconds_until(1):
            meter.add(1)
            taken.append(now[0])
    most = max(sum(start <= one < start + 7.0 for one in taken) for start in taken)
    assert most == 10
    assert len(taken) > (now[0] - 1000) / 7.0 * 9


def test_the_quota_is_free_after_the_reported_wait() -> None:
    for amount in (1, 2, 3, 7, 10):
        now = [5.0]
        meter = QuotaMeter(10, 60.0, lambda now=now: now[0])
        for _ in range(5):
            meter.add(2)
            now[0] += 3.3
        assert meter.seconds_until(11) == float("inf")
        wait = meter.seconds_until(amount)
        assert 0 < wait < 62
        now[0] += wait - 0.01
        assert meter.seconds_until(amount) > 0
        now[0] += 0.011
        assert meter.seconds_until(amount) == 0


def quota(tmp_path: Path, **more: Any) -> Path:
    said = "\n".join(f"{name} = {value}" for name, value in {"window": 86400, **more}.items())
    return write(tmp_path / "keys.toml", f"[alice]\nkey = '{ALICE}'\n{said}\n[bob]\nkey = '{BOB}'")


def refused(answer: httpx.Response, unit: str) -> bool:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert unit in error["message"]
    return 0 < int(answer.headers["retry-after"]) <= 90_000


def test_quotas_of_requests_and_bytes(tmp_path: Path) -> None:
    """Counted before anything is done with a request; another principal's are its own."""
    with Running("no-model", begin=False, keys=quota(tmp_path, requests=6, bytes=3000)) as server:
        alice, bob = http(server, ALICE), http(server, BOB)

        def post_text(who: httpx.Client, size: int) -> httpx.Response:
            return who.post("/tokenize", json={"prompt": "a" * size})

        assert post_text(alice, 2000).status_code == 503  # there is no engine
        assert refused(post_text(alice, 2000), "bytes of bodies")
        chunks = (b" " * 100 for _ in range(20))  # nobody said how long it is
        assert refused(alice.post("/tokenize", content=chunks, headers={"Content-Type": "application/json"}), "bytes")
        too_long = post_text(alice, 4000)
        assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "quota_exceeded")
        assert [alice.post("/no/such/path").status_code for _ in range(2)] == [404, 404]
        assert refused(post_text(alice, 1), "6 requests")
        assert alice.get("/v1/models").status_code == 200, "who only looks uses nothing"
        assert {post_text(bob, 2000).status_code for _ in range(9)} == {503}


def test_a_quota_of_tokens(tiny: Path, tmp_path: Path) -> None:
    """Those of prompts before they are queued, those of answers when they have ended; lines of batches too."""
    with Running(tiny, keys=quota(tmp_path, tokens=60)) as server:
        alice, bob = client(server, ALICE), client(server, BOB)
        ids = [5] * 10
        made = alice.completions.create(model="tiny", prompt=ids, max_tokens=20, extra_body={"ignore_eos": True})
        assert made.usage is not None
        assert made.usage.total_tokens == 30
        with pytest.raises(openai.BadRequestError, match="send less"):
            alice.completions.create(model="tiny", prompt=[5] * 61, max_tokens=1)
        with pytest.raises(openai.RateLimitError, match="has used 30"):
            alice.completions.create(model="tiny", prompt=[5] * 31, max_tokens=1)
        with pytest.raises(openai.RateLimitError):
            alice.embeddings.create(model="tiny", input=[[5] * 10] * 4)
        alice.completions.create(model="tiny", prompt=ids, max_tokens=25, extra_body={"ignore_eos": True})
        with pytest.raises(openai.RateLimitError):
            alice.completions.create(model="tiny", prompt=ids, max_tokens=1)
        batch = start(alice, lines([{"model": "tiny", "prompt": "a", "max_tokens": 2}]))
        other = start(bob, lines([{"model": "tiny", "prompt": "a", "max_tokens": 2}]))
        assert end(bob, other.id).status == "completed"
        waiting = alice.batches.retrieve(batch.id)
        assert (waiting.status, waiting.request_counts.completed) == ("in_progress", 0)  # type: ignore[union-attr]


def test_a_priority_floor(tmp_path: Path) -> None:
    def of(own: int | None, given: int | None) -> int | None:
        PRINCIPAL.set(Principal(priority=own))
        return priority_of(given, Limits())

    def contexts() -> None:
        assert [of(None, None), of(None, 0), of(5, None), of(5, 7), of(-5, None), of(-5, -5)] == [None, 0, 5, 7, None, -5]
        for own, given in ((None, -1), (5, 4), (-5, -6)):
            with pytest.raises(ApiError, match="priority must be"):
                of(own, given)

    contextvars.copy_context().run(contexts)
