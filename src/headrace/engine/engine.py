"""The engine loop. Every decoding method, batched with every other, runs through `Engine.step`."""

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Series
from typing import Any

from headrace.data.config import Audio, EngineConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import (
    HIDDEN,
    TARGET,
    Answers,
    Failed,
    Feed,
    KVGroup,
    RankLostError,
    Sample,
    StepOutput,
    StepPlan,
    Where,
    wanted,
)
from headrace.data.sources import Source, Tokens
from headrace.data.torch_threads import keep_torch_threads
from headrace.data.types import Child, Delta, Draft, Holding, Request, Sequence, Status, Wire
from headrace.decoding.base import Outputs, Strategy
from headrace.decoding.constrained import Constraint, Grammars
from headrace.decoding.methods import strategy_for
from headrace.decoding.processors import Processor, ProcessorError
from headrace.decoding.prompts import Scored
from headrace.decoding.stopping import Stopping
from headrace.drafting.base import check_draft
from headrace.drafting.speculation import Speculation
from headrace.engine.admission import AdmissionError, Limits, admit, constraint_of, groups_filled, with_adapter
from headrace.engine.children import Children, Outbox
from headrace.engine.executor import Done, Executor, Ticket
from headrace.engine.feeding import FeedWork, Flight
from headrace.engine.resume import resume
from headrace.engine.scheduler import Scheduler
from headrace.kv.blocks import BlockManager
from headrace.text.tokenizer import Tokenizer

__all__ = ["AdmissionError", "Engine"]

log = logging.getLogger("headrace")


