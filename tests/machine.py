"""A machine whose steps take as long as a table says, and drafters that are right as often as a text lets them: what the
controller wins and loses, on a clock that nothing but these steps moves."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.fake_model import VOCAB, Deferred, DeferredTicket, FakeRunner, draw
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import TARGET, UPPER, Exited, KVGroup
from headrace.data.types import Draft, Request, Sequence, Status
from headrace.drafting.base import Drafter, MarkFilled, RunModel, TargetFeed
from headrace.drafting.speculation import Speculation, upper_rows
from headrace.engine.engine import Engine
from headrace.runner.early_exit import MOST_BEHIND

# Milliseconds of a step by its rows: a 1.5B model on two cores. From eight rows on arithmetic bounds them, in tiles of eight.
STEPS = {1: 16.5, 3: 17.5, 4: 18.2, 6: 22.0, 8: 27.3, 9: 36.0, 16: 52.0, 17: 60.0, 24: 78.0, 32: 100.0, 64: 195.0}
DRAFT, DRAFT_ROW, TOKEN = 4.0, 0.6, 1.0  # its 0.5B draft: a step, that of each sequence more, and a token to catch up
PROMPT = 48


@dataclass
class Clock:
    """Milliseconds. `slow` says how much longer than usual a step takes at a time; `work` is what they would take otherwise."""

    now: float = 0.0
    work: float = 0.0
    slow: Callable[[float], float] = lambda now: 1.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, milliseconds: float) -> None:
        self.work += milliseconds
        self.now += milliseconds * self.slow(self.now)


def step_time(rows: int) -> float:
    known = sorted(STEPS)
    low = max((each for each in known if each <= rows), default=known[0])
    high = min((each for each in known if each >= rows), default=None)
    if high is None or high == low:
        return STEPS[low] * max(rows, low) / low
    return STEPS[low] + (STEPS[high] - STEPS[low]) * (rows - low) / (high - low)


class Machine(Deferred):
    """The fake model, which takes its time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(FakeRunner(2048, 8), 1)
        self.clock = clock

    def run_until(self, ticket: DeferredTicket) -> None:
        began = self.clock.now
        for plan, _ in self._queue:
            if plan.feeds:
                self.clock.pass_by(step_time(plan.num_tokens))
        super().run_until(ticket)
        assert ticket.output is not None
        ticket.output.seconds = self.clock.now - began


@dataclass
class Exits:
    """How requests with exits run: the share of the layers below the exit, and how often a token leaves there. A cascade is the
    same with a smaller model below."""

    below: float = 0.3
    often: float = 0.7
    rng: random.Random = field(default_factory=lambda: random.Random(3))


class EarlyMachine(Machine):
    """The fake model with exits. The layers above see what they have missed with the next token that does not leave."""

    def __init__(self, clock: Clock, exits: Exits) -> None:
        super().__init__(clock)
        self.exits = exits

    def run_until(self, ticket: DeferredTicket) -> None:
        assert self.depth == 1
        ((plan, _),) = self._queue
        Deferred.run_until(self, ticket)
        output = ticket.output
        assert output is not None
        for number, feed in enumerate(plan.feeds):
            live = self.runner.slots[feed.slot]
            if live.params.leaves and feed.wants and len(live) > live.prompt_len:
                leaves = feed.lag < MOST_BEHIND and self.exits.rng.random() < self.exits.often
                output.exited[number] = Exited(1 if leaves else 2)
                output.unfilled |= {number: 1} if leaves else {}
        began, share = self.clock.now, self.exits.below
        if not output.exited:
            self.clock.pass_by(step_time(plan.num_tokens))
        else:
            self.clock.pass_by(share * step_time(plan.num_tokens))
            if rows := upper_rows(plan, output):
                self.clock.pass_by((1 - share) * step_time(rows))
        output.seconds = self.clock.now - began


@dataclass
class Text:
    """What is easy in a text: how often a token of a lookup, and of a draft model, is what comes; `first` where it is the first
    of a draft. `every`: a lookup finds something for one of so many steps."""

    lookup: float = 0.0
    model: float = 0.0
    every: int = 1
    first: float | None = None


