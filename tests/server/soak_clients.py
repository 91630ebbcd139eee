"""Clients of the soak test: `python -m tests.server.soak_clients SPEC` does to a server, for a while, what clients do.

SPEC is JSON: port, model, seconds, least (exchanges to be begun, however long that takes), all (whether the first round has
every mistake and attack), seed, pause (mean seconds of a client between two exchanges), jobs with what they must give, and
writers: fields of requests that are left in the middle. The report is JSON on stdout: how often each thing was done (once at
least), which statuses came, and what was wrong.
"""

import asyncio
import collections
import json
import random
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from benchmarks.attacks import attacks

T = TypeVar("T")
WORKERS = 10
BIG = 5 << 20  # bytes: above the limit on bodies
PATIENCE = 300  # seconds for one exchange
FINE = {200}
BUSY = {429, 503}  # allowed of anything, with Retry-After

# class of mistake: body, statuses that may come
BAD: dict[str, tuple[bytes, set[int]]] = {
    "no json": (b"{", {400}),
    "no object": (b"[]", {400}),
    "not utf-8": (b'{"model": "\xff"}', {400}),
    "nested": (b"[" * 5000, {400}),
    "nan": (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', {400}),
}
FIELDS: list[dict[str, Any]] = [
    {"n": 10**9}, {"n": 0}, {"max_tokens": -1}, {"max_tokens": 10**40}, {"temperature": "hot"}, {"temperature": 1e9},
    {"top_p": -0.1}, {"logit_bias": {"a": 1}}, {"logit_bias": {"999999999": 1}}, {"stop": ["a"] * 99}, {"seed": 2**70},
    {"no_such_field": 1}, {"prompt": ""}, {"prompt": []}, {"prompt": [10**9]}, {"prompt": ["a"] * 999},
    {"model": "other"}, {"logprobs": 10**6}, {"stream": "yes"},
    {"best_of": 10**9}, {"prompt": "a " * 100_000}, {"suffix": "x"}, {"stop_token_ids": [10**9]},
]  # fmt: skip


class Clients:
    """Everything that is done, counted."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.rng = random.Random(spec["seed"])
        self.done: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.end = time.monotonic() + spec["seconds"]
        self.begun = 0
        self.fields, self.mistakes = self._in_turn(FIELDS), self._in_turn(list(BAD))
        self.jobs = self._in_turn(spec["jobs"])
        self.attacks = attacks()
        self.attacked = self._in_turn(list(self.attacks))
        self.todo = self._kinds()

    async def run(self) -> dict[str, Any]:
        await asyncio.gather(self._watch_health(), *(self._worker() for _ in range(WORKERS)))
        return {"done": self.done, "statuses": self.statuses, "wrong": self.wrong[:20]}

    @property
    def over(self) -> bool:
        """Whether enough was done, of time and of work."""
        return time.monotonic() >= self.end and self.begun >= self.spec["least"]

    def _kinds(self) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        """What to do next: everything in ever new orders, until the time is over; in the first round every mistake, too, since
        what one makes the server keep for good (a long prompt, tens of MiB) is no growth later."""
        answers, leaving = [self.same, self.same, self.streamed, self.chat], [self.leave, self.disconnect_midway, self.slow]
        kinds = [*answers, *leaving, self.bad, self.bad_field, self.too_big, self.odd_path, self.small]
        kinds.append(self.attack)
        first = self.spec.get("all", True)
        round_ = [*kinds, *[self.bad] * len(BAD), *[self.bad_field] * 2 * len(FIELDS), *[self.attack] * len(self.attacks)]
        round_ = round_ if first else kinds
        while first or not self.over:
            for kind in self.rng.sample(round_, len(round_)):
                if first or not self.over:
                    self.begun += 1
                    yield kind
            first, round_ = False, kinds

    def _in_turn(self, what: list[T]) -> Iterator[T]:
        """One after the other, in ever new orders."""
        while True:
            yield from self.rng.sample(what, len(what))

    async def _worker(self) -> None:
        for kind in self.todo:
            try:
                await patiently(kind())
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")
            self.done[kind.__name__] += 1
            await asyncio.sleep(2 * self.spec["pause"] * self.rng.random())

    async def _watch_health(self) -> None:
        while not self.done["health"] or not self.over:
            status, _, body = await self.request("GET", "/health")
            if status != 200 or json.loads(body)["status"] != "ready":
                self.wrong.append(f"health: {status} {body!r}")
            self.done["health"] += 1
            await asyncio.sleep(0.25)

    # -- what clients do ------------------------------------------------------------------------------------------------
    async def same(self) -> None:
        """A whole answer, which must be the offline one."""
        job = next(self.jobs)
        status, _, body = await self.post(job["path"], job["body"])
        if status == 200:
            self.done[job["kind"]] += 1
            if (said := answer_text(json.loads(body))) != job["says"]:
                self.wrong.append(f"another answer: {said!r}, not {job['says']!r} ({job['kind']})")
        self.expect("same", status, FINE)

    async def streamed(self) -> None:
        """The same answers in pieces."""
        job = self.rng.choice([one for one in self.spec["jobs"] if one["path"] == "/v1/completions"])
        status, _, body = await self.post(job["path"], {**job["body"], "stream": True})
        if status == 200:
            lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
            text = "".join(json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")
            if text != job["says"] or lines[-1] != "[DONE]":
                self.wrong.append(f"another stream: {text!r}, not {job['says']!r} ({job['kind']})")
        self.expect("streamed", status, FINE)

    async def chat(self) -> None:
        more = self.rng.choice([{}, {"n": 3}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["e"]}, {"stream": True}])
        words = " ".join(self.rng.choices(["mill", "stream", "stone", "wheel"], k=self.rng.randint(1, 40)))
        body = {
            "model": self.spec["model"],
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self.rng.randint(1, 40),
        }
        status, _, _ = await self.post("/v1/chat/completions", {**body, **more, "seed": self.rng.randrange(1000)})
        self.expect("chat", status, FINE)

    async def leave(self) -> None:
        """Go in the middle of a stream."""
        body = {"prompt": "The mill", "max_tokens": 150, "ignore_eos": True, "stream": True, **self.writer()}
        reader, writer = await self.open("POST", "/v1/completions", json.dumps(body).encode())
        await reader.read(self.rng.randint(1, 2000))
        self.close(writer)

    async def disconnect_midway(self) -> None:
        """Go in the middle of the request, or before a whole answer."""
        body = json.dumps({"prompt": "The mill", "max_tokens": 100, **self.writer()}).encode()
        _, writer = await self.open("POST", "/v1/completions", body, cut=self.rng.choice([1, 20, len(body)]))
        await asyncio.sleep(self.rng.random() * 0.1)
        self.close(writer)

    async def slow(self) -> None:
        """Read a stream slowly, with a small window."""
        body = {"prompt": "The mill", "max_tokens": 60, "ignore_eos": True, "stream": True, "logprobs": 5, **self.writer()}
        reader, writer = await self.open("POST", "/v1/completions", json.dumps(body).encode(), window=4096)
        for _ in range(self.rng.randint(5, 30)):
            if not await reader.read(256):
                break
            await asyncio.sleep(0.02)
        self.close(writer)

    async def bad(self) -> None:
        name = next(self.mistakes)
        body, statuses = BAD[name]
        status, _, _ = await self.request(
            "POST", self.rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"]), body
        )
        self.expect(name, status, statuses)

    async def bad_field(self) -> None:
        field = next(self.fields)
        status, _, _ = await self.post(
            "/v1/completions", {"model": self.spec["model"], "prompt": "a", "max_tokens": 2, **field}
        )
        self.expect(str(list(field)), status, {400, 404})

    async def attack(self) -> None:
        """What is to cost much, and does not."""
        name = next(self.attacked)
        one = self.attacks[name]
        body = one.raw or one.body.replace(b"MODEL", self.spec["model"].encode())
        headers = one.headers.decode() + ("Transfer-Encoding: chunked\r\n" if one.raw else "")
        given = body if one.method == "POST" else None
        status, _, _ = await self.request(one.method, one.path, given, headers=headers, plain=bool(one.raw))
        self.expect(name, status, set(one.statuses))

    async def too_big(self) -> None:
        """A body above the limit, announced and not. Who goes on sending is cut off, and may lose the answer by that."""
        announced = f"Content-Length: {BIG * 100}\r\n"
        body, headers = (b" " * BIG, "") if self.rng.random() < 0.5 else (b"", announced)
        try:
            status, _, _ = await self.request("POST", "/v1/completions", body, headers=headers, plain=bool(headers))
            self.expect("too big", status, {413})
        except (ConnectionResetError, BrokenPipeError):
            self.statuses["too big: cut off"] += 1

    async def odd_path(self) -> None:
        long = "/" + "a" * 2000
        asked = ["GET /../../etc/passwd", "DELETE /v1/models", "GET /page/x", "PATCH /", f"GET {long}", "GET /v1/models/other"]
        method, path = self.rng.choice(asked).split()
        status, _, _ = await self.request(method, path)
        self.expect(f"{method} {path[:30]}", status, {404, 405, 415})

    async def small(self) -> None:
        status, _, _ = await self.request("GET", self.rng.choice(["/metrics", "/v1/models", "/", "/page/main.js"]))
        self.expect("get", status, FINE)
        status, _, _ = await self.post("/page/render", {"text": "# a\n" + "*b* " * self.rng.randint(0, 500)})
        self.expect("render", status, FINE)
        status, _, _ = await self.post("/tokenize", {"prompt": "The mill stands " * self.rng.randint(1, 50)})
        self.expect("tokenize", status, FINE)

    # -- how ------------------------------------------------------------------------------------------------------------
    def writer(self) -> dict[str, Any]:
        """Who is asked for what will be left, and how."""
        found: dict[str, Any] = self.rng.choice(self.spec["writers"])
        return found

    def expect(self, what: str, status: int, statuses: set[int]) -> None:
        self.statuses[f"{what}: {status}"] += 1
        if status not in statuses | BUSY:
            self.wrong.append(f"{what}: {status}")

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
        return await self.request("POST", path, json.dumps(body).encode())

    async def request(self, method: str, path: str, body: bytes | None = None, **more: Any) -> tuple[int, str, bytes]:
        """Status, head and body of the answer."""
        reader, writer = await self.open(method, path, body, **more)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            data = await reader.read()
        finally:
            self.close(writer)
        status = int(head.split()[1])
        if status in BUSY and "retry-after:" not in head:
            self.wrong.append(f"{path}: {status} without Retry-After")
        return status, head, unchunked(data) if "chunked" in head else data

    async def open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: str = "",
        plain: bool = False,
        window: int = 0,
        cut: int | None = None,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request, or the first `cut` bytes of its body."""
        sock = socket.socket()
        if window:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.spec["port"]))
        reader, writer = await asyncio.open_connection(sock=sock, limit=window or 1 << 20)
        if body is not None:
            headers += "Content-Type: application/json\r\n" + ("" if plain else f"Content-Length: {len(body)}\r\n")
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n".encode())
        writer.write((body or b"")[:cut])
        return reader, writer

    @staticmethod
    def close(writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def answer_text(answer: dict[str, Any]) -> Any:
    """The text of an answer; of classes each label and after how many layers it was said."""
    if "choices" in answer:
        return answer["choices"][0]["text"]
    return [[one["label"], one["layers"]] for one in answer["data"]]


async def patiently(work: Coroutine[Any, Any, None]) -> None:
    """Raises TimeoutError when the work has not ended after PATIENCE looks; a machine that slept costs one of them."""
    task = asyncio.ensure_future(work)
    for _ in range(PATIENCE):
        if (await asyncio.wait({task}, timeout=1.0))[0]:
            return task.result()
    task.cancel()
    raise TimeoutError


def unchunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(parts)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(Clients(json.loads(sys.argv[1])).run())))
