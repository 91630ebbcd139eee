"""Pooling: what an embedding is made of, from the hidden rows of a feed."""

from collections.abc import Iterator

import numpy as np

from headrace.data.plan import Feed, Pool, StepPlan, Where


def pools(plan: StepPlan) -> Iterator[tuple[int, int, slice, Pool]]:
    """Of each feed that something is pooled from: its number, which of its wants, which rows of the step, and the want."""
    row = 0
    for number, feed in enumerate(plan.feeds):
        for at, want in enumerate(feed.wants):
            if isinstance(want, Pool):
                rows = pooled_rows(feed, want)
                yield number, at, slice(row + rows.start, row + rows.stop), want
        row += feed.count + len(feed.nodes)


def pooled_rows(feed: Feed, want: Pool) -> range:
    """The rows of a feed that a want to pool sums: its first, its last known one, or all from KV index `want.start` on."""
    if want.at is Where.FIRST:
        return range(1)
    if want.at is Where.LAST:
        return range(feed.count - 1, feed.count)
    return range(min(max(want.start - feed.start, 0), feed.count), feed.count)


def add_rows(before: tuple[float, ...], rows: np.ndarray) -> tuple[float, ...]:
    """The sum of rows [r, width] in float64, one after the other from `before` (empty: nothing) on.

    A chunk continues the sum of the last, so how a text is cut into chunks leaves every bit.
    """
    total = np.array(before, np.float64) if before else np.zeros(rows.shape[1])
    for row in rows:
        total += row
    return tuple(total.tolist())
