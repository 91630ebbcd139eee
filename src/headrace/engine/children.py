"""Applies a strategy's children to sequences: appended tokens, accepted drafts, forks, ended outputs. Collects the deltas."""

from collections.abc import Iterable, Iterator

from headrace.data.types import Child, Delta, Request, Sequence
from headrace.decoding.stopping import Stopping
from headrace.engine.scheduler import Scheduler


class Outbox:
    """The deltas of one or more steps, in order. The last delta of a request is found in constant time."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._last: dict[str, Delta] = {}

    def __len__(self) -> int:
        return len(self._deltas)

    def append(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._last[delta.request_id] = delta

    def extend(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self.append(delta)

    def last_of(self, request_id: str) -> Delta | None:
        """The last delta of a request in this outbox."""
        return self._last.get(request_id)

    def take(self) -> list[Delta]:
        """Remove and return all deltas."""
        deltas, self._deltas, self._last = self._deltas, [], {}
        return deltas


class Children:
    """Turns sequences into their children; owned by an engine. ids: numbers of new sequences."""

    def __init__(self, scheduler: Scheduler, stopping: Stopping, vocab_size: int, ids: Iterator[int]) -> None:
        self.scheduler = scheduler
        self.stopping = stopping
        self.vocab_size = vocab_size
        self._ids = ids

    def become(self, request: Request, parent: Sequence, children: list[Child], outbox: Outbox) -> list[Sequence]:
        """Apply the children of one sequence; returns the unfinished ones. Streamed deltas go to `outbox`."""
        draft, length = parent.decode.draft, len(parent.tokens)
        survivors: list[Sequence] = []
        for child in children:
            seq = parent if len(children) == 1 else parent.fork(next(self._ids))
            self._grow(request, parent, seq, child, outbox)
            if seq.decode.constraint is not None and self._drops_failed(request, seq):
                continue
            if draft is not None and seq is parent:
                self._accept_path(request, parent, length, child.path)
            (survivors if seq.text.finish_reason is None else request.finished).append(seq)
        return survivors

    def _drops_failed(self, request: Request, seq: Sequence) -> bool:
        """Handle a failed grammar: returns True if the strategy drops the sequence, otherwise fails the request."""
        if not seq.decode.constraint.error:
            return False
        if request.strategy.drops_failed:
            request.dropped = seq.decode.constraint.error
        else:
            request.error, request.constraint_failed = seq.decode.constraint.error, True
        return request.strategy.drops_failed

    def _grow(self, request: Request, parent: Sequence, seq: Sequence, child: Child, outbox: Outbox) -> None:
        """Append a child's accepted draft tokens and new token to `seq`, up to the end of the output."""
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
        elif tokens or delta.finish_reason is not None:
            outbox.append(delta)

    def _accept_path(self, request: Request, seq: Sequence, length: int, path: tuple[int, ...]) -> None:
        """Keep the K/V of the accepted path of a verified draft."""
        draft, seq.decode.draft = seq.decode.draft, None
        assert draft is not None
        if seq.text.finish_reason is None:
            self.scheduler.accept(seq, length, tuple(path))
        if not draft.required:
            request.metrics.accept(min(len(path), len(seq.tokens) - length))

    def results(self, request: Request) -> list[Delta]:
        """The outputs of a request that does not stream. Without any, the request has failed."""
        ranked = request.strategy.results(request)
        if len(ranked) > request.params.n:
            raise ValueError(f"the strategy gave {len(ranked)} outputs, and n is {request.params.n}")
        if not ranked:
            request.error = request.dropped or "nothing that may come is long enough; lower min_tokens"
            request.constraint_failed = bool(request.dropped)
        return [result(request, seq, score, at) for at, (seq, score) in enumerate(ranked)]

    def close(self, request: Request, seq: Sequence, reason: str) -> Delta:
        """End an output that is still open."""
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
    """The delta of a whole output."""
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
