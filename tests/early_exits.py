"""Tokens that leave a tiny model early: engines with an exit on both back ends, and what must come of them, without a cache."""

import random
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.fake_model import Deferred
from headrace.backends.eager.program import EagerHeads
from headrace.backends.native.heads import NativeHeads
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import (
    HIDDEN,
    PROPAGATED,
    TARGET,
    UPPER,
    Drawn,
    Feed,
    KVGroup,
    NewSlot,
    Sample,
    StepPlan,
    TableDelta,
    Top,
)
from headrace.data.types import Request
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.runner.early_exit import Exit
from headrace.runner.heads import EXIT, Heads
from headrace.runner.runner import Runner
from headrace.runner.span import Span
from headrace.startup import heads as files
from headrace.startup.opening import open_model
from headrace.training.head_kinds import initial_tensors
from headrace.training.teacher import Teacher, read_teacher
from tests.e2e.test_draft_model import Torch
from tests.tiny import VOCAB, finish, tokens_of
from tests.tiny_native import BLOCK, MAX_LEN, native_model, source_of

LAYERS, AFTER = 3, 2
DEEP = 4  # layers where rows are propagated: K and V of the first layer above the exit are the whole model's all the same
Job = tuple[list[int], SamplingParams]


def side_of(kind: type[Torch], layers: int = LAYERS) -> Torch:
    side = kind()
    side.target = native_model(num_layers=layers)
    return side


@lru_cache
def exit_heads(layers: int = LAYERS, after: tuple[int, ...] = (AFTER,)) -> Heads:
    """Exits that disagree with the full model often enough, and are confident now and then. after: the layers below each."""
    model: Any = native_model(num_layers=layers)
    table, norm = model.tokens.weight.detach().bfloat16(), model.norm.weight.detach().float()
    teacher = Teacher(model.config, table, norm, table)
    tensors = {name: x.bfloat16() for name, x in initial_tensors(EXIT, teacher, len(after)).items()}
    tensors["vocab"] = torch.arange(3, VOCAB, dtype=torch.int32)
    for exit in range(len(after)):
        generator = torch.Generator().manual_seed(exit + 1)
        tensors[f"sure.{exit}.weight"] = torch.randn(model.config.hidden_size, generator=generator).bfloat16() / 8
        tensors[f"sure.{exit}.bias"] = torch.zeros(1).bfloat16()
    return Heads(EXIT, len(after), tensors, after, after[0], after)


def parts_of(side: Torch, blocks: int, after: tuple[int, ...] = (AFTER,)) -> tuple[Any, tuple[Exit, ...]]:
    """A target, and its exits."""
    target: Any = side.program(side.target, blocks)
    source, sizes = source_of(side.target), {"num_blocks": blocks, "block_size": BLOCK, "max_positions": MAX_LEN + 64}
    heads = exit_heads(side.target.config.num_layers, after)
    native = side.block == BLOCK
    head = NativeHeads(heads, target, source, threads=1, **sizes) if native else EagerHeads(heads, target, source)
    return target, tuple(Exit(Span(layers), head, number) for number, layers in enumerate(after))


def engine_of(
    side: Torch,
    *,
    blocks: int = 60,
    budget: int = 64,
    seqs: int = 16,
    drafts: bool = True,
    leaves: bool = True,
    upper: tuple[int, ...] = (),
    propagate: bool = False,
    judges: bool = True,
    depth: int = 1,
    after: tuple[int, ...] = (AFTER,),
) -> Engine:
    """`drafts`: for requests that do not exit; `leaves`: there are exits, after `after` layers (`upper`: above the only one);
    `propagate`: exited rows are propagated; `depth`: steps that are under way at once."""
    target, exits = parts_of(side, blocks, after)
    runner: Any = Runner(target, leaves=exits if leaves else None, propagate=propagate)
    if leaves and not propagate:
        runner.reserve(UPPER)
    groups = (TARGET, KVGroup(HIDDEN, "hidden"))
    between = [upper] if upper else [tuple(range(*pair)) for pair in pairwise((*after, side.target.config.num_layers))]
    uppers = [KVGroup(UPPER, PROPAGATED if propagate else "full", layers) for layers in between]
    return Engine(
        InProcess(runner) if depth == 1 else Deferred(runner, depth),
        EngineConfig(SchedulerConfig(seqs, budget, MAX_LEN), CacheConfig(blocks, side.block)),
        vocab_size=VOCAB,
        judges=judges,
        groups=(*groups, *uppers) if leaves else groups,
        speculation=Speculation([PromptLookup()], MAX_LEN, 3) if drafts else None,
    )


