"""Every request of a random load has the answer that it has alone: tokens, text, log-probabilities, alternatives, ranks,
scores, exits, confidences and votes. None hangs, no block and no slot leaks, whatever fails, is preempted or aborted meanwhile.

`make soak` runs many loads (MIXED_LOADS=first:last for others).
"""

import logging
import os
from collections import Counter
from collections.abc import Callable

import pytest

from headrace.kv.blocks import BlockManager
from tests.early_exit_controls import no_catching_up
from tests.property.mixed_loads import KINDS, Files, make_load
from tests.property.mixed_runs import Report, run_alone, run_together

ALL = tuple(KINDS)
SHORT = {
    "exits, auto": 1,
    "cascade, draft": 2,
    "propagated, ngram": 3,
    "several exits, draft": 6,
    "amateur, heads": 4,
    "source, ngram": 5,
}
FIRST, LAST = map(int, os.environ.get("MIXED_LOADS", "0:60").split(":"))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The engine logs each fault."""
    caplog.set_level(logging.CRITICAL, "headrace")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("models"))


def play(seed: int, kinds: tuple[str, ...], files: Files, count: int = 10, backend: str = "", check: bool = True) -> Report:
    load = make_load(seed, kinds, files, count, backend)
    return run_together(seed, load, files, run_alone(load, files), check)


@pytest.mark.parametrize("kind", SHORT)
def test_every_answer_equals_the_request_alone(kind: str, files: Files) -> None:
    report = play(SHORT[kind], (kind,), files, 6, "native")
    assert not report.differences, "\n".join(map(str, report.differences))


def test_in_torch(files: Files) -> None:
    report = play(6, ("exits, draft",), files, 5, "torch")
    assert not report.differences, "\n".join(map(str, report.differences))


@pytest.mark.slow
def test_many_loads(files: Files) -> None:
    total, bad = Counter[str](), []
    for seed in range(FIRST, LAST):
        load = make_load(seed, ALL, files, 10)
        report = play(seed, ALL, files)
        total.update(loads=1, faults=report.faults, preemptions=report.preemptions, drafts=report.drafts)
        total.update(early=report.early, aborted=report.aborted, differences=len(report.differences))
        bad += [f"seed {seed}, {load.kind}, {load.backend}, {load.kv_dtype}: {one}" for one in report.differences]
        print(f"seed {seed}: {load.kind}, {load.backend}, K/V {load.kv_dtype}: {report.faults} faults,", end=" ")
        print(f"{report.preemptions} preemptions, {len(report.differences)} differences", flush=True)
    print(", ".join(f"{count} {name}" for name, count in total.items()))
    assert not bad, "\n".join(bad[:20])


# -- negative controls: each breaks one rule, and answers must differ -------------------------------------------------------


def no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    """Forks write into blocks that they share."""
    patch.setattr(BlockManager, "_written", lambda self, seq, start, end: range(0))


CONTROLS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no catching up": (no_catching_up, "exits, auto"),
    "no catching up of several exits": (no_catching_up, "several exits"),
    "no copy on write": (no_copy_on_write, "amateur, draft"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_engine_gives_other_answers(control: str, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper, kind = CONTROLS[control]
    for seed in range(1, 9):
        load = make_load(seed, (kind,), files, 8, "native")
        alone = run_alone(load, files)
        with monkeypatch.context() as patch:
            tamper(patch)
            if run_together(seed, load, files, alone, check=False).differences:
                return
    pytest.fail("no answer differs")
