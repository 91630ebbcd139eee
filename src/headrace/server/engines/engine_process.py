"""The engine process: it owns one LLM and exchanges messages with the web process.

The web process starts `python -m headrace.server.engines.engine_process FD PARENT` with one end of a socket pair. The engine
process ends when the socket closes. Where the system supports it (Linux), the kernel also ends it when its parent ends.

Grammars are compiled in threads next to its loop; their requests enter the engine afterwards.
"""

import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from headrace import host
from headrace.data.params import ParamError
from headrace.data.plan import RankLostError
from headrace.data.settings import ModelSettings
from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.data.types import Delta, Request
from headrace.decoding.base import Strategy
from headrace.decoding.constrained import Constraint, Grammars
from headrace.decoding.prompts import Aligning, Classifying, Pooling
from headrace.engine.engine import AdmissionError
from headrace.engine.scheduler import Scheduler
from headrace.llm import LLM
from headrace.server.engines.kv_peers import PeerPort, open_peer_port
from headrace.server.engines.messages import (
    PREFIX,
    Abort,
    Check,
    Checked,
    Deltas,
    FromEngine,
    Load,
    Loaded,
    NotLoaded,
    PeerStats,
    Refused,
    Stats,
    StoreStats,
    Submit,
    ToEngine,
    frame,
    frame_length,
    read_to_engine,
)
from headrace.startup import thresholds
from headrace.startup.bits import bits_digest, portable_bits
from headrace.startup.kv_store import summary
from headrace.weights import hub

log = logging.getLogger("headrace.engine")

BELL_BYTES = 4096  # rings that one read takes
POLL = 0.002  # seconds between two looks at running compilations
CHEAP_SECONDS = 0.05  # CPU time of a cheap grammar
CHEAP_THREADS, COSTLY_THREADS = 2, 1
# A compilation stops a compute thread, and so the step of all of them. While requests run, the next costly grammar starts this
# many times the CPU time of the last one after its start. (A thread of low priority would stop the engine for longer: it needs
# the interpreter's lock, and gets no processor while it holds it.)
COSTLY_PERIOD = 20.0
LARGE = 1 << 20  # bytes of a compiled grammar that counts as large
MOST_LARGE = 256 << 20  # bytes of all large grammars of open requests

Compilation = tuple[Submit, "Future[Constraint]"]


