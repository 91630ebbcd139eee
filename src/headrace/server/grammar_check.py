"""The server's side of grammar_worker.py: constraints are looked at where they can be stopped, not on the event loop."""

import asyncio
import contextlib
import json
import sys
from typing import Any, TypeVar

import msgspec

from headrace.data.structured import MAX_SOURCE, ConstraintError, StructuredOutputs
from headrace.decoding.json_schema.prepare import Prepared
from headrace.text.template_process import worker_environment

MODULE = "headrace.server.grammar_worker"
SECONDS = 2.0  # CPU time of one question
PATIENCE = 180.0  # seconds of the clock, on a busy machine
MEMORY = 2 << 30  # bytes of address space
REMEMBERED = 256  # answers of a kind
K = TypeVar("K")
V = TypeVar("V")


class GrammarCheck:
    """One process for all questions, one at a time; started at the first, and again after it was ended."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._known: dict[StructuredOutputs, tuple[str, ...]] = {}
        self._prepared: dict[str, list[Prepared]] = {}  # by the schemas' JSON

    async def late(self, spec: StructuredOutputs) -> tuple[str, ...]:
        """The keywords that only a finished text can be checked against. Raises ConstraintError for what cannot be served."""
        if spec not in self._known:
            found = await self._ask({"spec": msgspec.to_builtins(spec)})
            _keep(self._known, spec, tuple(found["late"]))
        return self._known[spec]

    async def prepared(self, schemas: list[dict[str, Any]]) -> list[Prepared]:
        """JSON schemas, together no longer than one may be, in a mask's words. Raises ConstraintError."""
        try:
            text = json.dumps(schemas)
        except RecursionError:
            raise ConstraintError("the JSON schemas are nested too deeply; flatten them") from None
        if len(text) > MAX_SOURCE:
            raise ConstraintError(f"the JSON schemas have {len(text)} characters and {MAX_SOURCE} is the most; say less")
        if (known := self._prepared.get(text)) is not None:
            return known
        found = await self._ask({"schemas": schemas})
        return _keep(self._prepared, text, [Prepared(one["schema"], tuple(one["late"])) for one in found["prepared"]])

    async def broken(self, spec: StructuredOutputs, text: str) -> str:
        """Why a finished text does not fit; empty where it does. Raises ConstraintError where that takes too much."""
        return str((await self._ask({"spec": msgspec.to_builtins(spec), "text": text}))["broken"])

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps({**question, "seconds": SECONDS}).encode() + b"\n"
        async with self._turn:
            try:
                reply = await asyncio.wait_for(self._exchange(line), PATIENCE)
            except TimeoutError:
                reply = b""
            except BaseException:  # also where the client has gone: an answer still on its way is nobody's
                self.close()
                raise
        if not reply.endswith(b"\n"):
            self.close()
            raise ConstraintError("the constraint takes too much time or memory to be looked at; make it smaller")
        answer: dict[str, Any] = json.loads(reply)
        if "error" in answer:
            raise ConstraintError(answer["error"])
        return answer

    async def _exchange(self, line: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            self._process = await self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(line)
            await process.stdin.drain()
        try:
            return await process.stdout.readline()
        except ValueError:  # it is longer than any answer may be
            return b""

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-B", "-m", MODULE, str(MEMORY)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=worker_environment(),
            start_new_session=True,
            limit=1 << 20,
        )


def _keep(answers: dict[K, V], question: K, answer: V) -> V:
    """Remember an answer, in place of the oldest where there are many."""
    while len(answers) >= REMEMBERED:
        del answers[next(iter(answers))]
    answers[question] = answer
    return answer
