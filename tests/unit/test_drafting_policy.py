"""The drafting policy: it chooses the gamma that pays most by the measured times, and 0 if none pays."""

import random
from itertools import pairwise

import pytest

from headrace.data.params import SamplingParams
from headrace.data.plan import Feed, StepOutput, StepPlan
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.policy import Acceptance, Average, Budget, Candidate, Costs, choose_depths, draft_value, expected_tokens
from headrace.drafting.speculation import Speculation
from headrace.drafting.tuning import TUNING, Tuning


def costs(steps: dict[int, float], draft: float = 0.0, plain: int = 1) -> Costs:
    made = Costs()
    for rows, seconds in [*steps.items(), *[(plain, steps[plain])] * TUNING.plain_samples]:
        made.record_step(rows, seconds)
    if draft:
        made.record_draft(1, draft)
    return made


def flat(seconds: float = 1.0) -> dict[int, float]:
    return dict.fromkeys(range(1, 40), seconds)


@pytest.mark.parametrize(("alpha", "c"), [(0.5, 0.1), (0.7, 0.05), (0.8, 0.2), (0.9, 0.1), (0.9, 0.2)])
def test_it_picks_the_gamma_that_pays_most(alpha: float, c: float) -> None:
    choice = Candidate(alpha, 16, by_model=True)
    (gamma,) = choose_depths([choice], 1, costs(flat(), c))
    best = max(range(17), key=lambda gamma: expected_tokens(alpha, gamma) / (1 + gamma * c))
    assert gamma == best


def test_rows_that_cost_as_much_as_steps_are_not_spent() -> None:
    """From some batch size on verification is bound by arithmetic: nothing is gained, and the controller sees it coming."""
    steep = {rows: float(rows) for rows in range(1, 40)}
    assert choose_depths([Candidate(0.9, 8)], 1, costs(steep)) == [0]
    for batch in (1, 2, 4, 8, 16, 32):
        bound = {rows: max(1.0, rows / 8) for rows in range(batch, batch + 40)}
        depths = choose_depths([Candidate(0.9, 4) for _ in range(batch)], batch, costs(bound, plain=batch))
        assert (sum(depths) > 0) == (batch < 8)


def test_draft_value_is_tokens_over_seconds() -> None:
    """Of the gamma that pays most, beside other sequences; a model's steps and what it must read first take time too."""
    made = costs({rows: 1 + 0.1 * (rows - 2) for rows in range(2, 20)}, draft=0.2, plain=2)
    assert draft_value(Candidate(0.9, 1), 2, made) == pytest.approx((1 + expected_tokens(0.9, 1)) / 1.1)
    assert draft_value(Candidate(0.9, 4), 2, made) == pytest.approx(
        max((1 + expected_tokens(0.9, g)) / (1 + 0.1 * g) for g in range(1, 5))
    )
    model = Candidate(0.9, 4, by_model=True, lag_seconds=0.4, read_seconds=0.2, remaining=6)
    assert model.surcharge() == pytest.approx(0.2)
    assert draft_value(model, 2, made) == pytest.approx(
        max((1 + expected_tokens(0.9, g)) / (1.2 + 0.3 * g) for g in range(1, 5))
    )
    assert draft_value(Candidate(0.9, 4, tree_rows=10), 2, made) == pytest.approx((1 + expected_tokens(0.9, 4)) / 2.0)
    assert draft_value(Candidate(0.9, 4), 2, Costs()) == 0.9, "the surest, before anything was measured"


def test_nothing_is_drafted_before_a_plain_step_was_measured() -> None:
    assert choose_depths([Candidate(0.99, 8)], 1, Costs()) == [0]


def test_a_plain_step_is_measured_again_now_and_then() -> None:
    made = costs({1: 1.0, 5: 1.0})
    drafted = 0
    for _ in range(200):
        (gamma,) = choose_depths([Candidate(0.9, 4)], 1, made)
        drafted += gamma > 0
        made.record_step(1 + gamma, 1.0)
    assert 190 <= drafted < 200


def test_the_likelier_draft_has_priority() -> None:
    table = {rows: 1.0 if rows <= 4 else 10.0 for rows in range(1, 20)}
    sure, unsure = Candidate(0.9, 8), Candidate(0.3, 8)
    assert choose_depths([unsure, sure], 2, costs(table, plain=2)) == [0, 2]


