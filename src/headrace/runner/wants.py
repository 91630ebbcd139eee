"""What every back end does alike with wants: which rows of a step they name, and sums of hidden rows."""

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.data.plan import Align, Classify, Feed, Logits, Pool, Ranked, Sample, Score, Top, Where

NOTHING_MAY_COME = "no token can come: the grammar rules out every one"
BROKEN_LOGITS = "the model's logits are broken: no token has a probability; check the weights"


def logit_rows(feed: Feed) -> int:
    """How many of a feed's last rows need logits."""
    wants = [want for want in feed.wants if not isinstance(want, Pool | Classify | Align)]  # which read other rows
    if not wants:
        return 0
    return (feed.count if any(isinstance(want, Score) for want in wants) else min(feed.count, 1)) + len(feed.nodes)


def named_rows(feed: Feed, want: Sample | Top | Logits) -> range:
    """The rows that a want names: -1 for the last known token, 0 and up for the nodes."""
    first = 0 if want.at is Where.NODES else -1
    return range(first, 0 if want.at is Where.LAST else len(feed.nodes))


def pools(feeds: Sequence[Feed]) -> Iterator[tuple[int, int, slice, Pool]]:
    """Yields each Pool want of a step: the feed's number, the want's number, its rows of the step, and the want."""
    row = 0
    for number, feed in enumerate(feeds):
        for at, want in enumerate(feed.wants):
            if isinstance(want, Pool):
                rows = pooled_rows(feed, want)
                yield number, at, slice(row + rows.start, row + rows.stop), want
        row += feed.count + len(feed.nodes)


def pooled_rows(feed: Feed, want: Pool) -> range:
    """The rows of a feed that a Pool want sums: the first, the last known one, or all from KV index `want.start` on."""
    if want.at is Where.FIRST:
        return range(1)
    if want.at is Where.LAST:
        return range(feed.count - 1, feed.count)
    return range(min(max(want.start - feed.start, 0), feed.count), feed.count)


def add_rows(before: tuple[float, ...], rows: np.ndarray) -> tuple[float, ...]:
    """The sum of rows [r, width] in float64, added one by one to `before` (empty: zeros). So the result does not depend on how
    a text is cut into chunks."""
    total = np.array(before, np.float64) if before else np.zeros(rows.shape[1])
    for row in rows:
        total += row
    return tuple(total.tolist())


def append_live(ranked: Ranked, ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Append the best tokens that end no output to the best tokens, without repeating any."""
    listed = set(ranked.ids)
    more = [at for at, token in enumerate(ids) if token not in listed]
    ranked.ids += tuple(ids[at] for at in more)
    ranked.logprobs += tuple(logprobs[at] for at in more)
