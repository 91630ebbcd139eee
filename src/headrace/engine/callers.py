"""Callers of one engine, of any thread: whose request is whose, and who makes the next step."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from headrace.data.given import Prompt
from headrace.data.outputs import RequestOutput, empty_output
from headrace.data.params import SamplingParams
from headrace.data.types import Delta
from headrace.decoding.base import Strategy
from headrace.decoding.looking import look_again
from headrace.decoding.processors import Processor
from headrace.engine.engine import Engine
from headrace.engine.signals import Uninterrupted
from headrace.engine.turns import Turns

Inbox = deque[Delta]  # where a caller finds what steps, its own or another thread's, have brought it
Unchecked = tuple[RequestOutput, Inbox, Delta]  # an output, and its last delta, which the output does not contain yet


class Callers:
    """The open requests of an engine, and in whose inbox what becomes of them goes. `encode`: prompts that are texts; `seed`:
    from it come the seeds of requests that have none."""

    _open: dict[str, tuple[RequestOutput, Inbox]]

    def __init__(self, engine: Engine, encode: Callable[[str], list[int]], seed: int | None) -> None:
        self.engine = engine
        self._encode = encode
        self._turns, self._seeds, self._open = Turns(), random.Random(seed) if seed is not None else None, {}
        self._unread: Inbox = deque(maxlen=0)  # of requests whose caller calls `step` and reads the output
        self._unchecked: list[Unchecked] = []

    @property
    def open(self) -> int:
        """Requests whose outputs are not complete."""
        return len(self._open)

    def step(self) -> list[RequestOutput]:
        """One engine step for everything queued; the outputs that ended in it, none when there is nothing to do."""
        with self._turns:
            ended = self._step()
            unchecked = self._take_unchecked(self._unread)
        return ended + [self._check(*one) for one in unchecked]

    def close(self) -> None:
        """Let the engine's executor go, between steps."""
        with self._turns:
            self.engine.executor.close()

    def _step(self) -> list[RequestOutput]:
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
            look_again(output)
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
        prompts: Sequence[Prompt],
        settings: Sequence[SamplingParams],
        processors: tuple[Processor, ...],
        strategy: Strategy | None,
        inbox: Inbox | None = None,
    ) -> list[RequestOutput]:
        """Queue every prompt or none; equal beginnings come next to each other, so that the prefix cache hits. `inbox`:
        receives what each step adds to them."""
        encoded = [self._encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        outputs: dict[int, RequestOutput] = {}
        with self._turns, Uninterrupted():  # no request is queued that is not known here
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
        """End what is open of the caller with this inbox, and take in the last that the engine says of it."""
        with self._turns:
            names = [name for name, (_, box) in self._open.items() if box is inbox]
            for name in names:
                self.engine.abort(name)
            try:
                for _ in range(self.engine.executor.depth):  # a step that is under way lands first, and each call lands one
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
