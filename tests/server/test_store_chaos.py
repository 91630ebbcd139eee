"""Crashes and database errors at any statement: each line of a batch is answered exactly once."""

import os
import subprocess
import sys

import pytest

from tests.server.harness import PATIENCE, ROOT
from tests.server.store_chaos import LOOSE

WAYS = ("kill", "full", "busy", "disk")


def chaos(how: str, first: int, stride: int, seconds: float = PATIENCE, **more: str) -> list[str]:
    """The mistakes, and last how many statements there are."""
    command = [sys.executable, "-m", "tests.server.store_chaos", how, *map(str, (first, stride, int(seconds)))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))), **more}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=10 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("how", WAYS)
def test_at_some_statements(how: str) -> None:
    *mistakes, count = chaos(how, 1 + 3 * WAYS.index(how), 41)
    assert mistakes == []
    assert int(count) > 150


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_at_every_statement(how: str) -> None:
    assert chaos(how, 1, 1)[:-1] == []


def test_without_transactions_a_batch_never_ends() -> None:
    between = "UPDATE batches SET failed = failed + 1"  # the row says it has failed, its batch does not know
    assert chaos("kill", 1, 10**6, 5, **{LOOSE: between})[:-1] == ["kill 1: no end within 5 s"]