class Engine:
    """Runs requests to their ends: `add` queues one, `step` returns the deltas of one step. One thread calls it. The loop has
    no branches for prefill, decode, beams or speculation.

    vocab_size: bound of token ids. eos_ids: end tokens, unless the request ignores them. speculation: proposes drafts for the
    requests that take them. groups: KV groups, the target's first. mask_id: mask token of a model that fills in masks. start:
    first token of the decoder of an encoder-decoder that reads text; `add` then takes that text as its prompt. audio: windows
    of sound that the encoder reads. judges: the exits have classifiers. adapters: digest of each adapter by name. clock:
    seconds, for the requests' metrics.
    """

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        eos_ids: frozenset[int] = frozenset(),
        speculation: Speculation | None = None,
        groups: tuple[KVGroup, ...] = (TARGET,),
        mask_id: int | None = None,
        start: int | None = None,
        audio: Audio | None = None,
        judges: bool = False,
        adapters: Mapping[str, bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.executor = executor
        self.adapters = adapters or {}
        self.speculation = speculation
        if speculation is not None:
            speculation.vocab_size = vocab_size
        self.blocks = BlockManager(config.cache, groups)
        self.scheduler = Scheduler(config.scheduler, self.blocks, executor.depth)
        self.stopping = Stopping(tokenizer, config.scheduler.max_model_len)
        self._ids, self._names = itertools.count(), itertools.count()
        self.children = Children(self.scheduler, self.stopping, vocab_size, self._ids)
        self.limits = Limits(
            config, vocab_size, has_tokenizer=tokenizer is not None, mask_id=mask_id, start=start, audio=audio, judges=judges
        )
        self.eos_ids = eos_ids
        self.grammars = Grammars(tokenizer, vocab_size, eos_ids) if tokenizer is not None else None
        self.requests: dict[str, Request] = {}
        self.fed = 0  # tokens of the last step
        # Failed steps since the last successful one; a retried request's step does not reset it.
        self.failing = 0
        self._lost: RankLostError | None = None
        self._flights: deque[Flight] = deque()
        self._outbox = Outbox()
        self._idle = 0  # steps in a row without a feed
        self._checked_wants: Any = ()  # the wants checked last
        self._clock = clock

    # -- requests ------------------------------------------------------------------------------------------------------
    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        strategy: Strategy | None = None,
        processors: tuple[Processor, ...] = (),
        salt: bytes = b"",
        constraint: Constraint | None = None,
        turn: int = 0,
        seed: int | None = None,
        given: Series[int] = (),
        source: Source | None = None,
    ) -> Request:
        """Queue a request. Of equal priorities the smallest `turn` starts first, then the earliest.

        salt: separates tenants in the prefix cache. constraint: the compiled structured outputs; None: compiled here. seed:
        None: that of `params`, or random. given: tokens that another engine sampled; the output goes on after them. source: of
        an encoder-decoder; None for one that reads text, whose prompt is the source.

        Raises AdmissionError, with what to change, for a request that could never run.
        """
        arrival, seed = next(self._ids), params.seed if seed is None else seed
        name = request_id or self._free_name()
        if name in self.requests:
            raise AdmissionError("request_id", f"request id {name!r} is in use; choose another")
        # Without prefix caching only a request's own sequences share its prefix.
        salt = with_adapter(salt, params, self.adapters)
        root = salt if self.config.cache.prefix_caching else salt + arrival.to_bytes(8, "little")
        first = list(prompt)
        if self.limits.start is not None:
            source, first = Tokens(tuple(prompt)), [self.limits.start]
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        request = Request(
            id=name,
            prompt=first,
            source=source,
            params=params,
            seed=secrets.randbits(64) if seed is None else seed,
            strategy=strategy or strategy_for(params, self.limits.mask_id, self.config.scheduler.max_model_len),
            arrival=arrival,
            turn=turn,
            tenant=salt,
            processors=tuple(processors),
            stop_ids=eos_ids.union(params.stop_token_ids) if params.stop_token_ids else eos_ids,
        )
        admit(request, self.limits)
        self._set_properties(request)
        seq = self._sequence(request, root)
        self._reserve(params)
        self.stopping.begin(request, seq)
        seq.decode.constraint = constraint or constraint_of(params, self.grammars, self.limits.vocab_size)
        resume(request, seq, given, self.stopping, self.limits.vocab_size)
        request.seqs.append(seq)
        request.metrics.arrival = self._clock()
        self.requests[name] = request
        self.scheduler.add(request)
        return request

    def _set_properties(self, request: Request) -> None:
        """Set what the strategy and the parameters of a new request allow. Raises AdmissionError."""
        request.drafts = request.strategy.nodes(request) > 0
        request.overlaps = self._overlaps(request)
        if request.params.prompt_logprobs is not None:
            request.strategy = Scored(request.strategy)
        request.shares = request.strategy.shares(request)
        request.uncut = request.strategy.uncut
        request.observes = _observes(request.strategy)
        request.speculates = self.speculation is not None and self.speculation.serves(request)
        if request.speculates and self.speculation is not None and (why := self.speculation.refusal(request)):
            raise AdmissionError("verification", why)

    def _sequence(self, request: Request, root: bytes) -> Sequence:
        """The request's first sequence. Its cached prefix is rooted in the tenant and the source."""
        groups, tokens, wire = self.blocks.groups, request.prompt, Wire()
        kv = Holding(root, groups_filled(request.params, groups, self.limits.judges), computed=[0] * len(groups))
        if request.source is not None:
            kv.source = request.source.positions
            kv.root += request.source.digest
        kv.tables = self.blocks.new_tables(kv.source)
        wire.synced = [0] * len(kv.tables)
        return Sequence(next(self._ids), list(tokens), len(tokens), kv, wire)

    def _overlaps(self, request: Request) -> bool:
        """Whether a chunk of the prompt may be submitted before the answers to the chunk before it are in. A strategy that
        observes answers may use them for its next wants; rows of sources and of exits are fed in an order of their own."""
        in_order = request.source is not None or bool(self.scheduler.feeding.uppers)
        return not in_order and not request.drafts and not _observes(request.strategy)

    def _free_name(self) -> str:
        """A request id that no open request uses."""
        return next(name for name in map("request-{}".format, self._names) if name not in self.requests)

    def _reserve(self, params: SamplingParams) -> None:
        if params.penalty_alpha:
            try:
                self.executor.reserve(HIDDEN)
            except ValueError as error:
                raise AdmissionError("penalty_alpha", str(error)) from None

    def abort(self, request_id: str) -> None:
        """End a request. Its blocks are free at once, or after its step in flight has landed."""
        request = self.requests.get(request_id)
        if request is None or request.aborted:
            return
        request.aborted = True
        if not request.in_flight:
            self._end(request, "abort")

    @property
    def busy(self) -> bool:
        """Whether requests are open or deltas wait for delivery."""
        return bool(self.requests or self._outbox)

    def tokens_read(self, name: str) -> int:
        """Prompt tokens of an open request that are computed or found in the prefix cache; 0 if there is no such request."""
        request = self.requests.get(name)
        return 0 if request is None else max((seq.kv.computed[0] for seq in request.seqs), default=0)

    # -- the loop ------------------------------------------------------------------------------------------------------
    @keep_torch_threads()
    def step(self) -> list[Delta]:
        """Run one step; returns the deltas of all requests, empty if there is nothing to do.

        Raises RankLostError if a part of the model is lost; every later step raises it, too.
        """
        if self._lost is not None:
            raise self._lost
        self.fed = 0
        self._launch()
        if self._flights:
            self._idle = 0
            flight = self._flights.popleft()
            self.fed = flight.plan.num_tokens
            output = self._land(flight)
            if output is not None:
                self.scheduler.advance(flight, output)
                now = self._clock()
                for request, outputs in self._caught_up(flight, output):
                    self._call_hook(request, self._commit, request, outputs, now)
            self._sweep(flight)
        elif self.requests and not self._outbox and not self.scheduler.wait_for_store():
            self._end_unfed()
        return self._deliver()

    def _call_hook(self, request: Request, hook: Callable[..., Any], *args: Any) -> Any:
        """The result of a strategy's or constraint's method. If it raises, returns None and fails this request alone; `_sweep`
        ends it."""
        try:
            return hook(*args)
        except Exception as error:
            # A strategy, processor or constraint may raise anything.
            level = logging.DEBUG if isinstance(error, ProcessorError) else logging.ERROR
            log.log(level, "request %s failed", request.id, exc_info=True)
            request.error = request.error or f"{type(error).__name__}: {error}"
            return None

    def _launch(self) -> None:
        """Schedule, draft and submit plans until the executor is full."""
        while len(self._flights) < self.executor.depth:
            self._propose()
            if (flight := self.scheduler.schedule()) is None:
                return
            # Registered before any hook runs, so that the flight lands whatever a hook does.
            self._flights.append(flight)
            if self.speculation is not None:
                self._run_draft_models(self.speculation, flight)
            now = self._clock()
            for work in flight.works:
                if work.request.metrics.scheduled is None:
                    work.request.metrics.scheduled = now
                self._call_hook(work.request, self._set_wants, work)
            if flight.ticket is None:
                flight.ticket = self._submit(flight.plan)

    def _submit(self, plan: StepPlan) -> Ticket:
        try:
            return self.executor.submit(plan)
        except RankLostError as error:
            self._lost = error
            raise
        except Exception as error:
            return Done(None, error)

    def _set_wants(self, work: FeedWork) -> None:
        """Set a feed's wants and, under a grammar, the masks of the tokens that may be drawn."""
        seq, feed, last = work.seq, work.feed, work.last
        decode = seq.decode
        if decode.constraint is not None and last:
            feed.allowed = decode.constraint.masks(feed.nodes, feed.parents)
        wants = work.request.strategy.want(work.request, seq, feed, last)
        # Most feeds share one tuple of wants.
        if wants is not self._checked_wants:
            if not isinstance(wants, tuple) or not all(map(wanted, wants)):
                raise ValueError(f"the strategy returned unknown wants: {wants!r}")
            self._checked_wants = wants
        if last and decode.draft is not None and decode.draft.observed:
            wants = (*wants, Sample(decode.index, at=Where.NODES))
        feed.wants = wants

    def _propose(self) -> None:
        """Give the sequences of idle requests their drafts for the next step; the scheduler finds room for them."""
        scheduler = self.scheduler
        for request in scheduler.candidates:
            if request.drafts and not request.in_flight:
                for seq in request.seqs:
                    seq.decode.draft = self._call_hook(request, self._required_draft, request, seq)
                if request.error is not None:
                    self._end(request, "error")
        if self.speculation is not None and not self.speculation.pauses():
            idle = [request for request in scheduler.running if not request.in_flight and request not in scheduler.retries]
            decoding = [(request, seq) for request in idle for seq in request.seqs if seq.pending == 1]
            others = [request for request, _ in decoding if not request.speculates]
            early = sum(request.params.leaves for request in others)
            self.speculation.propose([pair for pair in decoding if pair[0].speculates], len(decoding), early)

    def _required_draft(self, request: Request, seq: Sequence) -> Draft | None:
        """The draft that a strategy's next step must verify. Raises ValueError for a draft that no step can feed."""
        draft: Draft | None = request.strategy.draft(request, seq)
        if draft is None:
            return None
        most = request.strategy.nodes(request)
        if not draft.tokens:
            raise ValueError("the strategy drafted no node; where there is nothing to verify, draft() says None")
        if len(draft.tokens) > most:
            raise ValueError(f"the strategy drafted {len(draft.tokens)} nodes, and nodes() says at most {most}")
        check_draft(draft, self.limits.vocab_size)
        return draft

    def _run_draft_models(self, speculation: Speculation, flight: Flight) -> None:
        """Let draft models choose the tokens of the drafts that have room. Their plans run before the target's plan of this
        step."""
        plan = flight.plan

        def run(model: int, feeds: list[Feed]) -> list[Answers]:
            # Changes of slots, tables and pools belong to the target's plan and hold for all models, so they run first.
            ahead = StepPlan(plan.step, 0, plan.free, plan.new, plan.tables, plan.moves, plan.copies)
            try:
                self.executor.submit(ahead).result()
            except Exception as error:
                # Part of the changes may have been carried out, so the target's step fails too.
                flight.ticket = Done(None, error)
                raise
            plan.free, plan.new, plan.tables, plan.moves, plan.copies = [], [], [], [], []
            return self.executor.submit(StepPlan(plan.step, model, feeds=feeds)).result().feeds

        works = [work for work in flight.works if work.seq.decode.draft is not None and not work.seq.decode.draft.required]
        for work in speculation.run_models(works, run, self.blocks.fill):
            self.scheduler.drop_draft(work)

    def _land(self, flight: Flight) -> StepOutput | None:
        """The step's output; None if it failed. A failed step commits nothing: its requests are retried one by one, and a
        request whose own step fails ends with the error."""
        output: StepOutput | None = None
        try:
            output = flight.ticket.result()
            if len(output.feeds) != len(flight.works):
                raise RuntimeError(f"{len(output.feeds)} answers to {len(flight.works)} feeds")
            if list(map(len, output.feeds)) != [len(work.feed.wants) for work in flight.works]:
                raise RuntimeError("a feed was not answered as it wanted")
            self.failing = self.failing if flight.retry else 0
        except RankLostError as error:
            self._lost = error
            raise
        except Exception as error:
            # An error of the back end must not end the other requests.
            output = None
            self.failing += 1
            if flight.retry:
                flight.works[0].request.error = f"the step failed: {error}"
            log.exception(
                "a step failed; %s", "its request ends" if flight.retry else "its requests are tried again, one by one"
            )
            self.scheduler.fail(flight)
        self.scheduler.land(flight)
        if self.speculation is not None and output is not None and output.seconds:
            self.speculation.record_step(flight.plan, output)
        return output

    def _caught_up(self, flight: Flight, output: StepOutput) -> Iterator[tuple[Request, Outputs]]:
        """Yields the requests whose sequences all have answers, with these. Strategies observe every feed on the way, prompt
        chunks included."""
        for number, exited in output.exited.items():
            flight.works[number].seq.decode.exited = exited
        pairs = zip(flight.works, output.feeds, strict=True)
        # The feeds of one request are next to each other.
        for request, fed in itertools.groupby(pairs, lambda pair: pair[0].request):
            outputs = []
            for work, answers in fed:
                if work.stale:
                    continue
                seq = work.seq
                dead = "" if seq.decode.constraint is None else seq.decode.constraint.error
                if dead and request.strategy.drops_failed:
                    request.dropped = dead
                else:
                    request.constraint_failed |= bool(dead) and request.error is None
                    request.error = request.error or dead or None
                    for answer in answers:
                        if type(answer) is Failed:
                            request.error = request.error or answer.error
                if request.observes and request.error is None and not request.aborted:
                    self._call_hook(request, request.strategy.observe, request, seq, work.feed, answers)
                if work.last:
                    outputs.append((seq, answers))
            if outputs and request.error is None and not request.aborted:
                yield request, outputs

    def _commit(self, request: Request, outputs: Outputs, now: float) -> None:
        """Turn the answers into children: append, accept, fork or drop."""
        chosen: list[list[Child]] = request.strategy.select(request, outputs)
        if len(chosen) != len(outputs):
            raise ValueError(f"the strategy gave children for {len(chosen)} sequences of {len(outputs)}")
        changed: list[tuple[Sequence, list[Sequence]]] = []
        live = 0
        for (parent, answers), children in zip(outputs, chosen, strict=True):
            draft = parent.decode.draft
            survivors = self.children.become(request, parent, children, self._outbox)
            if draft is not None and parent.decode.draft is None and not draft.required and self.speculation is not None:
                self.speculation.observe(request, parent, draft, children[0].path, answers)
            live += len(survivors)
            if survivors != [parent]:
                changed.append((parent, survivors))
        # More sequences would take the slots of other requests.
        if live > request.width:
            raise ValueError(f"the strategy holds {live} sequences, and width() says at most {request.width}")
        # Ended parents first: the forks of others may need their slots.
        changed.sort(key=lambda pair: bool(pair[1]))
        for parent, survivors in changed:
            self.scheduler.commit(request, parent, survivors)
        # A strategy with required drafts has passes that add no token.
        if not request.drafts or any(child.token is not None or child.path for children in chosen for child in children):
            request.metrics.wrote(now)
        if request.error is None and (request.strategy.done(request) or not request.seqs):
            self._end(request, None)

    def _end_unfed(self) -> None:
        """End all requests if two steps in a row could feed none: a fault of the engine, and no caller may wait for ever."""
        self._idle += 1
        if self._idle < 2:
            return
        log.critical("no request can be fed; all end. This is a fault of Headrace: please report it")
        for request in list(self.requests.values()):
            request.error = "the engine can feed no request; this is a fault of Headrace, please report it"
            self._end(request, "error")

    def _sweep(self, flight: Flight) -> None:
        """End the flight's requests that were aborted or failed."""
        for request in [work.request for work in flight.works]:
            open_ = request.status is not Status.FINISHED and not request.in_flight
            if open_ and (request.error is not None or request.aborted):
                self._end(request, "abort" if request.error is None else "error")

    def _end(self, request: Request, reason: str | None) -> None:
        """Take a request out of the loop; open outputs end with `reason`."""
        open_seqs = list(request.seqs)
        self.scheduler.finish(request)
        del self.requests[request.id]
        request.metrics.finished = self._clock()
        if self.speculation is not None:
            self.speculation.end(request)
        if request.strategy.streams:
            self._outbox.extend(self.children.close(request, seq, reason or "stop") for seq in open_seqs)
        elif reason is None:
            self._outbox.extend(self._call_hook(request, self.children.results, request) or ())
        last = self._outbox.last_of(request.id)
        if last is None or (request.error is not None and last.error is None):
            reason = reason if request.error is None else "error"
            failed = request.constraint_failed
            last = Delta(request.id, 0, finish_reason=reason, error=request.error, constraint_failed=failed)
            self._outbox.append(last)
        last.finished = True

    def _deliver(self) -> list[Delta]:
        """Return the deltas. Static batching delivers a batch when its last request is done."""
        if self.config.scheduler.policy == "static" and self.scheduler.running:
            return []
        return self._outbox.take()

    def check(self) -> None:
        """Raise AssertionError unless block tables, reference counts and the prefix cache agree."""
        self.scheduler.check()


def _observes(strategy: Strategy) -> bool:
    """Whether a strategy sees the answers to each feed."""
    return getattr(strategy.observe, "__func__", None) is not Strategy.observe
