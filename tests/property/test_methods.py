"""Grammars, processors and strategies of one's own under random load, with drafts of every kind: still the reference."""

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from headrace.data.plan import Each, Logits
from headrace.drafting.base import Drafter
from headrace.drafting.lookahead import Lookahead
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from tests.property.drafters import Guessing
from tests.property.methods import AnyJob, BlockJob, Following
from tests.property.test_engine import assert_reference, run, symptom, wrong_outputs

DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "lookahead": lambda seed: Lookahead(4, 4, 3),
    "lookup": lambda seed: PromptLookup(),
    "trees": Guessing,
}
SEEDS = range(16)


def speculation(kind: str, seed: int) -> Callable[[], Speculation | None]:
    return lambda: Speculation([DRAFTERS[kind](seed)], max_model_len=256, gamma=6) if kind in DRAFTERS else None


@pytest.mark.parametrize("kind", ["none", *DRAFTERS])
def test_every_output_equals_the_reference(kind: str) -> None:
    kinds = set()
    for seed in SEEDS:
        jobs, outputs, engine = run(seed, speculation=speculation(kind, seed), make=AnyJob)
        assert_reference(jobs, outputs)
        assert engine.blocks.used == 0
        assert not engine.scheduler.requests
        kinds |= {job.kind for job in jobs if outputs[job.id] and isinstance(job, AnyJob)}
    assert len(kinds) == 4


def test_blocks_next_to_plain_requests() -> None:
    """In chunks, after preemptions, from the prefix cache; drafts are others'."""
    preempted = 0
    for seed in SEEDS:
        jobs, outputs, engine = run(seed, speculation=speculation("lookup", seed), make=BlockJob)
        assert_reference(jobs, outputs)
        assert engine.blocks.used == 0
        preempted += engine.scheduler.preemptions
    assert preempted > 0


def open_blocks_are_fed_causally(engine: Engine) -> None:
    """A node sees those before it alone."""
    runner = engine.executor.runner  # type: ignore[attr-defined]
    above = runner._above
    runner._above = lambda feed, known, node: above(replace(feed, full=False), known, node)


def test_a_block_that_is_not_open_is_caught() -> None:
    jobs, outputs, _ = run(2, open_blocks_are_fed_causally, make=BlockJob)
    assert wrong_outputs(jobs, outputs)


def a_mask_of_the_node_before(engine: Engine) -> None:
    """A node is masked by what may follow the node before it in the draft, not by what may follow itself."""

    class Shifted(Following):
        def masks(self, tokens=(), parents=()):  # type: ignore[no-untyped-def]
            rows = super().masks(tokens, parents)
            width = len(rows) // (1 + len(tokens))
            return rows[:width] + rows[: len(rows) - width]

    add = engine.add

    def adding(*args, **more):  # type: ignore[no-untyped-def]
        request = add(*args, **more)
        for seq in request.seqs:
            if seq.decode.constraint is not None:
                seq.decode.constraint = Shifted()
        return request

    engine.add = adding  # type: ignore[method-assign]


def drafts_are_not_pruned(engine: Engine) -> None:
    """Processors see the path of the last node for every node."""
    runner = engine.executor.runner  # type: ignore[attr-defined]
    answer = runner._answer

    def mixed(feed):  # type: ignore[no-untyped-def]
        answers = answer(feed)
        for want, each in zip(feed.wants, answers, strict=True):
            if isinstance(want, Logits) and isinstance(each, Each) and len(each.answers) > 2:
                root, first, *others = each.answers
                each.answers = (root, *others, first)
        return answers

    runner._answer = mixed


@pytest.mark.parametrize(
    ("tamper", "expected"), [(a_mask_of_the_node_before, r"token \d+ does not fit"), (drafts_are_not_pruned, "wrong output")]
)
def test_a_broken_verification_is_caught(tamper: Callable[[Engine], None], expected: str) -> None:
    more = {"speculation": lambda seed: speculation("trees", seed), "make": lambda seed: AnyJob}
    assert re.fullmatch(expected, symptom(tamper, **more))
