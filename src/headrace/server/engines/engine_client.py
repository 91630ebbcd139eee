"""The web process's side of one engine process: started, talked to, ended."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

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

MODULE = "headrace.server.engines.engine_process"
SECRETS = ("HEADRACE_API_KEY",)  # what the engine process has no use for
PATIENCE = 10.0  # seconds for an orderly end


class EngineGoneError(Exception):
    """The engine process has ended, or talks nonsense; the text says how."""


class EngineConnection:
    """One engine process. `start` returns when it runs; its first message is Loaded or NotLoaded."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: "subprocess.Popen[bytes]") -> None:
        self._reader = reader
        self._writer = writer
        self._process = process

    @classmethod
    async def start(cls, load: Load) -> "EngineConnection":
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())]
        try:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the web process, also while this one still imports what it needs
            )
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
        """Queue a message; what a process that has gone does not read is lost, and `receive` tells."""
        self._writer.write(frame(message))

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineGoneError."""
        try:
            prefix = await self._reader.readexactly(PREFIX.size)
            return read_from_engine(await self._reader.readexactly(frame_length(prefix)))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineGoneError(f"the engine process ended ({await self._how_it_ended()})") from None
        except FrameError as error:
            raise EngineGoneError(f"the engine process sent what is no message ({error})") from None

    async def stop(self) -> None:
        """An orderly end: the socket closes, and the process follows; it is killed when it does not."""
        self._close()
        if not await self._ended_within(PATIENCE):
            await self.kill()

    async def kill(self) -> None:
        """End the process whatever it is doing."""
        self._close()
        self._process.kill()
        await self._ended_within(PATIENCE)

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()

    async def _how_it_ended(self) -> str:
        if not await self._ended_within(PATIENCE):
            return "its connection closed, the process did not"
        code: Any = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _ended_within(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._process.poll() is None:
            if loop.time() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True
