"""Chooses which tokens of a sequence a step feeds, and reserves their blocks."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.data.config import SchedulerConfig
from headrace.data.plan import PROPAGATED, UPPER, Feed, StepPlan, TableDelta
from headrace.data.types import Request, Sequence
from headrace.kv.blocks import BlockManager, Span
from headrace.kv.store import KVStore


class FeedWork(msgspec.Struct, eq=False, gc=False):
    """One feed of a plan with its request and sequence.

    last: the feed reaches the last known token and the end of a required draft. stale: an earlier chunk of the prompt failed;
    the result is dropped.
    """

    request: Request
    seq: Sequence
    feed: Feed
    last: bool
    stale: bool = False


@dataclass(eq=False, slots=True)
class Flight:
    """A plan on its way through the executor, with the feeds that its result belongs to."""

    plan: StepPlan
    room: int  # tokens that the step's budget still allows
    works: list[FeedWork] = field(default_factory=list)
    promises: set[bytes] = field(default_factory=set)  # hashes of the full blocks and of the sources this step computes
    ticket: Any = None  # None: not submitted yet
    retry: bool = False  # a step of one request, whose last step failed


class Feeding:
    """Puts feeds into plans.

    uppers: by index of the KV group of the layers above an exit (in a cascade: of all layers of the target), the number of
    layers below. They may lag: they lack K/V of tokens that exited, until a later feed computes them.
    propagates: whether K/V above an exit are computed from the row at the exit.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, flights: list[Flight]) -> None:
        """flights: plans under way; the blocks that they compute are not computed again."""
        self.config = config
        self.blocks = blocks
        uppers = [(g, group) for g, group in enumerate(blocks.groups) if group.name == UPPER]
        self.uppers = {g: group.layers[0] if group.layers else 0 for g, group in uppers}
        self.propagates = any(group.kind == PROPAGATED for group in blocks.groups)
        self._flights = flights
        self.store: KVStore | None = None

    def feed_token(self, request: Request, flight: Flight) -> bool:
        """Fast path of most feeds: one new token of a request's only sequence, into a block that only this sequence uses.
        Returns False if the request needs more."""
        seq = request.seqs[0]
        start, draft = len(seq.tokens) - 1, seq.decode.draft
        if seq.kv.computed[0] != start or len(request.seqs) > 1 or flight.room < 1 or not self.blocks.writable(seq, start):
            return False
        if draft is not None and draft.required:
            return False
        self._add(request, seq, start, start + 1, flight)
        request.metrics.steps += 1
        return True

    def spans(self, request: Request, flight: Flight) -> list[Span]:
        """The token range of each sequence to feed: up to its last token and required draft, or, if not all sequences reach
        that in this step, up to the token before.

        A sequence waits if another feed computes its next block or its source right now, or the K/V store loads its next
        segment, and matches that later. A source is
        encoded whole, with the first feed that needs it; a feed that starts within the token budget may exceed it by its source
        and required draft, or by the rest of an `uncut` prompt. All rows of a feed have one depth.
        """
        room = max(flight.room, 0)
        shares = 0 if self.config.whole else request.shares
        promises = set(flight.promises)
        held = False
        spans: list[Span] = []
        for seq in request.seqs:
            unencoded = seq.kv.source and not seq.kv.encoded
            if unencoded and self.blocks.match_source(seq):
                unencoded = False
                if not request.metrics.preemptions:
                    request.metrics.cached_tokens += seq.kv.source
            if unencoded:
                key = self.blocks.source_key(seq)
                if not room or self._under_way(key, promises):
                    held = True
                    continue
                promises.add(key)
                room = max(room - seq.kv.source, 1 + goal(seq) - len(seq.tokens))
            if shares:
                saved = self.blocks.match(seq, most=shares)
                # A preempted request finds its own blocks again.
                if not request.metrics.preemptions:
                    request.metrics.cached_tokens += saved
                if self._promised(seq, promises, shares) or (self.store is not None and self.store.loads(seq, shares)):
                    held = True
                    continue
            start = seq.kv.computed[0]
            most = goal(seq)
            room = max(room, most - start) if request.uncut and room else room
            end = most if start + room >= most else min(start + room, len(seq.tokens))
            if self.propagates and request.params.exit_threshold is not None:
                end = min(end, end_of_depth(seq, start))
            spans.append((seq, start, end))
            promises.update(self._completed(seq, start, min(end, len(seq.tokens) - 1)))
            room -= end - start
        if held or any(end < goal(seq) for seq, _, end in spans):
            spans = [(seq, start, min(end, len(seq.tokens) - 1)) for seq, start, end in spans]
        return [(seq, start, end) for seq, start, end in spans if end > start]

    def _promised(self, seq: Sequence, promises: set[bytes], most: int) -> bool:
        """Whether another feed computes the block that `seq` would compute next and may share. most: tokens of `seq` that may
        be shared."""
        index, offset = divmod(seq.kv.computed[0], self.blocks.block_size)
        if offset or (index + 1) * self.blocks.block_size > self.blocks.exact(seq, min(len(seq.tokens) - 1, most)):
            return False
        return self._under_way(self.blocks.hash(seq, index), promises)

    def _under_way(self, key: bytes, promises: set[bytes]) -> bool:
        return key in promises or any(key in flight.promises for flight in self._flights)

    def _completed(self, seq: Sequence, start: int, end: int) -> list[bytes]:
        """Hashes of the full blocks of [start, end) that may be shared."""
        size = self.blocks.block_size
        return [self.blocks.hash(seq, index) for index in range(start // size, self.blocks.exact(seq, end) // size)]

    def feed(self, request: Request, spans: list[Span], flight: Flight) -> None:
        """Reserve blocks for the ranges and add their feeds to the plan."""
        for seq, start, end in spans:
            flight.plan.copies += self.blocks.grow(seq, start, end)
            self._sync_tables(seq, flight.plan)
            self._add(request, seq, start, end, flight)
        request.metrics.steps += bool(spans)

    def _add(self, request: Request, seq: Sequence, start: int, end: int, flight: Flight) -> None:
        length, wire = len(seq.tokens), seq.wire
        known = min(end, length)
        feed = Feed(wire.slot, start, known - start, tuple(seq.tokens[wire.sent :]))
        if seq.kv.source and not seq.kv.encoded:
            feed.source = request.source
            flight.room -= seq.kv.source
            flight.promises.add(self.blocks.source_key(seq))
        if end > length:
            draft = seq.decode.draft
            assert draft is not None
            feed.nodes, feed.parents, feed.full = tuple(draft.tokens), tuple(draft.parents), draft.full
        if self.uppers and any(seq.kv.computed[g] < start for g in self.uppers):
            feed.lags = tuple(start - seq.kv.computed[g] for g in self.uppers)
        if seq.kv.left:
            feed.depth = depth_of(seq, start)
        wire.sent = length
        if seq.kv.moves:
            self._compact(seq, end, flight.plan)
        flight.plan.feeds.append(feed)
        flight.room -= end - start
        if feed.lags:
            # Lagging rows run through the layers above the exit, unless the token of this feed exits, too.
            flight.room -= feed.lag
        flight.works.append(FeedWork(request, seq, feed, end == goal(seq)))
        if known // self.blocks.block_size > start // self.blocks.block_size:
            flight.promises.update(self._completed(seq, start, known))
        request.in_flight += 1
        wire.fed = known

    def _compact(self, seq: Sequence, end: int, plan: StepPlan) -> None:
        """Move accepted K/V to the places of their tokens, before anything else in the step."""
        size = self.blocks.block_size
        for number, _ in self.blocks.growing:
            table = seq.kv.tables[number]
            for pair in seq.kv.moves:
                source, to = (table[index // size] * size + index % size for index in pair)
                plan.moves.append((number, source, to))
        seq.kv.moves = []
        self.blocks.truncate(seq, end)

    def add_drafts(self, flight: Flight, running: list[Request]) -> None:
        """Give optional drafts the remaining budget and blocks, keeping one block for each running sequence to grow. Longer
        drafts are cut."""
        works = [
            (work, work.seq.decode.draft)
            for work in flight.works
            if work.seq.decode.draft is not None and not work.seq.decode.draft.required
        ]
        reserve = sum(len(request.seqs) for request in running) if works else 0
        for work, draft in works:
            seq = work.seq
            length = len(seq.tokens)
            most = min(len(draft.tokens), flight.room) if work.last else 0
            if self.blocks.lacks([(seq, length, length + most)], reserve):
                most = min(most, len(seq.kv.tables[0]) * self.blocks.block_size - length)
            if most <= 0:
                seq.decode.draft = None
                continue
            flight.plan.copies += self.blocks.grow(seq, length, length + most)
            self._sync_tables(seq, flight.plan)
            del draft.tokens[most:], draft.parents[most:]
            work.feed.nodes, work.feed.parents = tuple(draft.tokens), tuple(draft.parents)
            flight.room -= most
            work.request.metrics.drafts += 1
            work.request.metrics.drafted += most

    def _sync_tables(self, seq: Sequence, plan: StepPlan) -> None:
        for index, table in enumerate(seq.kv.tables):
            synced = seq.wire.synced[index]
            if synced < len(table):
                plan.tables.append(TableDelta(seq.wire.slot, index, synced, table[synced:]))
                seq.wire.synced[index] = len(table)


def goal(seq: Sequence) -> int:
    """Number of tokens, known ones and a required draft, up to which a sequence must be fed to be caught up."""
    draft = seq.decode.draft
    return len(seq.tokens) + (len(draft.tokens) if draft is not None and draft.required else 0)


def depth_of(seq: Sequence, index: int) -> int:
    """Number of layers after which the row at a KV index exited and was propagated; 0 if it did not."""
    at = bisect_left(seq.kv.left, index)
    return seq.kv.depths[at] if at < len(seq.kv.left) and seq.kv.left[at] == index else 0


def end_of_depth(seq: Sequence, start: int) -> int:
    """KV index at which the rows of equal depth from `start` on end.

    There are three kinds: rows whose K/V above one exit are propagated, rows that run through all layers, and the last known
    token behind the prompt, which may exit in this step.
    """
    left, depths, tip = seq.kv.left, seq.kv.depths, len(seq.tokens) - 1
    at = bisect_left(left, start)
    if at < len(left) and left[at] == start:
        end, depth = start, depths[at]
        while at < len(left) and left[at] == end and depths[at] == depth:
            at, end = at + 1, end + 1
        return end
    end = left[at] if at < len(left) else len(seq.tokens)
    return min(end, tip) if start < tip and tip >= seq.prompt_len else end
