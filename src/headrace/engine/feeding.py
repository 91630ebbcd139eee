"""Which tokens of a sequence a step feeds, with the blocks for them. Work is known tokens + draft - computed."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.data.config import SchedulerConfig
from headrace.data.plan import PROPAGATED, UPPER, Feed, StepPlan, TableDelta
from headrace.data.types import Request, Sequence
from headrace.kv.blocks import BlockManager, Span


class Work(msgspec.Struct, eq=False, gc=False):
    """One feed of a plan and whose it is. `last`: it reaches the last known token and what the draft must have."""

    request: Request
    seq: Sequence
    feed: Feed
    last: bool


@dataclass(eq=False, slots=True)
class Flight:
    """A plan on its way through the executor, with what its result belongs to."""

    plan: StepPlan
    room: int  # tokens the budget still allows
    works: list[Work] = field(default_factory=list)
    promises: set[bytes] = field(default_factory=set)  # hashes of the full blocks and of the sources this step computes
    ticket: Any = None  # None: not submitted yet
    retry: bool = False  # one request has it to itself, as the step failed that it was in


class Feeding:
    """Puts feeds into a plan. `flights`: the plans that are under way, whose blocks nobody computes again. `upper`: the number
    of the group that lags where tokens leave early; `exit`: after how many layers rows leave that are propagated (0: none)."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, flights: list[Flight]) -> None:
        self.config = config
        self.blocks = blocks
        self.upper = next((g for g, group in enumerate(blocks.groups) if group.name == UPPER), None)
        self.exit = next((group.layers[0] for group in blocks.groups if group.kind == PROPAGATED), 0)
        self._flights = flights

    def feed_token(self, request: Request, flight: Flight) -> bool:
        """The short way for most feeds: one new token of a single sequence, into a block that it has to itself.

        Returns whether that was all there was to do.
        """
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
        """The range each sequence is to be fed: all it has, or, where that cannot be, all but the last token.

        What a sequence has are its known tokens and the draft it must have. A request is caught up when all its sequences
        catch up in one step; until then each holds back its last token.
        A sequence whose next block or source another feed is computing right now waits for it and then matches it. A source is
        encoded whole, with the first feed that needs it: one that begins within the budget may exceed it, by the draft that it
        must have, too. A feed has one depth.
        """
        room = max(flight.room, 0)
        shares = 0 if self.config.whole else request.shares
        promises = set(flight.promises)
        held = False
        spans: list[Span] = []
        for seq in request.seqs:
            lacks = seq.kv.source and not seq.kv.encoded
            if lacks and self.blocks.match_source(seq):
                lacks = False
                if not request.metrics.preemptions:
                    request.metrics.cached_tokens += seq.kv.source
            if lacks:
                key = self.blocks.source_key(seq)
                if not room or self._under_way(key, promises):
                    held = True
                    continue
                promises.add(key)
                room = max(room - seq.kv.source, 1 + goal(seq) - len(seq.tokens))
            if shares:
                saved = self.blocks.match(seq, most=shares)
                if not request.metrics.preemptions:  # what a preempted request finds again it has computed itself
                    request.metrics.cached_tokens += saved
                if self._promised(seq, promises, shares):
                    held = True
                    continue
            start = seq.kv.computed[0]
            most = goal(seq)
            end = most if start + room >= most else min(start + room, len(seq.tokens))
            if self.exit and request.params.exit_threshold is not None:
                end = min(end, depth_ends(seq, start))
            spans.append((seq, start, end))
            promises.update(self._completed(seq, start, min(end, len(seq.tokens) - 1)))
            room -= end - start
        if held or any(end < goal(seq) for seq, _, end in spans):
            spans = [(seq, start, min(end, len(seq.tokens) - 1)) for seq, start, end in spans]
        return [(seq, start, end) for seq, start, end in spans if end > start]

    def _promised(self, seq: Sequence, promises: set[bytes], most: int) -> bool:
        """Whether the block `seq` would compute next, and could share, is being computed by another feed. `most`: so many of
        its tokens it may share."""
        index, offset = divmod(seq.kv.computed[0], self.blocks.block_size)
        if offset or (index + 1) * self.blocks.block_size > self.blocks.exact(seq, min(len(seq.tokens) - 1, most)):
            return False
        return self._under_way(self.blocks.hash(seq, index), promises)

    def _under_way(self, key: bytes, promises: set[bytes]) -> bool:
        return key in promises or any(key in flight.promises for flight in self._flights)

    def _completed(self, seq: Sequence, start: int, end: int) -> list[bytes]:
        """Hashes of the blocks that feeding [start, end) fills, as far as others may have them."""
        size = self.blocks.block_size
        return [self.blocks.hash(seq, index) for index in range(start // size, self.blocks.exact(seq, end) // size)]

    def feed(self, request: Request, spans: list[Span], flight: Flight) -> None:
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
            feed.source = tuple(request.prompt)
            flight.room -= len(feed.source)
            flight.promises.add(self.blocks.source_key(seq))
        if end > length:
            draft = seq.decode.draft
            assert draft is not None
            feed.nodes, feed.parents, feed.full = tuple(draft.tokens), tuple(draft.parents), draft.full
        if self.upper is not None:
            feed.lag = start - seq.kv.computed[self.upper]
        if seq.kv.left and has_left(seq, start):
            feed.depth = self.exit
        wire.sent = length
        if seq.kv.moves:
            self._compact(seq, end, flight.plan)
        flight.plan.feeds.append(feed)
        flight.room -= end - start + feed.lag  # lagging rows run through the upper layers, unless the token exits again
        flight.works.append(Work(request, seq, feed, end == goal(seq)))
        if known // self.blocks.block_size > start // self.blocks.block_size:
            flight.promises.update(self._completed(seq, start, known))
        request.in_flight = True

    def _compact(self, seq: Sequence, end: int, plan: StepPlan) -> None:
        """Move what was accepted off its place to where it belongs, before anything else of the step happens."""
        table, size = seq.kv.tables[0], self.blocks.block_size
        for pair in seq.kv.moves:
            source, to = (table[index // size] * size + index % size for index in pair)
            plan.moves.append((0, source, to))
        seq.kv.moves = []
        self.blocks.truncate(seq, end)

    def add_drafts(self, flight: Flight, running: list[Request]) -> None:
        """Optional drafts take what budget and blocks are left, but a block for each sequence to grow; the rest is cut off."""
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
            if self.blocks.need([(seq, length, length + most)]) + reserve > self.blocks.available:
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
            known = seq.wire.synced[index]
            if known < len(table):
                plan.tables.append(TableDelta(seq.wire.slot, index, known, table[known:]))
                seq.wire.synced[index] = len(table)


def goal(seq: Sequence) -> int:
    """How far a sequence must be fed to be caught up: known tokens and the draft it must have."""
    draft = seq.decode.draft
    return len(seq.tokens) + (len(draft.tokens) if draft is not None and draft.required else 0)


def has_left(seq: Sequence, index: int) -> bool:
    """Whether the row at a KV index left and was propagated when it was computed first."""
    at = bisect_left(seq.kv.left, index)
    return at < len(seq.kv.left) and seq.kv.left[at] == index


def depth_ends(seq: Sequence, start: int) -> int:
    """Where the depth of the rows from KV index `start` on is another: those that left, those that did not, and the last known
    token's after the prompt, of which the exit decides."""
    left, tip = seq.kv.left, len(seq.tokens) - 1
    at = bisect_left(left, start)
    if at < len(left) and left[at] == start:
        end = start
        while at < len(left) and left[at] == end:
            at, end = at + 1, end + 1
        return end
    end = left[at] if at < len(left) else len(seq.tokens)
    return min(end, tip) if start < tip and tip >= seq.prompt_len else end