@dataclass
class Scripted:
    """A drafter that knows what will come, and is right as often as the text says."""

    text: Text
    name: str = "ngram"
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def _chance(self) -> float:
        return self.text.lookup

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        if self.name == "ngram" and self.rng.randrange(self.text.every):
            return None
        context = list(seq.tokens)
        for place in range(most):
            right, chance = draw(context, request.seed, seq.decode.index), self._chance()
            if place == 0 and self.text.first is not None:
                chance = self.text.first
            context.append(right if self.rng.random() < chance else (right + 1) % VOCAB)
        return Draft(context[len(seq.tokens) :], list(range(-1, most - 1)), confidence=0 if self.name == "draft" else 2)


class ScriptedModel(Scripted):
    """The same as a model: it takes its steps, and reads what it has not seen first."""

    def __init__(self, text: Text, clock: Clock) -> None:
        super().__init__(text, "draft")
        self.clock = clock

    def _chance(self) -> float:
        return self.text.model

    def lag(self, seq: Sequence) -> int:
        return max(len(seq.tokens) - seq.decode.memory.get(self.name, 0), 1)

    def propose_tokens(self, targets: list[TargetFeed], run: RunModel, mark_filled: MarkFilled) -> None:
        behind = sum(self.lag(target.seq) for target in targets)
        longest = max(len(target.seq.decode.draft.tokens) for target in targets if target.seq.decode.draft is not None)
        self.clock.pass_by(longest * (DRAFT + DRAFT_ROW * len(targets)) + TOKEN * max(behind - 2 * len(targets), 0))
        for target in targets:
            target.seq.decode.memory[self.name] = len(target.seq.tokens)


@dataclass
class Bench:
    """An engine on such a machine, which serves batch after batch and keeps what it has learnt."""

    text: Text
    draft: bool = True
    clock: Clock = field(default_factory=Clock)
    prompt: int = PROMPT
    exits: Exits | None = None

    def __post_init__(self) -> None:
        drafters: list[Drafter] = [Scripted(self.text)]
        if self.draft:
            drafters.append(ScriptedModel(self.text, self.clock))
        self.speculation = Speculation(drafters, 1024, clock=self.clock)
        config = EngineConfig(SchedulerConfig(64, 4096, 1024), CacheConfig(2048, 8))
        machine, groups = Machine(self.clock), (TARGET,)
        if self.exits is not None:
            machine, groups = EarlyMachine(self.clock, self.exits), (TARGET, KVGroup(UPPER, layers=(1,)))
        self.engine = Engine(machine, config, vocab_size=VOCAB, groups=groups, clock=self.clock)
        self.runs = 0

    def run(self, batch: int, tokens: int, *, auto: bool = True) -> float:
        """Milliseconds of work in which a batch decodes, from where each sequence has its first token."""
        engine, self.runs = self.engine, self.runs + 1
        engine.speculation = self.speculation if auto else None
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        prompts = [[self.runs % VOCAB, self.runs // VOCAB, at, *range(self.prompt - 3)] for at in range(batch)]
        requests = [engine.add([each % VOCAB for each in prompt], params.replace(seed=at)) for at, prompt in enumerate(prompts)]
        while any(request.metrics.first_token is None for request in requests):
            engine.step()
        began = self.clock.work
        while engine.busy:
            engine.step()
        return self.clock.work - began

    def next_to_exits(self, batch: int, early: int, tokens: int, *, auto: bool = True) -> tuple[float, int]:
        """Milliseconds of work and drafts verified while a batch decodes next to `early` requests that exit early and do not
        end."""
        engine, self.runs = self.engine, self.runs + 1
        engine.speculation = self.speculation if auto else None
        long = SamplingParams(max_tokens=900, ignore_eos=True, exit_threshold=0.5)
        beside = [engine.add([self.runs % VOCAB, at, 7], long.replace(seed=at)) for at in range(early)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        prompts = [[self.runs % VOCAB, self.runs // VOCAB, at, *range(self.prompt - 3)] for at in range(batch)]
        requests = [engine.add([each % VOCAB for each in prompt], params.replace(seed=at)) for at, prompt in enumerate(prompts)]
        while any(request.metrics.first_token is None for request in (*requests, *beside)):
            engine.step()
        began = self.clock.work
        while any(request.status is not Status.FINISHED for request in requests):
            engine.step()
        took = self.clock.work - began
        for request in beside:
            engine.abort(request.id)
        while engine.busy:
            engine.step()
        return took, sum(request.metrics.drafts for request in requests)

    def gain(self, batch: int, tokens: int, runs: int) -> float:
        """How much longer plain steps would take for so many runs; below 1: drafting lost time."""
        plain = runs * (tokens - 1) * step_time(batch)
        return plain / sum(self.run(batch, tokens) for _ in range(runs))