def test_acceptance_follows_each_request() -> None:
    acceptance = Acceptance()
    for _ in range(60):
        acceptance.observe("copies", ("ngram", 3), 4, 4)
        acceptance.observe("invents", ("ngram", 3), 0, 4)
    assert acceptance.alpha("copies", ("ngram", 3)) > 0.95
    assert acceptance.alpha("invents", ("ngram", 3)) < 0.05
    assert 0.05 < acceptance.alpha("new", ("ngram", 3)) < 0.95
    acceptance.forget("copies")
    assert acceptance.alpha("copies", ("ngram", 3)) < 0.95


def test_an_unused_draft_model_is_tried_again_after_some_requests() -> None:
    """Texts that nobody can guess turn a model off; without a trial it would never hear of those that it can."""
    kind, acceptance = ("draft", 0), Acceptance()
    for number in range(40):
        acceptance.observe(f"{number}", kind, 0, 4)
        acceptance.forget(f"{number}")
    begins = []
    for number in range(40, 40 + 2 * TUNING.retry_requests):
        begins.append(acceptance.alpha(f"{number}", kind))
        acceptance.forget(f"{number}")
    assert begins[: TUNING.retry_requests] == [begins[0]] * TUNING.retry_requests
    assert begins[0] < 0.3 < begins[TUNING.retry_requests], "then as if nothing were known"
    beside = [acceptance.alpha(request, kind) for request in ("one", "two", "one")]
    assert beside[0] == beside[2] == begins[TUNING.retry_requests] > beside[1], "one request of a batch, not all"
    acceptance.forget("one")
    assert acceptance.alpha("two", kind) == begins[TUNING.retry_requests], "it ended without a draft"
    acceptance.forget("two")
    acceptance.observe("trial", kind, 0, 4)
    assert acceptance.alpha("next", kind) < 0.3, "one trial, not many"
    for _ in range(4):
        acceptance.observe("other", kind, 8, 8)
    assert acceptance.alpha("other", kind) > 0.9


def test_costs_use_the_minimum_of_their_own_measurements() -> None:
    """The least of a few measurements: of steps of so many rows, of draft steps of so many sequences, of tokens read."""
    made = Costs()
    assert (made.step_seconds(1), made.draft_seconds(1), made.draft_estimate(1), made.reading_seconds(9)) == (
        None,
        0.0,
        0.0,
        0.0,
    )
    for rows, seconds in ((1, 1.0), (1, 0.8), (8, 2.0), (8, 3.0)):
        made.record_step(rows, seconds)
    assert (made.step_seconds(1), made.step_seconds(8)) == (0.8, 2.0)
    assert made.draft_estimate(1) == pytest.approx(0.3 * 0.8)
    assert made.reading_seconds(10) == pytest.approx(10 * 0.06 * 0.8)
    for sequences, seconds in ((1, 0.2), (1, 0.1), (8, 0.5), (8, 0.7)):
        made.record_draft(sequences, seconds)
    assert (made.draft_seconds(1), made.draft_seconds(8)) == (0.1, 0.5)
    assert made.draft_estimate(8) == 0.5
    for tokens, seconds in ((10, 0.5), (100, 3.0), (10, 0.4)):
        made.record_reading(tokens, seconds)
    assert made.reading_seconds(10) == pytest.approx(0.3)
    for _ in range(TUNING.samples):
        made.record_step(1, 1.5)
    assert made.step_seconds(1) == 1.5, "what was before the last few is forgotten"


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_the_measured_acceptance_is_the_true_one(alpha: float) -> None:
    rng = random.Random(2)
    acceptance = Acceptance(Tuning(request_memory=100))
    for _ in range(1000):
        accepted = next((i for i in range(4) if rng.random() >= alpha), 4)
        acceptance.observe("r", ("ngram", 1), accepted, 4)
    assert acceptance.alpha("r", ("ngram", 1)) == pytest.approx(alpha, abs=0.12)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
def test_never_slower_in_a_simulated_run(alpha: float, slope: float) -> None:
    """Whatever text and machine: 400 tokens take no longer than plain steps, but for a few steps of learning."""
    rng = random.Random(1)
    acceptance, made = Acceptance(), Costs()
    seconds, tokens = 0.0, 0
    while tokens < 400:
        choice = Candidate(acceptance.alpha("r", ("model", 0)), 8, by_model=True)
        (gamma,) = choose_depths([choice], 1, made)
        took = 1.0 + slope * gamma
        accepted = next((i for i in range(gamma) if rng.random() >= alpha), gamma)
        if gamma:
            made.record_draft(1, 0.3)
            acceptance.observe("r", ("model", 0), accepted, gamma)
        made.record_step(1 + gamma, took)
        seconds += took + 0.3 * gamma
        tokens += accepted + 1
    assert seconds <= 1.03 * tokens


