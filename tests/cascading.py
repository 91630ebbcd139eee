"""A tiny model with a smaller one beside it that writes where it is sure: engines on both back ends, and what must come of
them, without a cache."""

import random
from typing import Any

import numpy as np

from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import CASCADE, HIDDEN, TARGET, UPPER, Drawn, Feed, KVGroup, NewSlot, Sample, StepPlan, TableDelta, Top
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.models.base import Model
from headrace.runner.runner import Runner
from tests.e2e.test_draft_model import Torch
from tests.early_exits import Job
from tests.tiny import VOCAB
from tests.tiny_native import MAX_LEN


def smaller(side: Torch) -> Model:
    """One that says something else than the model often enough, and is sure of it now and then."""
    return side.drafts["other"]


def engine_of(
    side: Torch, *, blocks: int = 60, budget: int = 64, seqs: int = 16, drafts: bool = True, cascade: bool = True
) -> Engine:
    """`drafts`: for requests that do not cascade; `cascade`: there is a smaller model at all."""
    target = side.program(side.target, blocks)
    runner = Runner(target, leaves=side.program(smaller(side), blocks) if cascade else None)
    groups = (TARGET, KVGroup(HIDDEN, "hidden"))
    return Engine(
        InProcess(runner),
        EngineConfig(SchedulerConfig(seqs, budget, MAX_LEN), CacheConfig(blocks, side.block)),
        vocab_size=VOCAB,
        groups=(*groups, KVGroup(CASCADE), KVGroup(UPPER)) if cascade else groups,
        speculation=Speculation([PromptLookup()], MAX_LEN, 3) if drafts else None,
    )


class Reference:
    """Every token from all tokens before it, computed anew by whoever is asked: the smaller model first."""

    def __init__(self, side: Torch) -> None:
        self.blocks = list(range(-(-MAX_LEN // side.block)))
        target, beside = (side.program(model, len(self.blocks)) for model in (side.target, smaller(side)))
        self.runner = Runner(target, [beside])
        self.asked = self.written = 0  # tokens that the smaller model was asked for, and those that it wrote

    def outputs(self, jobs: list[Job]) -> list[list[list[int]]]:
        return [[self.output(prompt, params, child) for child in range(params.n)] for prompt, params in jobs]

    def output(self, prompt: list[int], params: SamplingParams, child: int = 0) -> list[int]:
        tokens = list(prompt)
        while len(tokens) - len(prompt) < (params.max_tokens or 0):
            tokens.append(self._next(tokens, len(prompt), params, child))
        return tokens[len(prompt) :]

    def _next(self, tokens: list[int], prompt_len: int, params: SamplingParams, child: int) -> int:
        new = NewSlot(0, seed=params.seed or 0, prompt_len=prompt_len, tokens=list(tokens), params=params)
        self.runner.slots.apply(StepPlan(0, new=[new], tables=[TableDelta(0, 0, 0, self.blocks)]))
        if params.cascade_threshold is not None and len(tokens) > prompt_len:
            self.asked += 1
            top, drawn = self._run_feed(1, tokens, (Top(2), Sample(child)))
            best, second = np.exp(top.logprobs)
            if best - second * (params.cascade_criterion == "margin") >= params.cascade_threshold:
                self.written += 1
                return int(drawn.tokens[0])
        (drawn,) = self._run_feed(0, tokens, (Sample(child),))
        assert isinstance(drawn, Drawn)
        return drawn.tokens[0]

    def _run_feed(self, model: int, tokens: list[int], wants: Any) -> Any:
        return self.runner.run(StepPlan(0, model, feeds=[Feed(0, 0, len(tokens), wants=wants)])).feeds[0]


SURE, AHEAD = 0.2, 0.05  # a probability and a lead at which each of the two models writes some of the tokens


def jobs_of(seed: int, count: int = 8) -> list[Job]:
    """Requests that cascade by both measures, sampled and greedy, several children, some with equal beginnings, and plain ones
    beside them with the same prompts."""
    rng = random.Random(seed)
    shared = rng.choices(range(3, VOCAB), k=37)
    ways: list[dict[str, Any]] = [
        {"cascade_threshold": SURE, "temperature": 0.0},
        {"cascade_threshold": SURE, "temperature": 0.8, "n": 3},
        {"temperature": 0.0},
        {"cascade_threshold": AHEAD, "cascade_criterion": "margin", "temperature": 0.7, "repetition_penalty": 1.2},
        {"cascade_threshold": SURE, "temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.8, "n": 2},
        {"cascade_threshold": 0.0, "temperature": 0.9},
        {"cascade_threshold": SURE, "cascade_audit": True, "temperature": 0.0},
    ]
    made = []
    for number in range(count):
        prompt = (shared if number % 2 == 0 else []) + rng.choices(range(3, VOCAB), k=rng.choice([1, 5, 12, 33]))
        params = SamplingParams(seed=rng.randrange(99), max_tokens=rng.choice([9, 17, 24]), **ways[number % len(ways)])
        made.append((prompt, params))
    return made