class Channel:
    """The engine's end of the socket pair, blocking. Methods raise EOFError if the web process has ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.bell: int | None = None  # descriptor that ends `waiting` early

    def receive(self) -> ToEngine:
        return read_to_engine(self._exactly(frame_length(self._exactly(PREFIX.size))))

    def waiting(self, seconds: float) -> bool:
        """Wait up to `seconds` for data, or until the bell rings; returns whether there is data."""
        sock = self._sock.fileno()
        files = [sock] if self.bell is None else [sock, self.bell]
        readable = select.select(files, [], [], seconds)[0]
        if self.bell is not None and self.bell in readable:
            os.read(self.bell, BELL_BYTES)
        return sock in readable

    def send(self, message: FromEngine) -> None:
        try:
            self._sock.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._sock.recv(count - len(parts))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


class EngineLoop:
    """Main loop: reads messages, runs one step, sends one message. An idle engine sends one every `beat` seconds."""

    def __init__(self, llm: LLM, channel: Channel, beat: float) -> None:
        self.engine = llm.engine
        self.channel = channel
        self.beat = beat
        self._open: dict[str, Request] = {}
        self._unscored: set[str] = set()  # requests with prompt log-probs to send
        self.compiling = None if llm.engine.grammars is None else GrammarQueue(llm.engine.grammars)

    def run(self) -> None:
        """Run until the web process ends (EOFError)."""
        while True:
            while self.channel.waiting(0.0 if self.engine.busy else POLL if self.compiling else self.beat):
                self._take(self.channel.receive())
            self._compiled()
            self.channel.send(self._step() if self.engine.busy else Deltas(stats=self._stats(fed=0)))

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Abort):
            if self.compiling is not None:
                self.compiling.end(message.request_id)
            self.engine.abort(message.request_id)
        elif isinstance(message, Submit) and message.params.structured_outputs is not None and self.compiling is not None:
            # This process neither rewrites schemas nor compiles grammars of unknown cost.
            if message.grammar is None:
                self.channel.send(Refused(message.request_id, "the constraint was not compiled in a confined process"))
                return
            self.compiling.add(message)
        elif isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Check):
            self.channel.send(Checked(self._problem()))

    def _problem(self) -> str:
        """Return the first problem of the engine's own check, or of requests that are held after their end; empty if none."""
        try:
            self.engine.check()
        except AssertionError as error:
            return " ".join(str(error).split()) or "an assertion failed"
        return "" if self.engine.busy or not self._open else f"{len(self._open)} requests are open and nothing runs"

    def _compiled(self) -> None:
        """Submit the requests whose grammar is compiled, and refuse those whose grammar cannot be."""
        for message, compiled in self.compiling.take(self.engine.busy) if self.compiling is not None else ():
            if (error := compiled.exception()) is None:
                self._submit(message, compiled.result())
            else:
                self._drop(message.request_id, _message(error))

    def _drop(self, request_id: str, reason: str, field: str = "structured_outputs") -> None:
        """Refuse a request that did not enter the engine."""
        if self.compiling is not None:
            self.compiling.end(request_id)
        self.channel.send(Refused(request_id, reason, field))

    def _submit(self, message: Submit, constraint: Constraint | None = None) -> None:
        try:
            strategy: Strategy | None = Pooling(message.pool) if message.pool else None
            if message.rule is not None:
                strategy = Classifying(*message.rule)
            if message.align is not None:
                strategy = Aligning(message.align, message.prompt[-1])
            request = self.engine.add(
                message.prompt,
                message.params,
                request_id=message.request_id,
                salt=message.salt,
                strategy=strategy,
                constraint=constraint,
                source=message.source,
                turn=message.turn,
                seed=message.seed,
                given=message.given,
            )
        except (AdmissionError, ParamError) as error:
            self._drop(message.request_id, str(error), error.field)
            return
        kv = request.seqs[0].kv
        kv.peer, kv.peer_tokens = message.peer, message.peer_tokens
        self._open[request.id] = request
        if request.params.prompt_logprobs is not None:
            self._unscored.add(request.id)

    def _step(self) -> Deltas:
        deltas = self.engine.step()
        scores = {name: self._open[name].prompt_logprobs for name in self._scored(deltas)}
        ended = {delta.request_id: self._open.pop(delta.request_id) for delta in deltas if delta.finished}
        for name in ended:
            if self.compiling is not None:
                self.compiling.end(name)
            self._unscored.discard(name)
        return Deltas(
            deltas,
            {name: request.metrics for name, request in ended.items()},
            scores,
            self._stats(self.engine.fed),
            {name: request.pooled for name, request in ended.items() if request.pooled},
            {name: request.classified for name, request in ended.items() if request.classified},
        )

    def _scored(self, deltas: list[Delta]) -> list[str]:
        """Return the requests with a first delta whose prompt log-probs must be sent now."""
        names = list(dict.fromkeys(delta.request_id for delta in deltas if delta.request_id in self._unscored))
        self._unscored.difference_update(names)
        return names

    def _stats(self, fed: int) -> Stats:
        scheduler = self.engine.scheduler
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_used=self.engine.blocks.used,
            preemptions=scheduler.preemptions,
            fed=fed,
            failing=self.engine.failing,
            store=_store_stats(scheduler),
            peers=_peer_stats(scheduler),
        )


def _store_stats(scheduler: Scheduler) -> StoreStats | None:
    if (store := scheduler.store) is None:
        return None
    store.release()
    if store.folder is None:
        return None
    return StoreStats(*(getattr(store.counts, name) for name in StoreStats.__struct_fields__))


