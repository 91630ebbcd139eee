"""Pooling: what an embedding is made of, from the hidden rows of a feed."""

from collections.abc import Iterator

from headrace.types import Feed, StepPlan, Want


def pools(plan: StepPlan) -> Iterator[tuple[int, int, range]]:
    """Of each feed that something is pooled from: its number, its first row in the step, and which of its rows."""
    row = 0
    for number, feed in enumerate(plan.feeds):
        for want in feed.wants:
            if want.kind == "pool":
                yield number, row, pooled_rows(feed, want)
        row += feed.count + len(feed.nodes)


def pooled_rows(feed: Feed, want: Want) -> range:
    """The rows of a feed that a want to pool sums: its first, its last known one, or all from KV index `want.k` on."""
    if want.rows == "first":
        return range(1)
    if want.rows == "last":
        return range(feed.count - 1, feed.count)
    return range(min(max(want.k - feed.start, 0), feed.count), feed.count)
