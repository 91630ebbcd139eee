"""What drafting wins and loses on a machine whose every step takes as long as a table says: no real time is in it."""

import random
from dataclasses import replace

import pytest

from headrace.drafting.policy import Acceptance, Budget, Budgets, Costs
from headrace.drafting.tuning import TUNING
from tests.machine import PROMPT, TOKEN, Bench, Clock, Exits, Text, step_time

EDIT, CODE, CHAT, RANDOM = Text(0.85, 0.85), Text(0.3, 0.8, 4), Text(0.3, 0.65, 4), Text(0.1, 0.2, 8)
TEXTS = {"edit": EDIT, "chat": CHAT, "random": RANDOM}
RUNS = {1: (60, 5), 4: (60, 3), 8: (36, 3), 16: (24, 3), 32: (16, 2)}  # by batch: tokens of each output, runs


def bench(text: Text, **more: object) -> Bench:
    return Bench(replace(text), **more)  # type: ignore[arg-type]


def free_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model reads before it drafts is not counted."""
    monkeypatch.setattr(Costs, "reading_seconds", lambda self, tokens: 0.0)
    monkeypatch.setattr(Budgets, "charge_reading", lambda self, name, seconds: None)


def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets are always full."""
    monkeypatch.setattr(Budget, "add", lambda self, seconds, base, tuning: None)
    monkeypatch.setattr(Budgets, "charge_reading", lambda self, name, seconds: None)