def _peer_stats(scheduler: Scheduler) -> PeerStats | None:
    port = None if scheduler.store is None else scheduler.store.peers
    return port.counts.stats() if isinstance(port, PeerPort) else None


def _message(error: BaseException) -> str:
    """Return the message for a grammar that cannot be compiled, without the text of unexpected errors."""
    if isinstance(error, ConstraintError):
        return str(error)
    log.error("a grammar could not be compiled", exc_info=error)
    return "the constraint could not be compiled; make it smaller"


def _calibrated(llm: LLM) -> thresholds.CalibratedThreshold | None:
    """The newest calibrated threshold of the model's exits or of its cascade; None if there is none. Raises ValueError."""
    cascade = llm.settings.cascade
    smaller = None if cascade is None else hub.resolve(str(cascade), download=False)
    return next(iter(thresholds.load_for(llm.opened, llm.settings, smaller)), None)


def _bits(llm: LLM, files: str) -> str:
    """The digest of the model's bits. files: digest of its files, if engines of other hosts are compared."""
    numbers = f"{llm.backend} {llm.dtype}"
    return portable_bits(files, llm.settings, numbers) if files else bits_digest(llm.opened.path, llm.settings, numbers)


def load(message: Load, channel: Channel) -> LLM | None:
    """Open the model and send Loaded; or send NotLoaded and return None."""
    try:
        llm = LLM.from_settings(message.model, ModelSettings(**message.settings), shared_weights=message.weights)
        rule = _calibrated(llm)
        bits = _bits(llm, message.files) if llm.exactness == "bitwise" else ""
        port = None if message.peers is None else open_peer_port(message.peers, llm, bits)
    except (ValueError, TypeError, OSError, MemoryError, RuntimeError) as error:
        log.debug("loading failed", exc_info=True)
        channel.send(NotLoaded(" ".join(str(error).split()) or type(error).__name__))
        return None
    config = llm.engine.config
    numbers = llm.opened.settings_summary(llm.settings)
    channel.send(
        Loaded(
            max_model_len=config.scheduler.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            vocab_size=llm.model_config.vocab_size,
            num_blocks=config.cache.num_blocks,
            block_size=config.cache.block_size,
            note=f"{llm.dtype} on {llm.device} ({llm.backend}, {llm.exactness}), {llm.memory_plan.summary}{numbers}"
            + ("" if rule is None else f"; calibrated: {rule.summary()}")
            + ("" if (store := llm.engine.scheduler.store) is None or store.folder is None else f"; {summary(store)}"),
            memory=host.anonymous_memory() + llm.memory_plan.bytes,
            exit=0 if llm.runner.leaving is None else llm.runner.leaving.depth,
            layers=llm.model_config.num_layers,
            rule=rule,
            bits=bits,
            peer_port=0 if port is None else port.address.port,
        )
    )
    if port is not None:
        channel.bell = port.bell
    return llm


def main(fd: int, parent: int) -> int:
    """Serve one web process over the socket with this descriptor; returns the exit code."""
    host.end_with(parent)
    # A service manager signals all processes; the web process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    return serve(Channel(socket.socket(fileno=fd)))


def serve(channel: Channel) -> int:
    """Load the model of the first message and run it until the web process ends; returns the exit code."""
    try:
        message = channel.receive()
        if not isinstance(message, Load):
            return 1
        logging.getLogger("headrace").setLevel(message.log_level)
        if message.replica:
            logging.basicConfig(format=f"%(levelname)s %(name)s: replica {message.replica}: %(message)s", force=True)
        if message.processors:
            host.run_on(message.processors)  # before the engine has threads
        llm = load(message, channel)
        if llm is None:
            return 1
        EngineLoop(llm, channel, message.beat).run()
    except EOFError:
        return 0
    except RankLostError as error:
        log.error("%s; the engine ends", error)
        return 1
    return 0


