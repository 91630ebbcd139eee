"""Pooling: what an embedding is made of, from the hidden rows of a feed."""

from collections.abc import Iterator

import numpy as np

from headrace.data.plan import Feed, StepPlan, Want


def pools(plan: StepPlan) -> Iterator[tuple[int, slice, Want]]:
    """Of each feed that something is pooled from: its number, which rows of the step, and the want."""
    row = 0
    for number, feed in enumerate(plan.feeds):
        for want in feed.wants:
            if want.kind == "pool":
                rows = pooled_rows(feed, want)
                yield number, slice(row + rows.start, row + rows.stop), want
        row += feed.count + len(feed.nodes)


def pooled_rows(feed: Feed, want: Want) -> range:
    """The rows of a feed that a want to pool sums: its first, its last known one, or all from KV index `want.k` on."""
    if want.rows == "first":
        return range(1)
    if want.rows == "last":
        return range(feed.count - 1, feed.count)
    return range(min(max(want.k - feed.start, 0), feed.count), feed.count)


def add_rows(before: tuple[float, ...], rows: np.ndarray) -> tuple[float, ...]:
    """The sum of rows [r, width] in float64, one after the other from `before` (empty: nothing) on.

    A chunk continues the sum of the last, so how a text is cut into chunks leaves every bit.
    """
    total = np.array(before, np.float64) if before else np.zeros(rows.shape[1])
    for row in rows:
        total += row
    return tuple(total.tolist())