def test_a_draft_costs_at_most_its_budget() -> None:
    """Four rows of 0.1 s more and four steps of a model of 0.2 s more: 1.2 s, each of them counted once."""
    for budget, gamma in ((1.25, 4), (1.15, 3), (0.55, 1), (0.25, 0)):
        choice = Candidate(0.99, 4, by_model=True, drafter="draft")
        made = costs({rows: 1 + 0.1 * (rows - 1) for rows in range(1, 10)}, draft=0.2)
        assert choose_depths([choice], 1, made, {"draft": Budget(budget, budget)}) == [gamma]


# -- trees -------------------------------------------------------------------------------------------------------------------


def test_a_tree_is_verified_whole_or_not_at_all() -> None:
    for cost, taken in ((0.001, True), (0.2, False)):
        tree = Candidate(0.6, 4, tree_rows=40)
        made = costs({rows: 1 + cost * (rows - 1) for rows in (1, 20, 41)})
        assert choose_depths([tree], 1, made) == [4 if taken else 0]
    hopeless = Candidate(0.02, 4, tree_rows=40)
    assert choose_depths([hopeless], 1, costs({1: 1.0, 41: 1.0})) == [0]


def test_a_tree_larger_than_any_step_yet_is_tried_once() -> None:
    """Nobody can guess what so many rows cost; once that is known, it decides."""
    for seconds, again in ((1.1, True), (9.0, False)):
        made = costs({1: 1.0, 2: 1.0}, plain=2)
        first, other = Candidate(0.7, 4, tree_rows=30), Candidate(0.6, 4, tree_rows=30)
        assert choose_depths([other, first], 2, made) == [0, 4], "one at a time"
        made.record_step(32, seconds)
        tree = Candidate(0.7, 4, tree_rows=30)
        (depth,) = choose_depths([tree], 2, made)
        assert (depth > 0) == again
    beyond = Candidate(0.7, 4, tree_rows=34)
    assert choose_depths([beyond], 2, made) == [0], "a little larger than what is known to be dear"


def test_the_batch_takes_as_many_trees_as_pay() -> None:
    table = {rows: max(1.0, rows / 30) for rows in (1, 4, 24, 44, 64, 84)}
    trees = [Candidate(0.6, 3, tree_rows=20) for _ in range(4)]
    depths = choose_depths(trees, 4, costs(table, plain=4))
    assert sum(depth > 0 for depth in depths) == 1


# -- who is asked --------------------------------------------------------------------------------------------------------------


class Counting:
    """Proposes one token that the target will not say, and counts how often it was asked."""

    name = "counting"

    def __init__(self) -> None:
        self.asked = 0

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        self.asked += 1
        return Draft([1], [-1], drafter=self.name, confidence=1)


@pytest.mark.parametrize(("batch", "gamma", "every"), [(1, None, 1), (8, None, 5), (32, None, 17), (8, 2, 1)])
def test_a_batch_without_gain_drafts_less_often(batch: int, gamma: int | None, every: int) -> None:
    drafter = Counting()
    speculation = Speculation([drafter], 1000, gamma)
    pairs = []
    for number in range(batch):
        request = Request(str(number), [2], SamplingParams(max_tokens=900), seed=1, strategy=None, arrival=0)
        pairs.append((request, Sequence(number, [2, 3], 1)))
    asked = []
    for _ in range(3 * every):
        before = drafter.asked
        speculation.costs.record_step(batch, 1.0)
        speculation.costs.record_step(batch + 1, 9.0)  # a row too many
        if not speculation.pauses():
            speculation.propose(pairs, batch)
        asked.append(drafter.asked > before)
        for _, seq in pairs:
            seq.tokens.append(4)
    assert asked == [step % every == 0 for step in range(3 * every)]


class Chains(Counting):
    """Proposes a chain of a fixed length."""

    def __init__(self, name: str, length: int) -> None:
        super().__init__()
        self.name = name
        self.length = length

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        return Draft([1] * self.length, list(range(-1, self.length - 1)), drafter=self.name, confidence=1)


def test_drafters_are_compared_at_the_rows_of_the_step() -> None:
    """Two tokens would pay next to no other row. In this batch a tenth row is expensive, so the likelier single token wins."""
    speculation = Speculation([Chains("long", 2), Chains("short", 1)], 1000)
    for rows, seconds in ((1, 1.0), (2, 1.0), (8, 2.0), (9, 2.01), (10, 9.0)):
        for _ in range(2):
            speculation.costs.record_step(rows, seconds)
    for name, alpha in (("long", 0.5), ("short", 0.52)):
        speculation.acceptance.shared[name, 1] = Average(alpha, TUNING.prior_weight)
    request = Request("r", [2], SamplingParams(max_tokens=900), seed=1, strategy=None, arrival=0)
    pairs = [(request, Sequence(number, [2, 3], 1)) for number in range(8)]
    assert not speculation.pauses()
    speculation.propose(pairs, 8)
    assert [seq.decode.draft.drafter for _, seq in pairs if seq.decode.draft is not None] == ["short"]


