"""`headrace rank`: runs a stage of a pipeline for an engine on another host."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from headrace import __version__, host
from headrace.backends.memory import gib
from headrace.backends.native.offer import stage_bytes
from headrace.data.config import ModelConfig
from headrace.parallel.hosts.address import Address
from headrace.parallel.hosts.link import Link, LinkError, Listener
from headrace.parallel.pipeline.link import Start
from headrace.parallel.pipeline.remote import Begin, Pipe, Refused, RowPipe, decode, encode, exchange, row_memory
from headrace.parallel.processes import start_module
from headrace.weights.source import WeightSource

log = logging.getLogger("headrace.engine")

MODULE = "headrace.parallel.pipeline.stage"
BEGINS_WITHIN = 5.0  # seconds for the first message of an engine
MOST_ROWS = 1 << 31  # bytes of rows in memory


def stage_needs(config: ModelConfig, source: WeightSource) -> Callable[[Start], int]:
    """Bytes of weights and K/V of a stage of this model, as a function of its first message."""
    return lambda start: stage_bytes(config, source, start.settings, range(start.first, start.last))


class RankPort:
    """A listening process that starts a stage for the engine that connects; one at a time.

    model: path of the files; files: their digest. threads: of the stage, 0 for one per core. needs: bytes of a stage's weights
    and K/V.
    """

    def __init__(
        self, model: Path, files: str, key: bytes, threads: int, needs: Callable[[Start], int] = lambda start: 0
    ) -> None:
        self.model, self.files, self.threads, self.needs = model, files, threads, needs
        self.listener = Listener(key, self._serve, lambda peer, why: log.warning("refused a connection: %s %s", peer, why))
        self._engine = ""  # address of the engine that is connected

    async def run(self, address: Address, say: Callable[[str], None], stopped: asyncio.Event) -> None:
        """Serve until `stopped` is set. Raises ValueError if the address is in use."""
        say(f"{self.model.name}: a stage for a pipeline on {await self.listener.start(address)}")
        try:
            await stopped.wait()
        finally:
            await self.listener.close()

    async def _serve(self, link: Link) -> None:
        try:
            async with asyncio.timeout(BEGINS_WITHIN):
                begin = decode(await link.receive())
            problem = self._problem(begin)
            if problem or not isinstance(begin, Begin):
                log.warning("refused the engine %s: %s", link.peer, problem)
                link.send(encode(Refused(problem)))
                await link.flush()
                return
            self._engine = link.peer
            try:
                await self._run(link, begin)
            finally:
                self._engine = ""
        except TimeoutError:
            log.warning("the engine %s sent no first message", link.peer)
        except LinkError as error:
            log.info("the engine %s %s", link.peer, error)
        except EOFError:
            log.error("the stage's process ended")

    def _problem(self, begin: object) -> str:
        """Why a stage is not started; empty if it is."""
        if not isinstance(begin, Begin):
            return "the first message must be Begin"
        if begin.version != __version__:
            return f"runs Headrace {__version__} and the engine {begin.version}; install the same version on both hosts"
        if begin.files != self.files:
            return f"has other files of the model {self.model.name} than the engine; copy the same files to both hosts"
        if self._engine:
            return f"runs a stage for the engine {self._engine} already"
        start = begin.start
        if min(start.depth, start.slot, begin.width) < 1 or 4 * start.depth * start.slot * begin.width > MOST_ROWS:
            return f"refuses {start.depth} steps of {start.slot} rows of {begin.width} numbers"
        try:
            need, free = self.needs(start), host.free_memory()
        except ValueError as error:
            return f"cannot load the stage: {error}"
        if need > free * 0.95:
            layers = f"layers {start.first} to {start.last - 1}"
            return f"needs {gib(need)} for weights and K/V of {layers} and {gib(free)} are free; give it fewer layers (stages)"
        return ""

    async def _run(self, link: Link, begin: Begin) -> None:
        """Start the stage's process and pass messages on until one end closes. Raises EOFError, LinkError."""
        start = begin.start
        settings = msgspec.structs.replace(start.settings, threads=self.threads)
        stage = msgspec.structs.replace(start, model=str(self.model), settings=settings)
        with ExitStack() as closing, ExitStack() as theirs:

            async def pipe() -> tuple[Pipe, int]:
                """A socket to the stage's process: our end, and the descriptor of its end."""
                ours, its = socket.socketpair()
                theirs.enter_context(its)
                end = await Pipe.open(ours)
                closing.callback(end.close)
                return end, its.fileno()

            async def rows() -> tuple[RowPipe, int, int]:
                end, its = await pipe()
                descriptor, slots = row_memory(start, begin.width)
                closing.callback(os.close, descriptor)
                return RowPipe(end, slots, begin.width), its, descriptor

            control, control_fd = await pipe()
            out, stage.out, stage.rows_out = await rows()
            descriptors, source = [control_fd, stage.out, stage.rows_out], None
            if start.first > 0:
                source, stage.source, stage.rows_in = await rows()
                descriptors += [stage.source, stage.rows_in]
            process = start_module(MODULE, [control_fd], descriptors)
            try:
                theirs.close()  # so that the sockets close with the process
                control.send(msgspec.msgpack.encode(stage))
                await exchange(link, control, out, source)
            finally:
                await end_group(process)


async def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and those that it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(process.wait)
