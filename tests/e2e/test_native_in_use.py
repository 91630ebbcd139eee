"""Two threads in one program, step, sequence or pool: one gets an error, and memory and tokens stay correct."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from headrace import core
from tests.tiny_native import Feeder, native_model, native_program

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
TEXTS = np.random.default_rng(3).integers(0, 97, (3, 150)).tolist()
WORDS = "this model is in a step of another thread"


def assert_in_use(error: RuntimeError) -> int:
    """One refusal; any other error is none."""
    assert WORDS in str(error)
    return 1


@contextmanager
def steps_under_way(feeder: Feeder, step: Any) -> Iterator[None]:
    """Another thread builds this step and runs it, over and over; when it is told that the step is taken it tries again."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            try:
                step.clear()
                for number, sequence in enumerate(feeder.sequences):
                    step.feed(sequence, 0, feeder.lengths[number], 1)
                    step.logits(0)
                feeder.program.core.run(step)
            except (RuntimeError, ValueError, IndexError):  # taken, or changed between two of these calls
                pass

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        ended.set()
        worker.join()


CALLS: dict[str, Callable[[Feeder, Any], Any]] = {
    "run another step": lambda feeder, step: feeder.feed((0, 0, 9)),
    "run the step": lambda feeder, step: feeder.program.core.run(step),
    "clear the step": lambda feeder, step: step.clear(),
    "feed the step": lambda feeder, step: step.feed(feeder.sequences[0], 0, 9),
    "mask the step": lambda feeder, step: step.mask(b""),
    "ask the step": lambda feeder, step: step.logits(0),
    "draw in the step": lambda feeder, step: step.draw_each([], []),
    "read the step": lambda feeder, step: step.drawn(),
    "read an answer": lambda feeder, step: step.error(0),
    "extend a sequence": lambda feeder, step: feeder.sequences[0].extend([]),
    "set a sequence's table": lambda feeder, step: feeder.sequences[0].set_table(0, 0, feeder.sequences[0].table),
    "set a sequence's key": lambda feeder, step: setattr(feeder.sequences[0], "key", (1, 2)),
    "copy blocks": lambda feeder, step: feeder.program.kv.copy_blocks([(60, 61)]),
    "move tokens": lambda feeder, step: feeder.program.kv.move([(980, 981)]),
    "read the profile": lambda feeder, step: feeder.program.core.profile,
    "clear the profile": lambda feeder, step: feeder.program.core.clear_profile(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_refused(name: str) -> None:
    """Each call is refused while a step is under way, and does what it does where none is: the control."""
    feeder, step = Feeder(native_program(native_model("llama")), TEXTS), module.Step()
    wanted = feeder.whole()
    refused, end = 0, time.process_time() + 60  # of work: a machine that is busy or stands still takes none of it
    with steps_under_way(feeder, step):
        while not refused and time.process_time() < end:
            try:
                CALLS[name](feeder, step)
            except RuntimeError as error:
                refused += assert_in_use(error)
            except (ValueError, IndexError):
                pass  # between the other thread's calls
    assert refused
    step.clear()
    step.feed(feeder.sequences[0], 0, 9, 1)
    step.logits(0)
    feeder.program.core.run(step)
    CALLS[name](feeder, step)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(feeder.whole(), wanted, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_two_threads_with_a_step_each(threads: int) -> None:
    """As two callers of one model would: who is let in gets the logits that one caller gets."""
    program = native_program(native_model("llama"), threads=threads)
    feeders = [Feeder(program, TEXTS[:1]), Feeder(program, TEXTS[:1])]  # the same blocks: they write what is there
    (wanted,) = feeders[0].whole()
    found: list[tuple[int, int]] = []

    def work(feeder: Feeder) -> None:
        right = refused = 0
        while right < 20:
            try:
                (rows,) = feeder.whole()
            except RuntimeError as error:
                refused += assert_in_use(error)
                time.sleep(0)
                continue
            assert np.array_equal(rows, wanted)
            right += 1
        found.append((right, refused))

    workers = [threading.Thread(target=work, args=(feeder,)) for feeder in feeders]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [right for right, _ in found] == [20, 20]


def test_a_copy_of_a_sequence_is_independent() -> None:
    """A fork made while a step reads its source can be extended at once."""
    feeder, step = Feeder(native_program(native_model("llama")), TEXTS), module.Step()
    with steps_under_way(feeder, step):
        for _ in range(200):
            fork = feeder.sequences[0].copy()
            fork.extend([1])
            assert len(fork) == 151
