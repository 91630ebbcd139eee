"""The web process's end of one engine process: start, messages, end."""

import asyncio
import contextlib
import os
import socket
import subprocess

from headrace.parallel.processes import ending, start_module
from headrace.server.engines.messages import (
    PREFIX,
    FrameError,
    FromEngine,
    Load,
    ToEngine,
    frame,
    frame_length,
    read_from_engine,
)
from headrace.server.engines.supervision import Event

MODULE = "headrace.server.engines.engine_process"
PATIENCE = 10.0  # seconds until an engine process that should end is killed


class EngineGoneError(Exception):
    """The engine process is lost; the text tells how. event: CUT if no request can be the cause."""

    def __init__(self, reason: str, event: Event = Event.GONE) -> None:
        super().__init__(reason)
        self.event = event


class EngineConnection:
    """One engine process and its socket. Its first message is Loaded or NotLoaded."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: "subprocess.Popen[bytes]") -> None:
        self._reader = reader
        self._writer = writer
        self._process = process

    @classmethod
    async def start(cls, load: Load) -> "EngineConnection":
        ours, theirs = socket.socketpair()
        try:
            shared = [] if load.weights is None else [load.weights]
            process = start_module(MODULE, [theirs.fileno(), os.getpid()], [theirs.fileno(), *shared])
        except OSError as error:
            ours.close()
            raise EngineGoneError(f"the engine process cannot be started ({error.strerror or error})") from None
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        engine = cls(reader, writer, process)
        engine.send(load)
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message. It is lost if the process has ended; `receive` then raises."""
        self._writer.write(frame(message))

    async def receive(self) -> FromEngine:
        """Return the next message. Raises EngineGoneError."""
        try:
            prefix = await self._reader.readexactly(PREFIX.size)
            return read_from_engine(await self._reader.readexactly(frame_length(prefix)))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineGoneError(f"the engine process ended ({await self._how_it_ended()})") from None
        except FrameError as error:
            raise EngineGoneError(f"the engine process sent an invalid message ({error})") from None

    async def stop(self) -> None:
        """Close the socket, on which the process ends; kill it if it does not within PATIENCE."""
        self._close()
        if not await self._ended_within(PATIENCE):
            await self.kill()

    async def kill(self) -> None:
        """Kill the process."""
        self._close()
        self._process.kill()
        await self._ended_within(PATIENCE)

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()

    async def _how_it_ended(self) -> str:
        if not await self._ended_within(PATIENCE):
            return "its connection closed, the process did not"
        return ending(self._process.returncode)

    async def _ended_within(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._process.poll() is None:
            if loop.time() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True