class GrammarQueue:
    """Grammars of one engine's requests. Only grammars with a known cost come here; each takes about a second of CPU time at
    most. The request with the smallest `turn` starts first. Grammars above `CHEAP_SECONDS` are compiled one by one, with pauses
    while the engine is busy. A large grammar waits while those of open requests fill `MOST_LARGE`."""

    def __init__(self, grammars: Grammars, clock: Callable[[], float] = time.monotonic) -> None:
        self._grammars = grammars
        self._clock = clock
        self._next_costly = 0.0  # when the next costly grammar may start
        self._cheap = ThreadPoolExecutor(CHEAP_THREADS, "grammars")
        self._costly = ThreadPoolExecutor(COSTLY_THREADS, "costly grammars")
        self._waiting: list[Submit] = []
        self._running: dict[str, Compilation] = {}  # by request id
        self._dropped: list[Compilation] = []  # still running though their request was dropped
        self._large: dict[str, tuple[StructuredOutputs, int]] = {}  # large grammars of open requests

    def __bool__(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, message: Submit) -> None:
        """Queue a request with structured outputs and their grammar."""
        self._waiting.append(message)

    def end(self, request_id: str) -> None:
        """Forget a request, whether it waits, compiles or has been taken. A compilation that runs is left to end."""
        self._waiting = [one for one in self._waiting if one.request_id != request_id]
        self._large.pop(request_id, None)
        if (running := self._running.pop(request_id, None)) is not None and not running[1].cancel():
            self._dropped.append(running)

    def take(self, busy: bool = False) -> list[Compilation]:
        """Remove and return the requests whose grammar is compiled or has failed; start others. `busy`: the engine has
        requests."""
        done = [one for one in self._running.values() if one[1].done()]
        for message, _ in done:
            del self._running[message.request_id]
        self._dropped = [one for one in self._dropped if not one[1].done()]
        for message in sorted(self._waiting, key=lambda one: one.turn):
            if (known := self._remembered(message)) is not None:
                done.append((message, known))
            elif self._may_start(message, busy):
                assert message.grammar is not None
                spec, grammar = _spec(message), message.grammar
                threads = self._costly if _is_costly(message) else self._cheap
                if _is_costly(message):
                    self._next_costly = self._clock() + COSTLY_PERIOD * grammar.seconds
                compiling = threads.submit(self._grammars.constraint, spec, grammar.text, grammar.bytes)
                self._running[message.request_id] = (message, compiling)
            else:
                continue
            self._waiting.remove(message)
            if message.grammar is not None and message.grammar.bytes > LARGE:
                self._large[message.request_id] = (_spec(message), message.grammar.bytes)
        return done

    def close(self) -> None:
        """Wait for the threads to end."""
        for threads in (self._cheap, self._costly):
            threads.shutdown(cancel_futures=True)

    def _remembered(self, message: Submit) -> "Future[Constraint] | None":
        known = self._grammars.find(_spec(message))
        if known is None:
            return None
        future: Future[Constraint] = Future()
        future.set_result(known)
        return future

    def _may_start(self, message: Submit, busy: bool) -> bool:
        """Return whether a thread is free for this grammar, there is memory for it, and a costly one is due."""
        costly = _is_costly(message)
        if costly and busy and self._clock() < self._next_costly:
            return False
        working = sum(_is_costly(other) == costly for other, _ in [*self._running.values(), *self._dropped])
        if working >= (COSTLY_THREADS if costly else CHEAP_THREADS):
            return False
        spec, size = _spec(message), message.grammar.bytes if message.grammar is not None else 0
        if any(_spec(other) == spec for other, _ in self._running.values()):
            return False  # it will be remembered in a moment
        held = dict(self._large.values())
        return size <= LARGE or not held or sum(held.values()) + size <= MOST_LARGE


def _is_costly(message: Submit) -> bool:
    return message.grammar is not None and message.grammar.seconds > CHEAP_SECONDS


def _spec(message: Submit) -> StructuredOutputs:
    spec = message.params.structured_outputs
    assert spec is not None
    return spec


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