class Reference:
    """Every token from all tokens before it, computed anew: each exit in turn, until one is confident."""

    def __init__(self, side: Torch, after: tuple[int, ...] = (AFTER,)) -> None:
        self.blocks, self.after = list(range(-(-MAX_LEN // side.block))), after
        target, exits = parts_of(side, len(self.blocks), after)
        self.runner = Runner(target, exits)
        self.program: Any = target
        self.exits: Counter[int] = Counter()  # tokens by the layers below their exit
        self.left: dict[int, int] = {}  # of the output at hand: KV indices that exited, with the layers below

    @property
    def exited(self) -> int:
        return self.exits.total()

    def output(self, prompt: list[int], params: SamplingParams, child: int) -> list[int]:
        tokens, self.left = list(prompt), {}
        while len(tokens) - len(prompt) < (params.max_tokens or 0):
            tokens.append(self._next(tokens, len(prompt), params, child))
        return tokens[len(prompt) :]

    def _next(self, tokens: list[int], prompt_len: int, params: SamplingParams, child: int) -> int:
        self._set_up(tokens, prompt_len, params)
        start = self._before(tokens)
        for exit, layers in enumerate(self.after if params.exit_threshold is not None and len(tokens) > prompt_len else ()):
            top, drawn = self._run_feed(exit + 1, tokens, start, (Top(2), Sample(child)))
            best = np.exp(top.logprobs)
            sure = {"max_prob": best[0], "margin": best[0] - best[1]}.get(params.exit_criterion)
            if sure is None:
                saturates = params.exit_criterion == "saturation"
                sure = self._saturation(tokens, layers) if saturates else self._classified(tokens, exit)
            if sure >= params.sure_at(len(tokens) - prompt_len, layers / self.after[-1]):
                self.exits[layers] += 1
                self.left[len(tokens) - 1] = layers
                return int(drawn.tokens[0])
        (drawn,) = self._run_feed(0, tokens, start, (Sample(child),))
        assert isinstance(drawn, Drawn)
        return drawn.tokens[0]

    def _before(self, tokens: list[int]) -> int:
        """Which token is the first that has not been computed yet."""
        return 0

    def _run_feed(self, model: int, tokens: list[int], start: int, wants: Any) -> Any:
        plan = StepPlan(0, model, feeds=[Feed(0, start, len(tokens) - start, wants=wants)])
        return self.runner.run(plan).feeds[0]

    def _saturation(self, tokens: list[int], after: int) -> float:
        rows = [self.program.on_host(self._run(0, len(tokens), Span(layers)))[-1] for layers in (after - 1, after)]
        return float(rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1]))

    def _classified(self, tokens: list[int], exit: int) -> float:
        row = torch.from_numpy(self.program.on_host(self._run(0, len(tokens), Span(self.after[exit])))[-1])
        tensors = exit_heads(self.program.config.num_layers, self.after).tensors
        scaled = torch.nn.functional.rms_norm(row, row.shape, eps=1e-6)
        weight, bias = (tensors[f"sure.{exit}.{name}"].double() for name in ("weight", "bias"))
        return float(torch.sigmoid(scaled @ weight + bias))

    def _run(self, start: int, end: int, span: Span, rows: Any = None) -> Any:
        """What a span of the target leaves of tokens [start, end)."""
        step = self.program.step()
        step.feed(Feed(0, start, end - start), self.runner.slots[0])
        return self.program.run(step, span, rows, True)

    def _set_up(self, tokens: list[int], prompt_len: int, params: SamplingParams) -> None:
        new = NewSlot(0, seed=params.seed or 0, prompt_len=prompt_len, tokens=list(tokens), params=params)
        self.runner.slots.apply(StepPlan(0, new=[new], tables=[TableDelta(0, 0, 0, self.blocks)]))


class Propagated(Reference):
    """The same where rows that leave go up as they are. A layer above that is given such a row stores K and V of it; what else
    it makes of it is thrown away."""

    def _before(self, tokens: list[int]) -> int:
        start, tip = 0, len(tokens) - 1
        for end in sorted({*self.left, *(at + 1 for at in self.left), tip} - {0}):
            below = self.left.get(start, self.program.config.num_layers)
            rows = self._run(start, end, Span(below))
            for layer in range(below, self.program.config.num_layers):
                self._run(start, end, Span(layer + 1, first=layer), rows)
            start = end
        return tip


def write_exits(folder: Path, model: Path, *after: int, kind: str = EXIT, ids: range | None = None) -> Path:
    """A folder of exits for a model file, which read the rows unchanged. `ids`: their tokens, all if None."""
    opened = open_model(model)
    ids = range(opened.config.vocab_size) if ids is None else ids
    vocab = torch.arange(ids.start, ids.stop, dtype=torch.int32)
    layers = (after or (1,)) if kind == EXIT else ()
    count = len(layers) or 1
    tensors = initial_tensors(kind, read_teacher(opened, vocab.long()), count)
    files.save(folder, Heads(kind, count, tensors | {"vocab": vocab}, layers, layers[0] if layers else 0), opened, {})
    return folder


def jobs_of(seed: int, count: int = 9) -> list[Job]:
    """Requests that leave early by all four measures, sampled and greedy, several children, some with equal beginnings, and
    plain ones beside them with the same prompts."""
    rng = random.Random(seed)
    shared = rng.choices(range(3, VOCAB), k=37)
    ways: list[dict[str, Any]] = [
        {"exit_threshold": 0.17, "temperature": 0.0},
        {"exit_threshold": 0.15, "temperature": 0.8, "n": 3},
        {"temperature": 0.0},
        {"exit_threshold": 0.06, "exit_criterion": "margin", "temperature": 0.7, "repetition_penalty": 1.2},
        {"exit_threshold": 0.72, "exit_criterion": "saturation", "temperature": 0.0},
        {"exit_threshold": 0.14, "exit_decay": 4.0, "temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.8, "n": 2},
        {"exit_threshold": 0.17, "exit_audit": True, "temperature": 0.0},
        {"exit_threshold": 0.5, "exit_criterion": "classifier", "temperature": 0.0},
    ]
    made = []
    for number in range(count):
        prompt = (shared if number % 2 == 0 else []) + rng.choices(range(3, VOCAB), k=rng.choice([1, 5, 12, 33]))
        params = SamplingParams(seed=rng.randrange(99), max_tokens=rng.choice([9, 17, 24]), **ways[number % len(ways)])
        made.append((prompt, params))
    return made


def expected(reference: Reference, jobs: list[Job]) -> list[list[list[int]]]:
    return [[reference.output(prompt, params, child) for child in range(params.n)] for prompt, params in jobs]


def played(engine: Engine, jobs: list[Job], preempt: int = 0) -> list[list[list[int]]]:
    """What comes of the jobs; `preempt`: the last running request begins again after so many steps, then one more each time, as
    to come back may take many."""
    requests: list[Request] = [engine.add(prompt, params) for prompt, params in jobs]
    steps, next_one = 0, preempt
    while preempt and engine.busy:
        engine.step()
        engine.check()
        steps += 1
        running = [request for request in engine.scheduler.running if not request.in_flight]
        if steps == next_one and running:
            engine.scheduler._preempt(running[-1])
            preempt += 1
        next_one += preempt if steps == next_one else 0
        assert steps < 5000
    finish(engine)
    for request in requests:
        assert request.error is None, request.error
    return [tokens_of(request) for request in requests]


def collect_logprobs(engine: Engine, prompt: list[int], params: SamplingParams) -> list[Any]:
    """What is said of every token of the answers: its log-probabilities, and those of the likeliest."""
    engine.add(prompt, params)
    entries = []
    while engine.busy:
        for delta in engine.step():
            assert delta.error is None, delta.error
            entries += [(delta.index, entry) for entry in delta.logprobs]
    return [msgspec.to_builtins(entry) for entry in sorted(entries, key=lambda entry: entry[0])]


def collect_exits(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[Any]]:
    """The tokens of an answer, and who wrote each."""
    engine.add(prompt, params)
    tokens, exits = [], []
    while engine.busy:
        for delta in engine.step():
            assert len(delta.exits) == len(delta.token_ids)
            tokens += delta.token_ids
            exits += delta.exits
    return tokens, exits


def assert_same_logprobs(one: list[Any], other: list[Any], bitwise: bool) -> None:
    """Log-probabilities as `collect_logprobs` gives them: the same, or the same tokens up to the order of sums."""
    if bitwise:
        assert one == other
        return
    for (_, (token, logprob, *_)), (_, (its, its_logprob, *_)) in zip(one, other, strict=True):
        assert token == its
        assert logprob == pytest.approx(its_logprob, abs=1e-9)
