"""The engine process: it owns one LLM and exchanges messages with the web process.

The web process starts `python -m headrace.server.engines.engine_process FD PARENT` with one end of a socket pair. The engine
process ends when the socket closes. Where the system supports it (Linux), the kernel also ends it when its parent ends.
"""

import logging
import select
import signal
import socket
import sys

from headrace import host
from headrace.data.params import ParamError
from headrace.data.structured import ConstraintError
from headrace.data.types import Delta, Request
from headrace.decoding.base import Strategy
from headrace.decoding.constrained import Constraint
from headrace.decoding.prompts import Classifying, Pooling
from headrace.engine.engine import AdmissionError
from headrace.llm import LLM
from headrace.server.engines.grammar_queue import GrammarQueue
from headrace.server.engines.messages import (
    PREFIX,
    Abort,
    Check,
    Checked,
    Classified,
    Deltas,
    Ended,
    FromEngine,
    Load,
    Loaded,
    NotLoaded,
    Pooled,
    Refused,
    Scores,
    Stats,
    Submit,
    ToEngine,
    frame,
    frame_length,
    read_to_engine,
)
from headrace.startup import thresholds
from headrace.weights import hub

log = logging.getLogger("headrace.engine")

POLL = 0.002  # seconds between two looks at running compilations


class Channel:
    """The engine's end of the socket pair, blocking. Methods raise EOFError if the web process has ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive(self) -> ToEngine:
        return read_to_engine(self._exactly(frame_length(self._exactly(PREFIX.size))))

    def waiting(self, seconds: float) -> bool:
        """Wait up to `seconds` for data; returns whether there is some."""
        return bool(select.select([self._sock], [], [], seconds)[0])

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
            request = self.engine.add(
                message.prompt,
                message.params,
                request_id=message.request_id,
                salt=message.salt,
                strategy=strategy,
                constraint=constraint,
                turn=message.turn,
            )
        except (AdmissionError, ParamError) as error:
            self._drop(message.request_id, str(error), error.field)
            return
        self._open[request.id] = request
        if request.params.prompt_logprobs is not None:
            self._unscored.add(request.id)

    def _step(self) -> Deltas:
        deltas = self.engine.step()
        ended = [Ended(delta.request_id, self._open[delta.request_id].metrics) for delta in deltas if delta.finished]
        scores = [Scores(name, self._open[name].prompt_logprobs) for name in self._scored(deltas)]
        pooled = [Pooled(one.request_id, row) for one in ended if (row := self._open[one.request_id].pooled)]
        classified = [Classified(one.request_id, logits) for one in ended if (logits := self._open[one.request_id].classified)]
        for one in ended:
            del self._open[one.request_id]
            if self.compiling is not None:
                self.compiling.end(one.request_id)
            self._unscored.discard(one.request_id)
        return Deltas(deltas, ended, scores, self._stats(self.engine.fed), pooled, classified)

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
        )


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


def load(message: Load, channel: Channel) -> LLM | None:
    """Open the model and send Loaded; or send NotLoaded and return None."""
    try:
        llm = LLM(message.model, **message.settings)
        rule = _calibrated(llm)
    except (ValueError, TypeError, OSError, MemoryError, RuntimeError) as error:
        log.debug("loading failed", exc_info=True)
        channel.send(NotLoaded(" ".join(str(error).split()) or type(error).__name__))
        return None
    config = llm.engine.config
    rounding = llm.opened.rounding_summary(llm.settings.activations)
    channel.send(
        Loaded(
            max_model_len=config.scheduler.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            vocab_size=llm.model_config.vocab_size,
            num_blocks=config.cache.num_blocks,
            block_size=config.cache.block_size,
            note=f"{llm.dtype} on {llm.device} ({llm.backend}, {llm.exactness}), {llm.memory_plan.summary}{rounding}"
            + ("" if rule is None else f"; calibrated: {rule.summary()}"),
            memory=host.anonymous_memory() + llm.memory_plan.bytes,
            exit=0 if llm.runner.leaving is None else llm.runner.leaving.depth,
            layers=llm.model_config.num_layers,
            rule=rule,
        )
    )
    return llm


def main(fd: int, parent: int) -> int:
    """Serve one web process over the socket with this descriptor; returns the exit code."""
    host.end_with(parent)
    # A service manager signals all processes; the web process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
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
        llm = load(message, channel)
        if llm is None:
            return 1
        EngineLoop(llm, channel, message.beat).run()
    except EOFError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
