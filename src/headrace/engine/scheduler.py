"""Chooses the feeds of each step: queues, token budget, blocks, preemption. It sees no strategy and no tensor.

A sequence's work is its known tokens plus its draft, minus the computed tokens. So prefill, decode and chunked prefill are one
rule. Preempted requests recompute.

Source: Yu et al., "Orca", OSDI 2022 (iteration-level scheduling); Agrawal et al., "Sarathi-Serve", arXiv 2403.02310 (chunked
prefill).
"""

from bisect import bisect_left, insort

from headrace.data.config import SchedulerConfig
from headrace.data.plan import NewSlot, StepOutput, StepPlan
from headrace.data.types import Holding, Request, Sequence, Status, Wire
from headrace.engine.feeding import Feeding, FeedWork, Flight
from headrace.kv.blocks import BlockManager
from headrace.kv.store import KVStore


class Scheduler:
    """Builds the plan of each step; owned by an engine.

    Order: running requests that only decode, running requests in prefill, waiting requests; each by (priority, turn, arrival).
    A request short of blocks preempts the last running one, and such a step admits none. Requests whose step failed come before
    all others, each in a step of its own, until they have caught up.

    depth: plans that may be under way at once.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, depth: int = 1) -> None:
        self.config = config
        self.blocks = blocks
        self.depth = depth
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.retries: list[Request] = []  # requests whose step failed; they are also in waiting or running
        self.preemptions = 0
        self._target_groups = [g for g, group in enumerate(blocks.groups) if group.model == 0]
        self._draft_groups = [g for g, group in enumerate(blocks.groups) if group.model != 0]
        self._step = 0
        self._flights: list[Flight] = []
        self.feeding = Feeding(config, blocks, self._flights)
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []  # for the next plan
        self._new_slots: list[NewSlot] = []

    # -- requests ------------------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    @property
    def candidates(self) -> list[Request]:
        """Requests that the next step may feed. Of the waiting ones only as many as one step can admit, so that the cost does
        not grow with the queue."""
        first = self.waiting[: self.config.max_num_seqs]
        later = [request for request in self.retries if request.status is Status.WAITING and request not in first]
        return [*self.running, *first, *later]

    @property
    def held(self) -> list[Sequence]:
        """Every sequence that may hold blocks."""
        return [seq for request in self.requests for seq in request.seqs]

    def finish(self, request: Request) -> None:
        """Take a request out and free its blocks and slots."""
        _remove(self.running if request.status is Status.RUNNING else self.waiting, request)
        if request in self.retries:
            self.retries.remove(request)
        request.status = Status.FINISHED
        for seq in request.seqs:
            self.drop(seq)
        request.seqs = []

    def drop(self, seq: Sequence) -> None:
        """Free the blocks and the slot of a sequence that has ended."""
        if self.store is not None:
            self.store.save(seq)
        self._give_up(seq)

    def _give_up(self, seq: Sequence) -> None:
        self.blocks.release(seq)
        self._free_slot(seq)

    def commit(self, request: Request, parent: Sequence, children: list[Sequence]) -> None:
        """Replace a sequence by its unfinished children: the first takes over table and slot, the others fork from it."""
        at = request.seqs.index(parent)
        assert len(children) < 2 or not parent.kv.moves, "a sequence that follows its draft has one child"
        for child in children[1:]:
            self.blocks.fork(parent, child)
            child.wire = Wire(self._slots.pop(), parent.wire.sent, list(parent.wire.synced))
            self._new_slots.append(NewSlot(slot=child.wire.slot, source=parent.wire.slot))
        if not children:
            self.drop(parent)
        elif children[0] is not parent:
            children[0].kv, children[0].wire = parent.kv, parent.wire
            parent.kv, parent.wire = Holding(), Wire()
        request.seqs[at : at + 1] = children

    # -- the K/V store -------------------------------------------------------------------------------------------------
    @property
    def store(self) -> KVStore | None:
        return self.feeding.store

    @store.setter
    def store(self, store: KVStore | None) -> None:
        self.feeding.store = store

    def wait_for_store(self) -> bool:
        """Wait a moment for loads and saves, when no request can be fed. Returns False if there are none."""
        return self.store is not None and self.store.wait()

    def close(self) -> None:
        """Save what is queued."""
        if self.store is not None:
            self.store.close()

    def check(self) -> None:
        """Raise AssertionError unless block tables, reference counts and the prefix cache agree."""
        self.blocks.check(self.held, () if self.store is None else self.store.held)

    # -- one step ------------------------------------------------------------------------------------------------------
    def schedule(self) -> Flight | None:
        """The flight of the next step; None if nothing can be fed now."""
        flight = Flight(StepPlan(self._step), self.config.max_num_batched_tokens)
        while True:
            if self.store is not None:
                self.store.begin()
            self.blocks.begin()
            before = self.preemptions
            if not self._retry(flight) and not self._feed_running(flight):
                self._admit(flight)
            self.feeding.add_drafts(flight, self.running)
            self.blocks.end()
            if flight.works or self.preemptions == before:
                break
        if not flight.works:
            return None
        plan = flight.plan
        plan.free, self._freed_slots = self._freed_slots, []
        plan.new, self._new_slots = self._new_slots, []
        self._step += 1
        self._flights.append(flight)
        return flight

    def land(self, flight: Flight) -> None:
        """The flight's result is there: its requests may be scheduled again. Those whose earlier chunk failed are retried after
        their last flight."""
        self._flights.remove(flight)
        for work in flight.works:
            work.request.in_flight -= 1
        for work in flight.works:
            if work.stale and not work.request.in_flight:
                self._preempt_to_retry(work.request)

    def fail(self, flight: Flight) -> None:
        """Undo a failed flight, whose plan the runner may have carried out in part.

        Idle slots are freed again with the next plan. A request whose new slots came with this plan is preempted. So are the
        fed requests, to be retried one by one; requests that failed otherwise, or were retried in this step, are ended by the
        engine.
        """
        idle = set(self._slots)
        self._freed_slots += [slot for slot in flight.plan.free if slot in idle]
        announced = {new.slot for new in flight.plan.new}
        for request in [r for r in self.running if not r.in_flight and any(seq.wire.slot in announced for seq in r.seqs)]:
            self._preempt(request)
        if flight.retry:
            return
        failed = {work.request: None for work in flight.works if not work.stale}
        later = [work for other in self._flights if other is not flight for work in other.works if work.request in failed]
        for work in later:
            work.stale, work.seq.wire.fed = True, len(work.seq.tokens)  # no further chunk
        still_fed = {work.request for work in later}
        for request in failed:
            if request not in still_fed:
                self._preempt_to_retry(request)

    def _preempt_to_retry(self, request: Request) -> None:
        if request.error is None and not request.aborted:
            self._preempt(request)
            self.retries.append(request)

    def advance(self, flight: Flight, output: StepOutput) -> None:
        """Record a successful step: its feeds are computed, and full blocks are published. Above an exit K/V reach as far as a
        feed ran; a lagging sequence has then filled blocks that were published without them."""
        for number, work in enumerate(flight.works):
            if work.stale:
                continue
            depth = output.unfilled.get(number)
            if number in output.propagated:
                self.blocks.leave(work.seq, work.feed.start, output.propagated[number])
            self._computed(work.seq, work.feed.start + work.feed.count, depth)
            if work.feed.lags:
                for (group, below), lag in zip(self.feeding.uppers.items(), work.feed.lags, strict=False):
                    if lag and (depth is None or below < depth):
                        self.blocks.fill(work.seq, group, work.feed.start - lag)
            if work.feed.source is not None:
                self.blocks.publish_source(work.seq)
        if flight.retry and flight.works[0].last:
            self.retries.remove(flight.works[0].request)

    def accept(self, seq: Sequence, length: int, path: tuple[int, ...]) -> None:
        """Keep the K/V of an accepted `path` of the draft behind `length` known tokens, and free the rest.

        K/V at another place than their token's move with the next feed. Until then they are not published and their blocks
        stay.
        """
        kv = seq.kv
        kv.moves = [(length + node, length + place) for place, node in enumerate(path) if node != place]
        if not kv.moves:
            self._computed(seq, length + len(path))
            self.blocks.truncate(seq, length + len(path))
        # A draft model's chain is valid as far as it was accepted.
        for g in self._draft_groups:
            kv.computed[g] = min(kv.computed[g], length + len(path))
        for g in self._target_groups_of(seq):
            kv.computed[g] = length + len(path)

    def drop_draft(self, work: FeedWork) -> None:
        """Feed without the draft, whose model failed; its K/V of the sequence are invalid."""
        work.seq.decode.draft, work.feed.nodes, work.feed.parents = None, (), ()
        for g in self._draft_groups:
            work.seq.kv.computed[g] = 0

    def _computed(self, seq: Sequence, end: int, depth: int | None = None) -> None:
        """Set the target's groups to `end`, only those below `depth` layers if the feed exited there; publish full blocks."""
        kv, uppers = seq.kv, self.feeding.uppers
        for g in self._target_groups:
            if kv.groups >> g & 1 and kv.computed[g] < end and (depth is None or g not in uppers or uppers[g] < depth):
                kv.computed[g] = end
        if end // self.blocks.block_size > kv.published:
            self.blocks.publish(seq)
        if self.blocks.windows is not None:
            self.blocks.retire(seq)

    def _target_groups_of(self, seq: Sequence) -> list[int]:
        """The target's KV groups that a sequence's feeds fill."""
        return [g for g in self._target_groups if seq.kv.groups >> g & 1]

    # -- feeding -------------------------------------------------------------------------------------------------------
    def _retry(self, flight: Flight) -> bool:
        """Feed the first request whose step failed, alone. False if there is none or no room; then other requests run and free
        blocks."""
        flight.retry = bool(self.retries)
        for request in self.retries:
            if request.in_flight:
                continue
            if request.status is Status.WAITING:
                self._admit_one(request, flight)
            elif not self.feeding.feed_token(request, flight):
                self._feed(request, flight)
            if flight.works:
                return True
        flight.retry = False
        return False

    def _feed_running(self, flight: Flight) -> bool:
        """Feed the running requests; returns whether blocks ran short."""
        short = False
        for request in self._lane():
            if request.status is not Status.RUNNING or request in self.retries:
                continue
            if request.in_flight:
                short |= self._feed_next_chunk(request, flight)
            elif not self.feeding.feed_token(request, flight):
                short |= self._feed(request, flight)
        return short

    def _feed(self, request: Request, flight: Flight) -> bool:
        """Feed one running request if there are blocks; returns whether they ran short."""
        spans = self.feeding.spans(request, flight)
        short = False
        while self.blocks.lacks(spans):
            short = True
            # A victim's blocks are usable from the next step on; then this request is tried again.
            if not self.blocks.lacks(spans, freed=True) or not self._preempt_after(request):
                return short
        self.feeding.feed(request, spans, flight)
        return short

    def _feed_next_chunk(self, request: Request, flight: Flight) -> bool:
        """Feed the chunk behind the chunks of a prompt that are under way; returns whether blocks ran short."""
        seq = request.seqs[0]
        start, end = seq.wire.fed, len(seq.tokens)
        waits = not request.overlaps or request.aborted or request.error is not None or len(request.seqs) > 1
        if waits or start >= end or flight.room < 1:
            return False
        spans = [(seq, start, min(start + flight.room, end))]
        if self.blocks.lacks(spans):
            return True
        self.feeding.feed(request, spans, flight)
        return False

    def _lane(self) -> list[Request]:
        """The running requests that a step looks at. With depth d a step takes 1/d of those that only decode, so that the
        others' steps overlap with it."""
        ordered = sorted(self.running, key=_in_prefill)
        if self.depth == 1:
            return ordered
        decoding = sum(not _in_prefill(request) for request in ordered)
        idle = [request for request in ordered[:decoding] if not request.in_flight]
        return [*idle[: -(-decoding // self.depth)], *ordered[decoding:]]

    # -- preempting and admitting --------------------------------------------------------------------------------------
    def _preempt_after(self, request: Request) -> bool:
        """Preempt the last running request behind `request`; False if there is none."""
        later = [r for r in self.running if not r.in_flight and r.order > request.order]
        if not later:
            return False
        self._preempt(max(later, key=_order))
        return True

    def _preempt(self, victim: Request) -> None:
        """Free all blocks of a request. On resume its first sequence recomputes the prefix, which the others then match."""
        self.preemptions += 1
        victim.metrics.preemptions += 1
        for seq in victim.seqs:
            self._give_up(seq)
            seq.kv.sought = 0
            seq.decode.draft = None
        victim.status = Status.WAITING
        _remove(self.running, victim)
        insort(self.waiting, victim, key=_order)

    def _admit(self, flight: Flight) -> None:
        static = self.config.policy == "static"
        if static and self.running:
            return
        while self.waiting and (static or flight.room > 0):
            if self.waiting[0] in self.retries or not self._admit_one(self.waiting[0], flight):
                return

    def _admit_one(self, request: Request, flight: Flight) -> bool:
        """Start a waiting request; returns whether there was room for it."""
        if request.width + sum(r.width for r in self.running) > self.config.max_num_seqs:
            return False
        spans = self.feeding.spans(request, flight)
        leader = request.seqs[0]
        whole = [(leader, leader.kv.computed[0], len(leader.tokens))]
        # One block for each running sequence to grow, so that admission does not cause the next preemption.
        reserve = sum(len(r.seqs) for r in self.running)
        cut = self.config.whole and sum(end - start for _, start, end in spans) < len(leader.tokens)
        # A retried request must get its slots with its own step.
        cut = cut or (flight.retry and not spans)
        if cut or self.blocks.lacks(spans, reserve) or self.blocks.need(whole) + reserve > self.blocks.available:
            for seq in request.seqs:
                self.blocks.release(seq)
            if not request.metrics.preemptions:
                request.metrics.cached_tokens = 0  # counted again when it is admitted
            return False
        self._start(request)
        self.feeding.feed(request, spans, flight)
        return True

    def _start(self, request: Request) -> None:
        _remove(self.waiting, request)
        request.status = Status.RUNNING
        insort(self.running, request, key=_order)
        stop_ids = sorted(request.stop_ids)
        for seq in request.seqs:
            seq.wire.slot = self._slots.pop()
            seq.wire.sent = len(seq.tokens)
            self._new_slots.append(
                NewSlot(
                    slot=seq.wire.slot,
                    seed=request.seed,
                    prompt_len=seq.prompt_len,
                    tokens=list(seq.tokens),
                    params=request.params,
                    stop_ids=stop_ids,
                    reads=seq.kv.source,
                )
            )

    def _free_slot(self, seq: Sequence) -> None:
        slot = seq.wire.slot
        if slot < 0:
            return
        announced = [new for new in self._new_slots if new.slot == slot]
        if announced:
            self._new_slots.remove(announced[-1])
        else:
            self._freed_slots.append(slot)
        self._slots.append(slot)
        seq.wire = Wire(synced=[0] * len(seq.kv.tables))


def _order(request: Request) -> tuple[int, int, int]:
    return request.order


def _remove(queue: list[Request], request: Request) -> None:
    """Remove a request from a queue sorted by order, which is unique."""
    at = bisect_left(queue, request.order, key=_order)
    assert queue[at] is request
    del queue[at]


def _in_prefill(request: Request) -> bool:
    """Whether a request has more than its next token to compute. Used as a sort key: a long prompt must not delay decodes."""
    for seq in request.seqs:  # noqa: SIM110 - any() takes twice as long
        if len(seq.tokens) - seq.kv.computed[0] > 1:
            return True
    return False
