"""States of batches and rows: every transition of the tables and no other, and correct counters."""

import itertools
import sqlite3
from random import Random
from typing import Any

import pytest

from headrace.server.access.principals import ANONYMOUS
from headrace.server.storage import batch_rows
from headrace.server.storage.batch_rows import BATCH_TRANSITIONS, ROW_TRANSITIONS
from headrace.server.storage.store import Store
from tests.server.batching import ASK, check_counters, lines, make, run


def test_every_transition_of_the_tables_and_no_other() -> None:
    """Each state meets each event: it becomes what the table says, or nothing changes."""
    events = {event for _, event in ROW_TRANSITIONS}
    states = {state for state, _ in ROW_TRANSITIONS} | set(ROW_TRANSITIONS.values())
    store = Store()
    run(make(store, lines([ASK])))
    db = store.writer
    moved = 0
    for state, event in itertools.product(sorted(states), sorted(events)):
        db.execute("UPDATE rows SET state = ?", (state,))
        if (state, event) in ROW_TRANSITIONS:
            batch_rows.move_row(db, 1, event)
            moved += 1
        else:
            with pytest.raises(RuntimeError, match=f"that is {state} cannot {event}"):
                batch_rows.move_row(db, 1, event)
        assert db.execute("SELECT state FROM rows").fetchall() == [(ROW_TRANSITIONS.get((state, event), state),)]
    assert moved == len(ROW_TRANSITIONS) == 5
    events = {event for _, event in BATCH_TRANSITIONS}
    states = {state for state, _ in BATCH_TRANSITIONS} | set(BATCH_TRANSITIONS.values())
    for state, event in itertools.product(sorted(states), sorted(events)):
        db.execute("UPDATE batches SET status = ?", (state,))
        if (state, event) in BATCH_TRANSITIONS:
            assert batch_rows.move_batch(db, 1, event) == BATCH_TRANSITIONS[state, event]
        else:
            with pytest.raises(RuntimeError, match=f"that is {state} cannot {event}"):
                batch_rows.move_batch(db, 1, event)
        assert db.execute("SELECT status FROM batches").fetchall() == [(BATCH_TRANSITIONS.get((state, event), state),)]
    store.close()


@pytest.mark.parametrize("seed", range(4))
def test_counters_stay_exact_under_random_transitions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lives of batches, and after each step all is counted again; the control forgets to count one answer."""

    def live(store: Store) -> None:
        chance = Random(seed)
        db = store.writer
        for _ in range(6):
            run(make(store, lines([{**ASK, "prompt": "é" * chance.randrange(9)} for _ in range(chance.randrange(1, 30))])))
        running: list[int] = []
        for _ in range(3_000):
            db.execute("BEGIN")
            match chance.randrange(24):
                case 0:
                    db.execute("UPDATE batches SET expires_at = 1 WHERE number = ?", (chance.randrange(1, 7),))
                case 1:
                    batch_rows.drop_pending(db)
                case 2:
                    batch = chance.randrange(1, 7)
                    if db.execute("SELECT status FROM batches WHERE number = ?", (batch,)).fetchone() == ("in_progress",):
                        batch_rows.move_batch(db, batch, "cancel")
                case 3:
                    batch_rows.recover(db)
                    running = []
                case 4 | 5 | 6:
                    running += [
                        row.number for row in batch_rows.start_rows(db, chance.randrange(1, 9), not running, {ANONYMOUS: 0})
                    ]
                case 7 if running:
                    batch_rows.fail_attempt(db, running.pop(chance.randrange(len(running))), "lost", "it was lost")
                case _ if running:
                    row = running.pop(chance.randrange(len(running)))
                    batch_rows.finish_row(db, row, b"x" * chance.randrange(400), failed=chance.random() < 0.3)
            db.execute("COMMIT")
            check_counters(db)
            ended = "SELECT count(*) FROM batches WHERE status IN ('completed', 'cancelled', 'expired')"
            if db.execute(ended).fetchone() == (6,):
                break
        else:
            raise AssertionError("they did not come to an end")
        assert db.execute("SELECT count(*) FROM rows WHERE answer IS NULL OR body IS NOT NULL").fetchone() == (0,)

    store = Store()
    live(store)
    store.close()
    end = batch_rows._store_end
    forgotten: list[int] = []

    def forgets(db: sqlite3.Connection, *arguments: Any, **more: Any) -> None:
        end(db, *arguments, **more)
        if not forgotten:
            forgotten.append(1)
            db.execute("UPDATE batches SET bytes = bytes - 1 WHERE number = 1")

    monkeypatch.setattr(batch_rows, "_store_end", forgets)
    store = Store()
    with pytest.raises(AssertionError):
        live(store)
    store.close()
