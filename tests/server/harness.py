"""A server in a thread of the test; its engine runs in a process of its own, as in production."""

import asyncio
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2 as httpx
import openai

from headrace.server.engines.async_llm import AsyncLLM, LoadError
from headrace.server.engines.models import Models
from headrace.server.serving import Server, listen, run, single_model
from headrace.server.settings import Limits, ServerSettings

T = TypeVar("T")
PATIENCE = 300.0  # seconds until a test gives up; no result depends on it
PATIENT = Limits(body_seconds=PATIENCE, header_seconds=PATIENCE, send_seconds=PATIENCE)  # of a server that waits as long
NEVER = 3600.0  # seconds without a sign of life that are no reason to end an engine: a test may have stopped it
LOOK = 0.01  # seconds between two looks
ROOT = Path(__file__).parents[2]
ENDLESS: dict[str, Any] = {"max_tokens": 90_000, "extra_body": {"ignore_eos": True}}  # of a model with room for it
ENGINE: dict[str, Any] = {"threads": 1, "device": "cpu", "backend": "native"}  # what is shipped, and starts soonest
TORCH: dict[str, Any] = {"threads": 1, "device": "cpu", "backend": "torch", "dtype": "float64"}


class Running:
    """A server on a free port, started by `with`. Without `begin` there is no engine: for what is refused before it."""

    def __init__(self, model: Path | str, *, begin: bool = True, wait: bool = True, **more: Any) -> None:
        names = ServerSettings.__dataclass_fields__
        settings = {name: more.pop(name) for name in list(more) if name in names}
        self.settings = ServerSettings(**{"model_name": "tiny", "port": 0, "limits": PATIENT, **settings})
        llm = AsyncLLM(model, **{"stuck_after": NEVER, **ENGINE, **more})
        if not begin:
            llm.begin = lambda: None  # type: ignore[method-assign]
            llm.ready = asyncio.Event().wait  # type: ignore[method-assign,assignment]
        self._make(single_model(llm, self.settings), begin and wait)

    @classmethod
    def of(cls, models: Models, settings: ServerSettings) -> Self:
        """A server of these models."""
        made = cls.__new__(cls)
        made.settings = settings
        made._make(models, True)
        return made

    def _make(self, models: Models, wait: bool) -> None:
        self._wait = wait
        self.models = models
        self.llm = models.services[0].llm
        self.sock: socket.socket = listen(self.settings)
        self.port: int = self.sock.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.server = Server(models)
        self.error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="server", daemon=True)

    def __enter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.settings.key}"} if self.settings.key else {}
        self.http = httpx.Client(base_url=self.base, timeout=PATIENCE, headers=headers, trust_env=False)
        key = self.settings.key or "none"
        plain = httpx.Client(timeout=PATIENCE, trust_env=False)
        self.openai = openai.OpenAI(base_url=f"{self.base}/v1", api_key=key, max_retries=0, http_client=plain)
        self._thread.start()
        until(lambda: self.server.started or self.error is not None)
        if self._wait:
            until(lambda: self.health()["status"] == "ready" or self.error is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.openai.close()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)
        self.join()

    def drain(self) -> None:
        """What the first SIGTERM does."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.server.stop)

    def join(self) -> None:
        """Wait until it has ended by itself."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _stop(self) -> None:
        self.server.force_exit = True
        self.server.should_exit = True

    def _main(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await run(self.server, self.sock, lambda line: None)

        try:
            asyncio.run(main())
        except LoadError as error:
            self.error = error

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/health").json()
        return found

    def figure(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"headrace:{name}{{"))

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **more: Any) -> Any:
        """One greedy completion, by the openai client."""
        return self.openai.completions.create(
            **{"model": "tiny", "prompt": "The mill", "temperature": 0, "max_tokens": 8, **more}
        )

    def caught_up(self) -> None:
        """Return when all that the engine has said is taken in; it is `paused`, and says no more."""
        process: Any = self.llm.replica._process

        def nothing_left() -> bool:
            unread = select.select([process._writer.get_extra_info("socket")], [], [], 0)[0]
            return process._reader._waiter is not None and not unread

        until(lambda: self.on_loop(nothing_left))

    def on_loop(self, work: Callable[[], T]) -> T:
        """What `work` returns on the server's event loop."""
        assert self._loop is not None

        async def call() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While entered, the server's event loop does nothing: what clients do meanwhile is there at once when it goes on."""
        go_on, held = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(PATIENCE)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(hold)
        assert held.wait(PATIENCE)
        try:
            yield
        finally:
            go_on.set()

    def paused(self) -> "Paused":
        """While entered, the engine process does nothing."""
        return self.paused_of(None)

    def paused_of(self, name: str | None) -> "Paused":
        """The same of a model by name."""
        pid = self.models.find(name).llm.pid
        assert pid is not None
        return Paused(pid)


class Paused:
    """SIGSTOP now, SIGCONT at the end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __enter__(self) -> Self:
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
            os.kill(self.pid, signal.SIGCONT)


def next_match(process: "subprocess.Popen[str]", pattern: str) -> "re.Match[str]":
    """The next line of a process's stderr that matches."""
    assert process.stderr is not None
    for text in process.stderr:
        if found := re.search(pattern, text):
            return found
    raise AssertionError(f"{pattern} was not said; exit code {process.wait()}")


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come: so many looks, as a machine that stood still has not given it the time."""
    for _ in range(int(PATIENCE / LOOK)):
        if condition():
            return
        time.sleep(LOOK)
    raise AssertionError("what was waited for did not come")


def in_thread(work: Callable[[], Any]) -> "Promise":
    return Promise(work)


class Promise:
    """Work in a thread, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._value: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except Exception as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._value
