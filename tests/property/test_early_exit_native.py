"""Tokens that leave early under random load: two steps under way, tiny pools, chunks, arrivals, plain requests beside. Every
output equals the reference, the books balance after every step."""

import random
from functools import lru_cache

import pytest

from headrace.data.types import Request
from tests.e2e.test_draft_model import Native
from tests.early_exits import DEEP, Job, Propagated, Reference, engine_of, expected, jobs_of, side_of
from tests.tiny import tokens_of

SEEDS = range(3)


@lru_cache
def load(seed: int, propagate: bool) -> tuple[list[Job], list[list[list[int]]]]:
    jobs = jobs_of(100 + seed)
    return jobs, expected((Propagated if propagate else Reference)(side_of(Native, DEEP)), jobs)


def run(seed: int, propagate: bool) -> tuple[list[list[list[int]]], dict[str, int]]:
    """What comes of a load, and how often what it is there for has happened."""
    rng = random.Random(seed)
    jobs, _ = load(seed, propagate)
    settings = {"blocks": rng.choice([9, 11]), "budget": rng.choice([7, 11, 40]), "seqs": rng.choice([4, 6])}
    engine = engine_of(side_of(Native, DEEP), propagate=propagate, depth=2, **settings)
    arrivals = [rng.randrange(25) for _ in jobs]
    requests: dict[int, Request] = {}
    seen, step = dict.fromkeys(("preempted", "two under way"), 0), 0
    while len(requests) < len(jobs) or engine.busy:
        for number, (prompt, params) in enumerate(jobs):
            if arrivals[number] == step:
                requests[number] = engine.add(prompt, params)
        engine.step()
        engine.check()
        seen["two under way"] += len(engine._flights) > 0
        step += 1
        assert step < 5000
    for request in requests.values():
        assert request.error is None, request.error
    seen["preempted"] = engine.scheduler.preemptions
    return [tokens_of(requests[number]) for number in range(len(jobs))], seen


@pytest.mark.parametrize("propagate", [False, True], ids=["deferred", "propagate"])
def test_every_output_equals_the_reference(propagate: bool) -> None:
    met = dict.fromkeys(("preempted", "two under way"), 0)
    for seed in SEEDS:
        outputs, seen = run(seed, propagate)
        assert outputs == load(seed, propagate)[1], f"seed {seed}"
        met = {name: met[name] + count for name, count in seen.items()}
    assert all(met.values()), met
