"""Who is fed what in the next step: queues, token budget, blocks, preemption. Knows no strategy and no tensor.

Work is known tokens + draft - computed (Orca's iteration-level scheduling, Sarathi-Serve's chunked prefill);
preemption recomputes.
"""

from bisect import bisect_left, insort

from headrace.data.config import SchedulerConfig
from headrace.data.plan import NewSlot, StepOutput, StepPlan
from headrace.data.types import Holding, Request, Sequence, Status, Wire
from headrace.engine.feeding import Feeding, Flight, Work
from headrace.kv.blocks import BlockManager


class Scheduler:
    """Builds step plans for the requests it holds.

    Running requests go first, those that only decode before those in prefill, then waiting ones, each in the order
    (priority, turn, arrival). A request whose blocks run short preempts the last running one; nothing is admitted in such a
    step.
    Requests whose step failed go before all others, each in a step of its own, until it has caught up.
    `depth`: plans that may be under way at once.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, depth: int = 1) -> None:
        self.config = config
        self.blocks = blocks
        self.depth = depth
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.retries: list[Request] = []  # of those, the ones whose step failed
        self.preemptions = 0
        self._own = [g for g, group in enumerate(blocks.groups) if group.model == 0]
        self._companions = [g for g, group in enumerate(blocks.groups) if group.model != 0]
        self._step = 0
        self._flights: list[Flight] = []
        self.feeding = Feeding(config, blocks, self._flights)
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []  # to be told to the runner with the next plan
        self._new_slots: list[NewSlot] = []

    # -- requests ------------------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    @property
    def candidates(self) -> list[Request]:
        """Those that the next step may feed; of those that wait as many as it can admit, so that its work does not grow with
        the queue."""
        first = self.waiting[: self.config.max_num_seqs]
        later = [request for request in self.retries if request.status is Status.WAITING and request not in first]
        return [*self.running, *first, *later]

    @property
    def held(self) -> list[Sequence]:
        """Every sequence that may hold blocks."""
        return [seq for request in self.requests for seq in request.seqs]

    def finish(self, request: Request) -> None:
        """Take a request out; its blocks and slots come back."""
        _take_out(self.running if request.status is Status.RUNNING else self.waiting, request)
        if request in self.retries:
            self.retries.remove(request)
        request.status = Status.FINISHED
        for seq in request.seqs:
            self.drop(seq)
        request.seqs = []

    def drop(self, seq: Sequence) -> None:
        """Give back what a sequence holds."""
        self.blocks.release(seq)
        self._free_slot(seq)

    def commit(self, request: Request, parent: Sequence, children: list[Sequence]) -> None:
        """Replace a sequence by its unfinished children: the first inherits table and slot, the others fork from it."""
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

    # -- one step ------------------------------------------------------------------------------------------------------
    def schedule(self) -> Flight | None:
        """The next step's plan, or None when nothing can be fed now."""
        flight = Flight(StepPlan(self._step), self.config.max_num_batched_tokens)
        while True:
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
        """The step's result is in, or it failed: its requests may be scheduled again."""
        self._flights.remove(flight)
        for work in flight.works:
            work.request.in_flight = False

    def fail(self, flight: Flight) -> None:
        """The step failed, and what the runner carried out of its plan is not known.

        Slots that nobody has are given back once more; a request that was to get slots with this plan and was not fed begins
        again. So do the requests that were fed, each in a step of its own; those that had one are the caller's to end, as are
        those that have failed otherwise.
        """
        idle = set(self._slots)
        self._freed_slots += [slot for slot in flight.plan.free if slot in idle]
        made = {new.slot for new in flight.plan.new}
        for request in [r for r in self.running if not r.in_flight and any(seq.wire.slot in made for seq in r.seqs)]:
            self._preempt(request)
        if flight.retry:
            return
        for request in {work.request: None for work in flight.works}:
            if request.error is None and not request.aborted:
                self._preempt(request)
                self.retries.append(request)

    def advance(self, flight: Flight, output: StepOutput) -> None:
        """The step went well: what it fed is computed, and full blocks are offered to others. Above the exit K and V are there
        as far as a feed has reached; one that had lagged has filled blocks that were offered without them."""
        for number, work in enumerate(flight.works):
            reached = number not in output.unfilled
            if number in output.propagated:
                self.blocks.leave(work.seq, work.feed.start)
            self._computed(work.seq, work.feed.start + work.feed.count, reached)
            if work.feed.lag and reached:
                assert self.feeding.upper is not None
                self.blocks.fill(work.seq, self.feeding.upper, work.feed.start - work.feed.lag)
            if work.feed.source:
                self.blocks.publish_source(work.seq)
        if flight.retry and flight.works[0].last:
            self.retries.remove(flight.works[0].request)

    def accept(self, seq: Sequence, length: int, path: tuple[int, ...]) -> None:
        """The draft below `length` known tokens was verified: keep the K/V of `path`, give up the rest.

        K/V that does not lie where its token now is moves there with the next feed; until then nothing of it is published
        and its blocks are kept.
        """
        kv = seq.kv
        kv.moves = [(length + node, length + place) for place, node in enumerate(path) if node != place]
        if not kv.moves:
            self._computed(seq, length + len(path))
            self.blocks.truncate(seq, length + len(path))
        for g in self._companions:  # their chain is the path as far as it was accepted
            kv.computed[g] = min(kv.computed[g], length + len(path))
        for g in self._filled_by(seq):
            kv.computed[g] = length + len(path)

    def drop_draft(self, work: Work) -> None:
        """The feed goes without its draft; what companions hold of the sequence is not to be trusted."""
        work.seq.decode.draft, work.feed.nodes, work.feed.parents = None, (), ()
        for g in self._companions:
            work.seq.kv.computed[g] = 0

    def _computed(self, seq: Sequence, end: int, reached: bool = True) -> None:
        """The target's groups now reach `end`, those above an exit if it was `reached`; full blocks are offered to others."""
        kv = seq.kv
        for g in self._own:
            if kv.groups >> g & 1 and kv.computed[g] < end and (reached or g != self.feeding.upper):
                kv.computed[g] = end
        if end // self.blocks.block_size > kv.published:
            self.blocks.publish(seq)

    def _filled_by(self, seq: Sequence) -> list[int]:
        """The groups that the target's feeds of a sequence fill."""
        return [g for g in self._own if seq.kv.groups >> g & 1]

    # -- feeding -------------------------------------------------------------------------------------------------------
    def _retry(self, flight: Flight) -> bool:
        """Feed the first request whose step failed, and nobody else. False where there is none, or no room for any: then the
        others go on, so that there will be."""
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
            if request.in_flight or request.status is not Status.RUNNING or request in self.retries:
                continue
            if not self.feeding.feed_token(request, flight):
                short |= self._feed(request, flight)
        return short

    def _feed(self, request: Request, flight: Flight) -> bool:
        """Feed a running request what it has, if there are blocks for it; returns whether they ran short."""
        spans = self.feeding.spans(request, flight)
        short = False
        while (need := self.blocks.need(spans)) > self.blocks.available:
            short = True
            # What a victim gives up can be used from the next step on; then this request is tried again.
            if need <= self.blocks.available + self.blocks.freed_this_step or not self._preempt_after(request):
                return short
        self.feeding.feed(request, spans, flight)
        return short

    def _lane(self) -> list[Request]:
        """The running requests that a step looks at. Of those that only need their next token it takes a share, so that the
        others' steps can be under way beside it."""
        ordered = sorted(self.running, key=_in_prefill)
        if self.depth == 1:
            return ordered
        decoding = sum(not _in_prefill(request) for request in ordered)
        idle = [request for request in ordered[:decoding] if not request.in_flight]
        return [*idle[: -(-decoding // self.depth)], *ordered[decoding:]]

    # -- preempting and admitting --------------------------------------------------------------------------------------
    def _preempt_after(self, request: Request) -> bool:
        """Preempt the last running request that comes after `request`; False when there is none."""
        later = [r for r in self.running if not r.in_flight and r.order > request.order]
        if not later:
            return False
        self._preempt(max(later, key=_order))
        return True

    def _preempt(self, victim: Request) -> None:
        """All of a request's sequences give up their blocks; on resume the first recomputes what the others then match."""
        self.preemptions += 1
        victim.metrics.preemptions += 1
        for seq in victim.seqs:
            self.drop(seq)
            seq.decode.draft = None
        victim.status = Status.WAITING
        _take_out(self.running, victim)
        insort(self.waiting, victim, key=_order)

    def _admit(self, flight: Flight) -> None:
        static = self.config.policy == "static"
        if static and self.running:
            return
        while self.waiting and (static or flight.room > 0):
            if self.waiting[0] in self.retries or not self._admit_one(self.waiting[0], flight):
                return

    def _admit_one(self, request: Request, flight: Flight) -> bool:
        """Begin to feed a waiting request; returns whether there was room for it."""
        if request.width + sum(r.width for r in self.running) > self.config.max_num_seqs:
            return False
        spans = self.feeding.spans(request, flight)
        leader = request.seqs[0]
        whole = [(leader, leader.kv.computed[0], len(leader.tokens))]
        # Room to grow for those who run already, so that admission does not cause the next preemption.
        reserve = sum(len(r.seqs) for r in self.running)
        cut = self.config.whole and sum(end - start for _, start, end in spans) < len(leader.tokens)
        cut = cut or (flight.retry and not spans)  # its slots must come with its own step
        if cut or max(self.blocks.need(spans), self.blocks.need(whole)) + reserve > self.blocks.available:
            for seq in request.seqs:
                self.blocks.release(seq)
            if not request.metrics.preemptions:
                request.metrics.cached_tokens = 0  # it will match again
            return False
        self._start(request)
        self.feeding.feed(request, spans, flight)
        return True

    def _start(self, request: Request) -> None:
        _take_out(self.waiting, request)
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


def _take_out(queue: list[Request], request: Request) -> None:
    """Remove a request from a queue that is sorted by order; no two requests have the same."""
    at = bisect_left(queue, request.order, key=_order)
    assert queue[at] is request
    del queue[at]


def _in_prefill(request: Request) -> bool:
    """Sorts requests that only need their next token first, since a long prompt must not delay them."""
    for seq in request.seqs:  # noqa: SIM110 - any() takes twice as long
        if len(seq.tokens) - seq.kv.computed[0] > 1:
            return True
    return False
