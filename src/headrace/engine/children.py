"""Small work of the loop: sequences copied, results and scores put where they belong."""

from headrace.data.plan import Feed, FeedOutput, Want
from headrace.data.types import Delta, Request, Sequence


def clone(parent: Sequence, seq_id: int) -> Sequence:
    """A sequence with the parent's tokens and text, and no blocks yet."""
    return Sequence(
        id=seq_id,
        index=parent.index,
        tokens=list(parent.tokens),
        prompt_len=parent.prompt_len,
        salt=parent.salt,
        groups=parent.groups,
        text=parent.text.copy() if parent.text is not None else None,
        stops=parent.stops.copy() if parent.stops is not None else None,
        shown=parent.shown,
        constraint=parent.constraint.copy() if parent.constraint is not None else None,
    )


def result(request: Request, seq: Sequence, score: float, at: int) -> Delta:
    """A whole output at once."""
    return Delta(
        request.id,
        at,
        token_ids=seq.output,
        text=seq.shown,
        logprobs=tuple(seq.logprobs),
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        cumulative_logprob=seq.score,
        score=score,
    )


def pool_wants(request: Request, last: bool) -> tuple[Want, ...]:
    """A mean takes every row once, chunk by chunk; each chunk, also after a preemption, goes on where the sum was."""
    if request.pool == "mean":
        return (Want(rows="all", kind="pool", k=request.pooled_until, before=tuple(request.pooled)),)
    return (Want(rows=request.pool, kind="pool"),) if last else ()


def file_pooled(request: Request, feed: Feed, rows: tuple[float, ...]) -> None:
    request.pooled[:] = rows
    request.pooled_until = max(request.pooled_until, feed.start + feed.count)


def file_scores(request: Request, start: int, out: FeedOutput) -> None:
    """Row p scored token p + 1; the first token of a prompt has no score."""
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    for at, score in enumerate(out.scores, start + 1):
        if at == len(request.prompt_logprobs) and at < len(request.prompt):
            request.prompt_logprobs.append(score)