class Slow(Counting):
    """Takes an eighth of a plain step to answer; what it proposes pays at the times named."""

    def __init__(self, *pays: int) -> None:
        super().__init__()
        self.pays = pays
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        self.now += 0.125
        self.asked += 1
        return Draft([1], [-1], drafter=self.name, confidence=1) if self.asked in self.pays else None


def drafted_steps(drafter: Slow, steps: int) -> tuple[list[int], Speculation]:
    """The steps of one sequence in which the drafter was asked."""
    speculation = Speculation([drafter], 1000, clock=drafter.clock)
    request = Request("r", [2], SamplingParams(max_tokens=900), seed=1, strategy=None, arrival=0)
    seq, found = Sequence(0, [2, 3], 1), []
    speculation.costs.record_step(2, 1.0)
    speculation.acceptance.shared["slow", 1] = Average(0.9, TUNING.prior_weight)
    for step in range(steps):
        speculation.costs.record_step(1, 1.0)
        speculation.costs.record_step(1, 1.0)
        before = drafter.asked
        if not speculation.pauses():
            speculation.propose([(request, seq)], 1)
        if drafter.asked > before:
            found.append(step)
        seq.tokens.append(4)
    return found, speculation


def test_an_unsuccessful_drafter_takes_a_hundredth_of_the_time() -> None:
    found, _ = drafted_steps(Slow(), 200)
    rests = [after - before - 1 for before, after in pairwise(found)]
    assert rests[:12] == list(range(1, 13)), "one step more each time"
    assert {*rests[12:]} == {12}, "an eighth of a step, once in thirteen"


def test_a_gain_resumes_drafting_at_each_step() -> None:
    found, _ = drafted_steps(Slow(4, 5, 6), 30)
    assert found == [0, 2, 5, 9, 10, 11, 12, 14, 17, 21, 26]


def test_of_a_pause_the_last_step_is_measured_and_all_of_it_allows_for_losses() -> None:
    drafter = Slow()
    asked, speculation = drafted_steps(drafter, 100)
    budget = speculation.budgets.by_drafter[drafter.name]
    budget.drafting = budget.reading = 0.0
    plan, rest = StepPlan(1, feeds=[Feed(0, 3, 1)]), asked[-1] + 12 - 99
    assert rest > 1
    speculation.record_step(plan, StepOutput(1, seconds=0.5))  # of a step before the last
    for _ in range(rest):
        assert speculation.costs.step_seconds(1) == 1.0
        assert speculation.pauses()
        assert budget.drafting == 0.0
        speculation.record_step(plan, StepOutput(1, seconds=0.5))
    assert speculation.costs.step_seconds(1) == 0.5
    assert not speculation.pauses()
    assert budget.drafting == budget.reading == pytest.approx(TUNING.loss_share * 0.5 * (rest + 1))


class Bushy(Counting):
    """Proposes a tree: to build it takes time too."""

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        self.asked += 1
        return Draft([1] * 20, [-1] * 20, confidence=1)


@pytest.mark.parametrize(("seconds", "gamma", "every"), [(9.0, None, TUNING.tree_rest_steps + 1), (1.0, None, 1), (9.0, 2, 1)])
def test_a_sequence_with_a_costly_tree_drafts_less_often(seconds: float, gamma: int | None, every: int) -> None:
    drafter = Bushy()
    speculation = Speculation([drafter], 1000, gamma)
    request = Request("r", [2], SamplingParams(max_tokens=900), seed=1, strategy=None, arrival=0)
    seq = Sequence(0, [2, 3], 1)
    for _ in range(TUNING.plain_samples):
        speculation.costs.record_step(1, 1.0)
    asked = []
    for _ in range(3 * every):
        speculation.costs.record_step(21, seconds)
        speculation.costs.record_step(1, 1.0)
        before = drafter.asked
        if not speculation.pauses():
            speculation.propose([(request, seq)], 1)
        asked.append(drafter.asked > before)
        assert (seq.decode.draft is not None) == (gamma is not None or seconds == 1.0)
        seq.tokens.append(4)
    assert asked == [step % every == 0 for step in range(3 * every)]
