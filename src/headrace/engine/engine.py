"""The loop. Every decoding method, batched with every other, goes through `Engine.step`."""

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Any

import numpy as np

from headrace.data.config import EngineConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import HIDDEN, TARGET, Answers, Failed, Feed, KVGroup, Sample, StepOutput, StepPlan, Where, wanted
from headrace.data.torch_threads import keep_torch_threads
from headrace.data.types import Child, Delta, Draft, Holding, Request, Sequence, Status, Wire
from headrace.decoding.base import Outputs, Strategy
from headrace.decoding.constrained import Constraint, ConstraintError, Grammars
from headrace.decoding.methods import strategy_for
from headrace.decoding.processors import Processor, ProcessorError
from headrace.decoding.prompts import Scored
from headrace.decoding.stopping import Stopping
from headrace.drafting.base import check_draft
from headrace.drafting.speculation import Speculation
from headrace.engine.admission import AdmissionError, Limits, admit, groups_filled
from headrace.engine.children import Children
from headrace.engine.executor import Done, Executor, Ticket
from headrace.engine.feeding import Flight, Work
from headrace.engine.outbox import Outbox
from headrace.engine.scheduler import Scheduler
from headrace.kv.blocks import BlockManager
from headrace.text.tokenizer import Tokenizer

__all__ = ["AdmissionError", "Engine"]

log = logging.getLogger("headrace")


