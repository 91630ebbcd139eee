"""What becomes of sequences: their children and their ends."""

from collections.abc import Iterator

from headrace.data.types import Child, Delta, Request, Sequence
from headrace.decoding.stopping import Stopping
from headrace.engine.outbox import Outbox
from headrace.engine.scheduler import Scheduler


class Children:
    """Tokens appended, drafts settled, forks made, outputs ended. `ids`: of new sequences."""

    def __init__(self, scheduler: Scheduler, stopping: Stopping, vocab_size: int, ids: Iterator[int]) -> None:
        self.scheduler = scheduler
        self.stopping = stopping
        self.vocab_size = vocab_size
        self._ids = ids

    def become(self, request: Request, parent: Sequence, children: list[Child], outbox: Outbox) -> list[Sequence]:
        """Let a sequence become its children; returns those that go on. What they stream goes to `outbox`."""
        draft, length = parent.decode.draft, len(parent.tokens)
        survivors: list[Sequence] = []
        for child in children:
            seq = parent if len(children) == 1 else parent.fork(next(self._ids))
            self._grow(request, parent, seq, child, outbox)
            if seq.decode.constraint is not None and self._failed(request, seq):
                continue
            if draft is not None and seq is parent:
                self._settle(request, parent, length, child.path)
            (survivors if seq.text.finish_reason is None else request.finished).append(seq)
        return survivors

    def _failed(self, request: Request, seq: Sequence) -> bool:
        """Whether a sequence's grammar has failed and it is dropped; where nothing may be dropped, the request has failed."""
        if not seq.decode.constraint.error:
            return False
        if request.strategy.drops_failed:
            request.dropped = seq.decode.constraint.error
        else:
            request.error, request.constraint_failed = seq.decode.constraint.error, True
        return request.strategy.drops_failed

    def _grow(self, request: Request, parent: Sequence, seq: Sequence, child: Child, outbox: Outbox) -> None:
        """Give `seq` what its child brings, up to where the output ends."""
        decode = seq.decode
        if child.index is not None and child.index != decode.index:
            if request.strategy.streams and not 0 <= child.index < request.params.n:
                raise ValueError(f"the strategy gave a child index {child.index}, and n is {request.params.n}")
            decode.index = child.index
        if child.token is not None and not 0 <= child.token < self.vocab_size:
            raise ValueError(f"the strategy chose token {child.token}, and the vocabulary ends at {self.vocab_size - 1}")
        decode.score, decode.state = child.score, child.state
        draft, tokens = parent.decode.draft, [] if child.token is None else [child.token]
        if draft is not None:
            tokens = [draft.tokens[node] for node in child.path] + tokens
        delta = self.stopping.extend(request, seq, tokens, child.logprobs)
        if parent.decode.exited is not None:
            delta.exits = (parent.decode.exited,) * len(delta.token_ids)
        if draft is not None and not draft.required:
            delta.drafter, delta.drafted = draft.drafter, len(draft.tokens)
            delta.accepted = min(len(child.path), len(delta.token_ids))
        if not request.strategy.streams:
            seq.text.shown += delta.text
        elif tokens or delta.finish_reason is not None:  # a step may only bring a draft nearer
            outbox.append(delta)

    def _settle(self, request: Request, seq: Sequence, length: int, path: tuple[int, ...]) -> None:
        """The draft below `length` known tokens was verified: its path is kept."""
        draft, seq.decode.draft = seq.decode.draft, None
        assert draft is not None
        if seq.text.finish_reason is None:
            self.scheduler.accept(seq, length, tuple(path))
        if not draft.required:
            request.metrics.accept(min(len(path), len(seq.tokens) - length))

    def results(self, request: Request) -> list[Delta]:
        """The outputs of a request that does not stream; where there is none, it has failed."""
        ranked = request.strategy.results(request)
        if len(ranked) > request.params.n:
            raise ValueError(f"the strategy gave {len(ranked)} outputs, and n is {request.params.n}")
        if not ranked:
            request.error = request.dropped or "nothing that may come is long enough; lower min_tokens"
            request.constraint_failed = bool(request.dropped)
        return [result(request, seq, score, at) for at, (seq, score) in enumerate(ranked)]

    def close(self, request: Request, seq: Sequence, reason: str) -> Delta:
        """End an output where it stands."""
        seq.text.finish_reason = reason
        request.finished.append(seq)
        return Delta(
            request.id,
            seq.decode.index,
            text=self.stopping.rest(seq),
            finish_reason=reason,
            error=request.error,
            constraint_failed=request.constraint_failed,
        )


def result(request: Request, seq: Sequence, score: float, at: int) -> Delta:
    """A whole output at once."""
    return Delta(
        request.id,
        at,
        token_ids=seq.output,
        text=seq.text.shown,
        logprobs=tuple(seq.text.logprobs),
        finish_reason=seq.text.finish_reason,
        stop_reason=seq.text.stop_reason,
        cumulative_logprob=seq.decode.score,
        score=score,
    )
