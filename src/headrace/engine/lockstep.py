"""One engine for callers in any thread: they run its steps one at a time, and each receives the deltas of its own requests."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from headrace.data.explicit import PlainPrompt
from headrace.data.outputs import RequestOutput, empty_output
from headrace.data.params import SamplingParams
from headrace.data.types import Delta
from headrace.decoding.base import Strategy
from headrace.decoding.constraint_check import check_outputs
from headrace.decoding.processors import Processor
from headrace.engine.call_order import FairLock
from headrace.engine.engine import Engine
from headrace.engine.signals import Uninterrupted

Inbox = deque[Delta]  # deltas of one caller's requests, whichever thread ran the step
Unchecked = tuple[RequestOutput, Inbox, Delta]  # an output, and its last delta, not added to it yet


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
    ) -> list[RequestOutput]:
        """Queue all prompts, or none if one is refused. Equal beginnings are queued next to each other, so that the prefix
        cache hits.

        inbox: receives the deltas of each step. Raises ClosedError, AdmissionError.
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
                    if params.seed is None and self._seeds is not None:
                        params = params.replace(seed=self._seeds.getrandbits(64))
                    request = self.engine.add(encoded[at], params, processors=processors, strategy=strategy)
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