class Engine:
    """Requests in, deltas out. One thread calls it; it knows neither prefill nor decode, neither beam nor speculation.

    `vocab_size` bounds token ids; `eos_ids` end an output unless the request ignores them. `speculation` proposes drafts for
    the requests that take them; `groups` are the KV groups, the target's first. `mask_id`: of models that fill in masks.
    `start`: what an encoder-decoder's output begins with; a prompt is its source. `judges`: exits have classifiers.
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
        judges: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.executor = executor
        self.speculation = speculation
        if speculation is not None:
            speculation.vocab_size = vocab_size
        self.blocks = BlockManager(config.cache, groups)
        self.scheduler = Scheduler(config.scheduler, self.blocks, executor.depth)
        self.stopping = Stopping(tokenizer, config.scheduler.max_model_len)
        self._ids = itertools.count()
        self.children = Children(self.scheduler, self.stopping, vocab_size, self._ids)
        self.limits = Limits(
            config, vocab_size, has_tokenizer=tokenizer is not None, mask_id=mask_id, start=start, judges=judges
        )
        self.eos_ids = eos_ids
        self.grammars = Grammars(tokenizer, vocab_size, eos_ids) if tokenizer is not None else None
        self.requests: dict[str, Request] = {}
        self.fed = 0  # tokens of the last step
        self.failing = 0  # steps that failed since the last that went well; to try a request again is not held to be one
        self._flights: deque[Flight] = deque()
        self._outbox = Outbox()
        self._names = itertools.count()
        self._idle = 0  # steps in a row that could feed nobody
        self._lawful: Any = ()  # wants that were looked at last
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
    ) -> Request:
        """Queue a request; of equal priorities the smallest `turn` begins first, then who came first. `constraint`: what its
        structured outputs were compiled to; else that is done here.

        Raises AdmissionError, saying what to change, for whatever could never run.
        """
        arrival = next(self._ids)
        name = request_id or self._free_name()
        if name in self.requests:
            raise AdmissionError("request_id", f"request id {name!r} is in use; choose another")
        # Without the cache a prefix is shared with nobody but its own siblings.
        root = salt if self.config.cache.prefix_caching else salt + arrival.to_bytes(8, "little")
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        request = Request(
            id=name,
            prompt=list(prompt),
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            strategy=strategy or strategy_for(params, self.limits.mask_id, self.config.scheduler.max_model_len),
            arrival=arrival,
            turn=turn,
            tenant=salt,
            processors=tuple(processors),
            stop_ids=eos_ids.union(params.stop_token_ids) if params.stop_token_ids else eos_ids,
        )
        admit(request, self.limits)
        request.drafts = request.strategy.nodes(request) > 0
        if params.prompt_logprobs is not None:
            request.strategy = Scored(request.strategy)
        request.shares = request.strategy.shares(request)
        request.observes = getattr(request.strategy.observe, "__func__", None) is not Strategy.observe
        request.speculates = self.speculation is not None and self.speculation.serves(request)
        if request.speculates and self.speculation is not None and (why := self.speculation.refusal(request)):
            raise AdmissionError("verification", why)
        seq = self._sequence(request, root)
        self._reserve(params)
        self.stopping.begin(request, seq)
        seq.decode.constraint = constraint or self._constraint(params)
        request.seqs.append(seq)
        request.metrics.arrival = self._clock()
        self.requests[name] = request
        self.scheduler.add(request)
        return request

    def _sequence(self, request: Request, root: bytes) -> Sequence:
        """The first sequence of a request: its prompt, or, where that is a source, what every output begins with."""
        groups, tokens, wire = self.blocks.groups, request.prompt, Wire()
        kv = Holding(root, groups_filled(request.params, groups, self.limits.judges), computed=[0] * len(groups))
        if self.limits.start is not None:
            tokens = [self.limits.start]
            kv.source, kv.tables, wire.synced = len(request.prompt), [[], []], [0, 0]
            kv.root += sha256(np.array(request.prompt, dtype="<i4").tobytes()).digest()
        return Sequence(next(self._ids), list(tokens), len(tokens), kv, wire)

    def _free_name(self) -> str:
        """A request id that no open request has, a caller's own ids included."""
        return next(name for name in map("request-{}".format, self._names) if name not in self.requests)

    def _reserve(self, params: SamplingParams) -> None:
        if params.penalty_alpha:
            try:
                self.executor.reserve(HIDDEN)
            except ValueError as error:
                raise AdmissionError("penalty_alpha", str(error)) from None

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.structured_outputs is None:
            return None
        if self.grammars is None:
            raise AdmissionError("structured_outputs", "structured_outputs need a tokenizer; load the model with its tokenizer")
        try:
            return self.grammars.constraint(params.structured_outputs)
        except ConstraintError as error:
            raise AdmissionError("structured_outputs", str(error)) from None

    def abort(self, request_id: str) -> None:
        """End a request as it stands; its blocks come back at once, or when the step in flight has landed."""
        request = self.requests.get(request_id)
        if request is None or request.aborted:
            return
        request.aborted = True
        if not request.in_flight:
            self._end(request, "abort")

    @property
    def busy(self) -> bool:
        return bool(self.requests or self._outbox)

    def tokens_read(self, name: str) -> int:
        """How many tokens of an open request's prompt have been computed, or found in the prefix cache, so far; else 0."""
        request = self.requests.get(name)
        return 0 if request is None else max((seq.kv.computed[0] for seq in request.seqs), default=0)

    # -- the loop ------------------------------------------------------------------------------------------------------
    @keep_torch_threads()
    def step(self) -> list[Delta]:
        """Run one step and return what it added to whom; empty when there is nothing to do."""
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
                    self._ask(request, self._commit, request, outputs, now)
            self._sweep(flight)
        elif self.requests and not self._outbox:
            self._stuck()
        return self._deliver()

    def _ask(self, request: Request, hook: Callable[..., Any], *args: Any) -> Any:
        """What a hook says. One that raises fails its request and no other, which the step's end sweeps out; it says None."""
        try:
            return hook(*args)
        except Exception as error:  # a strategy, processor or constraint may raise anything
            level = logging.DEBUG if isinstance(error, ProcessorError) else logging.ERROR
            log.log(level, "request %s failed", request.id, exc_info=True)
            request.error = request.error or f"{type(error).__name__}: {error}"
            return None

    def _launch(self) -> None:
        """Schedule, draft and submit until the executor is full."""
        while len(self._flights) < self.executor.depth:
            self._propose()
            if (flight := self.scheduler.schedule()) is None:
                return
            self._flights.append(flight)  # before any hook runs: whatever one does, the flight lands
            if self.speculation is not None:
                self._fill(self.speculation, flight)
            now = self._clock()
            for work in flight.works:
                if work.request.metrics.scheduled is None:
                    work.request.metrics.scheduled = now
                self._ask(work.request, self._want, work)
            if flight.ticket is None:
                flight.ticket = self._submit(flight.plan)

    def _submit(self, plan: StepPlan) -> Ticket:
        try:
            return self.executor.submit(plan)
        except Exception as error:
            return Done(None, error)

    def _want(self, work: Work) -> None:
        """Put into a feed what is wanted of it, and what may be drawn where a grammar says so."""
        seq, feed, last = work.seq, work.feed, work.last
        decode = seq.decode
        if decode.constraint is not None and last:
            feed.allowed = decode.constraint.masks(feed.nodes, feed.parents)
        wants = work.request.strategy.want(work.request, seq, feed, last)
        if wants is not self._lawful:  # most feeds want the same, and share it
            if not isinstance(wants, tuple) or not all(map(wanted, wants)):
                raise ValueError(f"the strategy wants what no step gives: {wants!r}")
            self._lawful = wants
        if last and decode.draft is not None and decode.draft.observed:
            wants = (*wants, Sample(decode.index, at=Where.NODES))
        feed.wants = wants

    def _propose(self) -> None:
        """Give the sequences of idle requests what their next step is to verify; the scheduler finds room for it."""
        scheduler = self.scheduler
        for request in scheduler.candidates:
            if request.drafts and not request.in_flight:
                for seq in request.seqs:
                    seq.decode.draft = self._ask(request, self._required, request, seq)
                if request.error is not None:
                    self._end(request, "error")
        if self.speculation is not None and not self.speculation.pauses():
            idle = [request for request in scheduler.running if not request.in_flight and request not in scheduler.retries]
            decoding = [(request, seq) for request in idle for seq in request.seqs if seq.pending == 1]
            others = [request for request, _ in decoding if not request.speculates]
            early = sum(request.params.leaves for request in others)
            self.speculation.propose([pair for pair in decoding if pair[0].speculates], len(decoding), early)

    def _required(self, request: Request, seq: Sequence) -> Draft | None:
        """What a strategy's next step must verify. Raises ValueError where no step could feed it."""
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

    def _fill(self, speculation: Speculation, flight: Flight) -> None:
        """Let a model that drafts say which tokens the drafts are that found room."""
        plan = flight.plan

        def run(model: int, feeds: list[Feed]) -> list[Answers]:
            # What changes slots, tables and pools comes first, and with the target's plan: the companions share it.
            ahead = StepPlan(plan.step, 0, plan.free, plan.new, plan.tables, plan.moves, plan.copies)
            try:
                self.executor.submit(ahead).result()
            except Exception as error:  # what of it was carried out is not known, so the target's step has failed with it
                flight.ticket = Done(None, error)
                raise
            plan.free, plan.new, plan.tables, plan.moves, plan.copies = [], [], [], [], []
            return self.executor.submit(StepPlan(plan.step, model, feeds=feeds)).result().feeds

        works = [work for work in flight.works if work.seq.decode.draft is not None and not work.seq.decode.draft.required]
        for work in speculation.run_models(works, run, self.blocks.fill):
            self.scheduler.drop_draft(work)

    def _land(self, flight: Flight) -> StepOutput | None:
        """The step's result. A step that fails commits nothing: its requests are tried again one by one, and those end with the
        error whose own step fails."""
        output: StepOutput | None = None
        try:
            output = flight.ticket.result()
            if len(output.feeds) != len(flight.works):
                raise RuntimeError(f"{len(output.feeds)} answers to {len(flight.works)} feeds")
            if list(map(len, output.feeds)) != [len(work.feed.wants) for work in flight.works]:
                raise RuntimeError("a feed was not answered as it wanted")
            self.failing = self.failing if flight.retry else 0
        except Exception as error:  # whatever the back end raises must not take the other requests down
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
        """The requests whose sequences all have logits now, with them; strategies see every feed on the way."""
        for number, exited in output.exited.items():
            flight.works[number].seq.decode.exited = exited
        pairs = zip(flight.works, output.feeds, strict=True)
        for request, fed in itertools.groupby(pairs, lambda pair: pair[0].request):  # a request's works come together
            outputs = []
            for work, answers in fed:
                seq = work.seq
                dead = "" if seq.decode.constraint is None else seq.decode.constraint.error
                if dead and request.strategy.drops_failed:
                    request.dropped = dead  # it brings no candidates, so it has no children
                else:
                    request.constraint_failed |= bool(dead) and request.error is None
                    request.error = request.error or dead or None
                    for answer in answers:
                        if type(answer) is Failed:
                            request.error = request.error or answer.error
                if request.observes and request.error is None and not request.aborted:
                    self._ask(request, request.strategy.observe, request, seq, work.feed, answers)
                if work.last:
                    outputs.append((seq, answers))
            if outputs and request.error is None and not request.aborted:
                yield request, outputs

    def _commit(self, request: Request, outputs: Outputs, now: float) -> None:
        """Accept, append, fork, drop: every parent becomes its children, and what ended leaves the request."""
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
            if survivors != [parent]:  # else it goes on as it is
                changed.append((parent, survivors))
        if live > request.width:  # the slots of others
            raise ValueError(f"the strategy holds {live} sequences, and width() says at most {request.width}")
        changed.sort(key=lambda pair: bool(pair[1]))  # those that end first: their slots may be all there are
        for parent, survivors in changed:
            self.scheduler.commit(request, parent, survivors)
        # a strategy with drafts of its own has passes that only mend them
        if not request.drafts or any(child.token is not None or child.path for children in chosen for child in children):
            request.metrics.wrote(now)
        if request.error is None and (request.strategy.done(request) or not request.seqs):
            self._end(request, None)

    def _stuck(self) -> None:
        """Requests are open, nothing is under way, and nobody can be fed: a fault of the engine. They end with it, so that no
        caller waits for ever."""
        self._idle += 1
        if self._idle < 2:
            return
        log.critical("no request can be fed; all end. This is a fault of Headrace: please report it")
        for request in list(self.requests.values()):
            request.error = "the engine can feed no request; this is a fault of Headrace, please report it"
            self._end(request, "error")

    def _sweep(self, flight: Flight) -> None:
        """End what was aborted or has failed."""
        for request in [work.request for work in flight.works]:
            if (request.error is not None or request.aborted) and request.status is not Status.FINISHED:
                self._end(request, "abort" if request.error is None else "error")

    def _end(self, request: Request, reason: str | None) -> None:
        """Take a request out of the loop; outputs that are still open end with `reason`."""
        open_seqs = list(request.seqs)
        self.scheduler.finish(request)
        del self.requests[request.id]
        request.metrics.finished = self._clock()
        if self.speculation is not None:
            self.speculation.end(request)
        if request.strategy.streams:
            self._outbox.extend(self.children.close(request, seq, reason or "stop") for seq in open_seqs)
        elif reason is None:
            self._outbox.extend(self._ask(request, self.children.results, request) or ())
        last = self._outbox.last_of(request.id)
        if last is None or (request.error is not None and last.error is None):
            reason = reason if request.error is None else "error"
            failed = request.constraint_failed
            last = Delta(request.id, 0, finish_reason=reason, error=request.error, constraint_failed=failed)
            self._outbox.append(last)
        last.finished = True

    def _deliver(self) -> list[Delta]:
        """Hand over the deltas; static batching delivers a batch when its last request is done."""
        if self.config.scheduler.policy == "static" and self.scheduler.running:
            return []
        return self._outbox.take()

    def check(self) -> None:
        """Raise AssertionError unless the cache's books are in order."""
        self.blocks.check(self.scheduler.held)