def reckless(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are believed in, and nothing bounds them."""
    monkeypatch.setattr(Acceptance, "alpha", lambda self, request, kind: 0.9)
    no_budget(monkeypatch)


@pytest.mark.parametrize("batch", RUNS)
def test_plain_steps_take_their_modelled_time(batch: int) -> None:
    assert bench(CHAT).run(batch, 5, auto=False) == pytest.approx(4 * step_time(batch))


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("batch", RUNS)
def test_no_batch_or_text_gets_slower(batch: int, text: str, draft: bool) -> None:
    """From the first token on, with all that has to be learnt: at most 2 % of a few hundred tokens."""
    assert bench(TEXTS[text], draft=draft).gain(batch, *RUNS[batch]) >= 0.98


@pytest.mark.parametrize("spoil", [None, reckless])
@pytest.mark.parametrize("share", [0.28, 0.51, 0.63])  # by bytes, of exits after 10, 20 and 25 of 30 layers
def test_an_exit_that_is_never_right_costs_little(share: float, spoil, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tests.machine.DRAFT", share * step_time(1))
    if spoil is not None:
        spoil(monkeypatch)
    gain = bench(Text(0.0, 0.0, 8)).gain(1, 60, 8)
    assert gain < 0.97 if spoil else gain >= 0.98


@pytest.mark.parametrize(("text", "batch", "least"), [(EDIT, 1, 2.4), (CODE, 1, 1.15), (CHAT, 1, 1.05), (EDIT, 4, 1.05)])
def test_drafts_gain_where_they_pay(text: Text, batch: int, least: float) -> None:
    assert bench(text).gain(batch, 60, 5) >= least


@pytest.mark.parametrize("spoil", [None, free_catching_up])
def test_a_model_does_not_read_a_long_prompt_for_a_short_answer(spoil, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    if spoil is not None:
        spoil(monkeypatch)
    gain = bench(CHAT, prompt=400).gain(1, 40, 6)
    assert gain < 0.9 if spoil else gain >= 0.97


@pytest.mark.parametrize("spoil", [None, no_budget])
def test_wrong_estimates_lose_at_most_the_budget(spoil, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """All drafts are believed in and hardly any is right: the budgets of two drafters, and one prompt that was read."""
    monkeypatch.setattr(Acceptance, "alpha", lambda self, request, kind: 0.9)
    if spoil is not None:
        spoil(monkeypatch)
    runs, tokens = 12, 60
    lost = 1 / bench(RANDOM).gain(1, tokens, runs) - 1
    bound = 2 * (TUNING.start_steps / (runs * tokens) + TUNING.loss_share) + PROMPT * TOKEN / (runs * tokens * step_time(1))
    assert lost > 0.3 if spoil else 0 < lost <= bound * 1.1


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_a_machine_with_other_work_is_seen_through(batch: int, text: str) -> None:
    """Every third step waits for others, for as long again at most."""
    rng = random.Random(7)
    clock = Clock(slow=lambda now: 1 + (rng.random() < 0.3) * rng.random())
    assert bench(TEXTS[text], clock=clock).gain(batch, *RUNS[batch]) >= 0.975


# -- next to requests that exit early ------------------------------------------------------------------------------------------

KINDS = {"exits": Exits(), "never": Exits(often=0.0), "always": Exits(often=1.0), "cascade": Exits(below=0.25, often=0.5)}


def gain_next_to(text: Text, exits: Exits, batch: int, early: int, runs: int = 5, tokens: int = 60) -> tuple[float, int]:
    """How much longer plain steps take, and how many drafts were verified."""
    one, other = (bench(text, exits=replace(exits), draft=False) for _ in range(2))
    drafted = [one.next_to_exits(batch, early, tokens) for _ in range(runs)]
    plain = [other.next_to_exits(batch, early, tokens, auto=False) for _ in range(runs)]
    assert not any(drafts for _, drafts in plain)
    return sum(took for took, _ in plain) / sum(took for took, _ in drafted), sum(drafts for _, drafts in drafted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "early"), [(1, 1), (2, 1), (1, 3)])
def test_plain_requests_draft_next_to_early_exits(kind: str, batch: int, early: int) -> None:
    """From the first step on: nothing was learnt alone. Without it no step was recorded, and nothing was drafted."""
    gain, drafts = gain_next_to(EDIT, KINDS[kind], batch, early)
    assert drafts > 20
    assert gain > 1.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_text_gets_slower_next_to_early_exits(kind: str, text: str) -> None:
    gain, _ = gain_next_to(TEXTS[text], KINDS[kind], 2, 2)
    assert gain >= 0.97


# -- the budget, and the costs -----------------------------------------------------------------------------------------------


def measured(base: float = 1.0, wide: float = 1.5) -> Costs:
    costs = Costs()
    costs.record_step(2, base)
    costs.record_step(4, wide)
    return costs


def test_a_budget_gains_saved_time_and_pays_draft_time() -> None:
    budgets = Budgets()
    budgets.open(["ngram", "draft"], 1.0)
    budgets.charge_draft("draft", 0.3)
    budgets.record_draft("draft", 1, 1)
    budgets.record_draft("ngram", 1, 0)
    budgets.record_step(2, 4, 1.5)
    budgets.settle(measured())
    assert budgets.by_drafter["ngram"].drafting == pytest.approx(TUNING.start_steps - 0.25), "its half of what two rows cost"
    assert budgets.by_drafter["draft"].drafting == pytest.approx(TUNING.start_steps + 0.5 - 0.25 - 0.3), (
        "a token of two is half a step saved"
    )
    budgets.charge_reading("draft", 10.0)
    assert budgets.by_drafter["draft"].drafting > 0, "its drafts go on"
    assert budgets.empty("draft")
    assert not budgets.empty("ngram")
    for _ in range(1100):
        budgets.record_step(2, 2, 1.0)
        budgets.settle(measured())
    assert budgets.by_drafter["draft"].reading == TUNING.start_steps, "time gives it back, up to what it began with"


def test_a_slow_step_is_believed_no_longer_than_it_must() -> None:
    costs = Costs()
    for seconds in (3.0, 1.0, 2.0, 9.0):
        costs.record_step(1, seconds)
    assert costs.step_seconds(1) == 1.0
    for _ in range(TUNING.samples):
        costs.record_step(1, 2.0)
    assert costs.step_seconds(1) == 2.0


def test_plain_steps_are_measured_often_at_first() -> None:
    costs, plain = Costs(), []
    for step in range(200):
        if costs.stale(1):
            plain.append(step)
        costs.record_step(1 if costs.stale(1) else 2, 1.0)
    assert plain[:6] == [0, 1, 10, 27, 60, 125]
