"""Callers of one engine, from any thread: which request belongs to which caller, and who runs the next step."""

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

Inbox = deque[Delta]  # the deltas of one caller's requests, from steps of its own thread or of another
Unchecked = tuple[RequestOutput, Inbox, Delta]  # an output, and its last delta, which the output does not contain yet


class ClosedError(RuntimeError):
    """The engine was closed: it takes no more requests."""

    def __init__(self) -> None:
        super().__init__("this LLM is closed; open the model again with LLM(…)")


class Lockstep:
    """The open requests of an engine, and in whose inbox what becomes of them goes. `encode`: prompts that are texts; `seed`:
    from it come the seeds of requests that have none."""

    _open: dict[str, tuple[RequestOutput, Inbox]]

    def __init__(self, engine: Engine, encode: Callable[[str], list[int]], seed: int | None) -> None:
        self.engine = engine
        self._encode = encode
        self._turns, self._seeds, self._open = FairLock(), random.Random(seed) if seed is not None else None, {}
        self._unread: Inbox = deque(maxlen=0)  # of requests whose caller calls `step` and reads the output
        self._unchecked: list[Unchecked] = []
        self.closed = False

    @property
    def open(self) -> int:
        """Requests whose outputs are not complete."""
        return len(self._open)

    def step(self) -> list[RequestOutput]:
        """Run one engine step for everything queued; returns the outputs that ended in it. Raises ClosedError."""
        with self._turns:
            ended = self._step()
            unchecked = self._take_unchecked(self._unread)
        return ended + [self._check(*one) for one in unchecked]

    def close(self) -> None:
        """Release the model between two steps. A second call does nothing; open requests of other threads end with
        ClosedError."""
        with self._turns:
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
                    continue  # its caller has gone
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
        """Ended outputs of one caller that have to be checked; the caller does so outside the turn, so that others go on."""
        found = [one for one in self._unchecked if one[1] is inbox]
        self._unchecked = [one for one in self._unchecked if one[1] is not inbox]
        return found

    def _check(self, output: RequestOutput, inbox: Inbox, last: Delta) -> RequestOutput:
        """Complete an output and check it against its constraint; a check may take seconds."""
        output.add(last)
        try:
            check_outputs(output)
        except BaseException:  # Ctrl-C
            output.error = "the output was not checked against its constraint: interrupted"
            raise
        finally:
            inbox.append(last)
            with self._turns:
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
        """Queue every prompt or none; equal beginnings come next to each other, so that the prefix cache hits. `inbox`
        receives the deltas of each step. Raises ClosedError, AdmissionError."""
        self.check_open()
        encoded = [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        outputs: dict[int, RequestOutput] = {}
        with self._turns, Uninterrupted():  # no request is queued that is not known here
            self.check_open()  # another thread may have closed it while this one waited for its turn
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
        """Step the engine until these requests are done; leaving early aborts what is left."""
        left = deque(outputs)
        try:
            while True:
                while inbox:
                    yield inbox.popleft()
                if cancelled is not None and cancelled():
                    self.abort(inbox)
                with self._turns:  # other threads' steps bring something, too: what has ended is looked at between steps
                    unchecked = self._take_unchecked(inbox)
                    while left and left[0].finished:
                        left.popleft()
                    if left and not inbox and not unchecked:
                        if not self.engine.busy:
                            raise RuntimeError(f"the engine has lost request {left[0].request_id}: please report this fault")
                        self._step()
                    elif not left and not inbox:
                        return
                for one in unchecked:
                    self._check(*one)
        finally:
            if left:
                self.abort(inbox)

    def abort(self, inbox: Inbox) -> None:
        """End the open requests of the caller with this inbox, and deliver their last deltas. Signals wait until it is done:
        a second Ctrl-C must not leave a request in the engine."""
        with self._turns, Uninterrupted():
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
