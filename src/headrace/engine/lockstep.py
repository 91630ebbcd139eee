"""One engine for callers in any thread: they run its steps one at a time, and each receives the deltas of its own requests."""

# `_signal` has the functions of `signal` without conversions to enums, which would take 50 µs of each step.
import _signal  # type: ignore[import-not-found]
import contextlib
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from headrace.data.explicit import PlainPrompt
from headrace.data.outputs import RequestOutput, empty_output
from headrace.data.params import SamplingParams
from headrace.data.plan import Align
from headrace.data.sources import Source
from headrace.data.types import Delta
from headrace.decoding.base import Strategy
from headrace.decoding.constraint_check import check_outputs
from headrace.decoding.processors import Processor
from headrace.decoding.prompts import Aligning
from headrace.engine.engine import Engine

Inbox = deque[Delta]  # deltas of one caller's requests, whichever thread ran the step
Unchecked = tuple[RequestOutput, Inbox, Delta]  # an output, and its last delta, not added to it yet
# Signals for which programs install handlers. The interpreter cannot catch SIGKILL and SIGSTOP, and faults such as SIGSEGV
# must not wait.
NAMES = (
    *("SIGINT", "SIGALRM", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGXCPU"),
    *("SIGCHLD", "SIGCONT", "SIGIO", "SIGURG", "SIGWINCH", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGBREAK"),
)
DEFERRED = tuple(int(getattr(signal, name)) for name in NAMES if hasattr(signal, name))

Handler = Callable[[int, FrameType | None], Any]


class ClosedError(RuntimeError):
    """The engine was closed: it takes no more requests."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed; open the model again with LLM(…)")


class Lockstep:
    """The open requests of an engine, and the inbox that receives the deltas of each; owned by an LLM.

    encode: turns text prompts into tokens. seed: of the generator that gives seeds to requests without one.
    """

    _open: dict[str, tuple[RequestOutput, Inbox]]

    def __init__(self, engine: Engine, encode: Callable[[str], list[int]], seed: int | None) -> None:
        self.engine = engine
        self._encode = encode
        self._lock, self._seeds, self._open = FairLock(), random.Random(seed) if seed is not None else None, {}
        self._unread: Inbox = deque(maxlen=0)  # of callers of `step`, who read the output instead
        self._unchecked: list[Unchecked] = []
        self.closed = False
        self.adapter = ""  # of requests that name none

    @property
    def open(self) -> int:
        """Number of requests whose outputs are not complete."""
        return len(self._open)

    def step(self) -> list[RequestOutput]:
        """Run one engine step; returns the outputs that ended in it. Raises ClosedError."""
        with self._lock:
            ended = self._step()
            unchecked = self._take_unchecked(self._unread)
        return ended + [self._check(*one) for one in unchecked]

    def close(self) -> None:
        """Release the model between two steps. Open requests of other threads end with ClosedError. A second call does
        nothing."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self.engine.scheduler.close()
                self.engine.executor.close()

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self.closed:
            raise ClosedError

    def _step(self) -> list[RequestOutput]:
        self.check_open()
        ended = []
        with Uninterrupted():
            for delta in self.engine.step():
                if delta.request_id not in self._open:
                    continue
                output, inbox = self._open[delta.request_id]
                if delta.finished and delta.error is None and output.structured is not None:
                    self._unchecked.append((output, inbox, delta))
                    continue
                output.add(delta)
                inbox.append(delta)
                if output.finished:
                    del self._open[delta.request_id]
                    ended.append(output)
        return ended

    def _take_unchecked(self, inbox: Inbox) -> list[Unchecked]:
        """Remove and return the ended outputs of one caller whose constraint must be checked. The caller checks them without
        the lock, so that other threads go on."""
        own = [one for one in self._unchecked if one[1] is inbox]
        self._unchecked = [one for one in self._unchecked if one[1] is not inbox]
        return own

    def _check(self, output: RequestOutput, inbox: Inbox, last: Delta) -> RequestOutput:
        """Complete an output and check it against its constraint, which may take seconds."""
        output.add(last)
        try:
            check_outputs(output)
        except BaseException:  # Ctrl-C
            output.error = "the output was not checked against its constraint: interrupted"
            raise
        finally:
            inbox.append(last)
            with self._lock:
                self._open.pop(output.request_id, None)
        return output

    def add_all(
        self,
        prompts: Sequence[PlainPrompt],
        settings: Sequence[SamplingParams],
        processors: tuple[Processor, ...],
        strategy: Strategy | None,
        inbox: Inbox | None = None,
        source: Source | None = None,
        align: Align | None = None,
    ) -> list[RequestOutput]:
        """Queue all prompts, or none if one is refused. Equal beginnings are queued next to each other, so that the prefix
        cache hits.

        inbox: receives the deltas of each step. source: of an encoder-decoder that reads sound, the same for all prompts.
        align: instead of a strategy, align the prompts with their source; the last token of each ends its text.
        Raises ClosedError, AdmissionError.
        """
        self.check_open()
        encoded = [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        outputs: dict[int, RequestOutput] = {}
        # Uninterrupted: a signal must not leave a request in the engine that is not recorded here.
        with self._lock, Uninterrupted():
            # Another thread may have closed the engine meanwhile.
            self.check_open()
            try:
                for at in sorted(range(len(encoded)), key=lambda at: encoded[at]):
                    params = settings[at]
                    if self.adapter and not params.adapter:
                        params = params.replace(adapter=self.adapter)
                    if params.seed is None and self._seeds is not None:
                        params = params.replace(seed=self._seeds.getrandbits(64))
                    if align is not None:
                        strategy = Aligning(align, encoded[at][-1])
                    request = self.engine.add(encoded[at], params, processors=processors, strategy=strategy, source=source)
                    outputs[at] = empty_output(request, texts[at])
                    self._open[request.id] = (outputs[at], self._unread if inbox is None else inbox)
            except BaseException:
                for output in outputs.values():
                    self.engine.abort(output.request_id)
                raise
        return [outputs[at] for at in range(len(prompts))]

    def drain(self, outputs: list[RequestOutput], inbox: Inbox, cancelled: Callable[[], bool] | None = None) -> Iterator[Delta]:
        """Step the engine until these requests are done. Closing the generator aborts the unfinished ones."""
        unfinished = deque(outputs)
        try:
            while True:
                while inbox:
                    yield inbox.popleft()
                if cancelled is not None and cancelled():
                    self.abort(inbox)
                # Other threads' steps bring deltas too, so finished outputs are looked for before each step.
                with self._lock:
                    unchecked = self._take_unchecked(inbox)
                    while unfinished and unfinished[0].finished:
                        unfinished.popleft()
                    if unfinished and not inbox and not unchecked:
                        if not self.engine.busy:
                            raise RuntimeError(
                                f"the engine has lost request {unfinished[0].request_id}: please report this fault"
                            )
                        self._step()
                    elif not unfinished and not inbox:
                        return
                for one in unchecked:
                    self._check(*one)
        finally:
            if unfinished:
                self.abort(inbox)

    def abort(self, inbox: Inbox) -> None:
        """End the open requests of the caller with this inbox, and deliver their last deltas. Signals wait until it is done: a
        second Ctrl-C must not leave a request in the engine."""
        with self._lock, Uninterrupted():
            names = [name for name, (_, box) in self._open.items() if box is inbox]
            try:
                for name in names if not self.closed else ():
                    self.engine.abort(name)
                # A submitted step lands first, and each call lands one.
                for _ in range(self.engine.executor.depth if not self.closed else 0):
                    if any(name in self._open for name in names):
                        self._step()
            finally:
                for output, _, last in self._take_unchecked(inbox):
                    output.add(last)
                    inbox.append(last)
                    del self._open[output.request_id]
                    for one in output.outputs:
                        one.finish_reason = "abort" if one.finish_reason == "stop" else one.finish_reason
                for output, _ in [self._open.pop(name) for name in names if name in self._open]:
                    output.add(Delta(output.request_id, 0, finish_reason="abort", finished=True))


class FairLock:
    """First in, first out, unlike `threading.Lock`: a thread that asks again does not overtake one that waits. Not
    reentrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # released by the thread that holds the lock
        except BaseException:  # Ctrl-C
            with self._guard:
                handed = turn not in self._waiting
                if not handed:
                    self._waiting.remove(turn)
            if handed:
                self._hand_on()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


class Uninterrupted:
    """While open, Python's signal handlers wait. They run when it closes, and their exceptions reach the caller.

    An exception raised by a handler inside a step would look like an error of the step: it would fail the requests and not
    reach the caller. Handlers run in the main thread, so in any other thread this does nothing.
    """

    def __init__(self) -> None:
        self._pending: dict[int, FrameType | None] = {}  # by signal number, in order of arrival
        self._before: dict[int, Handler] = {}

    def __enter__(self) -> "Uninterrupted":
        if threading.current_thread() is threading.main_thread():
            for number in DEFERRED:
                handler = _signal.getsignal(number)
                # Entries nest (a step inside an abort): the outer one delivers.
                if callable(handler) and getattr(handler, "__func__", None) is not Uninterrupted._note:
                    self._before[number] = handler
                    _signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            _signal.signal(number, handler)
        if self._pending:
            # ExitStack: every handler runs, also if an earlier one raises.
            with contextlib.ExitStack() as stack:
                for number, frame in reversed(self._pending.items()):
                    stack.callback(self._before[number], number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending.setdefault(number, frame)
