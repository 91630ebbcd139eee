"""Ranks of the native core from Python: shared regions, exchanges between processes, lost processes, shares of columns.

The exchanges inside a model are tested in tests/native/ranks_test.cpp.
"""

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from headrace import core

_core = core.module()
CHILD = """
import sys
from headrace import core
region = core.module().Region.open(int(sys.argv[1]))
ranks = core.module().Ranks(region, 1, timeout=60.0)
print("ready", flush=True)
core.module().follow(ranks, [])
"""


def started(region: Any) -> subprocess.Popen[str]:
    """A process that is rank 1 of the region."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(region.descriptor)]
    child = subprocess.Popen(command, pass_fds=[region.descriptor], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_ranks_add_in_a_tree() -> None:
    region = _core.Region(4, 1, 100, 64)
    parts = [np.random.default_rng(rank).normal(size=100).astype(np.float32) for rank in range(4)]
    sums: list[np.ndarray] = [np.empty(0)] * 4

    def add(rank: int) -> None:
        sums[rank], _ = _core.time_exchanges(_core.Ranks(region, rank), parts[rank], 5)

    threads = [threading.Thread(target=add, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = (parts[0] + parts[1]) + (parts[2] + parts[3])
    assert all(np.array_equal(each, wanted) for each in sums)
    assert not np.array_equal(wanted, ((parts[0] + parts[1]) + parts[2]) + parts[3])  # the control: one after the other


def test_the_leader_ends_its_followers() -> None:
    region = _core.Region(2, 1, 64, 64)
    leader = _core.Ranks(region, 0)
    child = started(region)
    leader.end()
    assert child.wait(60) == 0
    assert leader.lost == ""


def test_a_killed_follower_is_noticed() -> None:
    region = _core.Region(2, 1, 64, 64)
    leader = _core.Ranks(region, 0, timeout=600.0)
    child = started(region)
    child.kill()
    with pytest.raises(_core.RankLost, match="rank 1 of 2 has ended"):
        _core.time_exchanges(leader, np.zeros(64, np.float32), 1)
    assert leader.lost == "rank 1 of 2 has ended"
    assert child.wait(60) == -signal.SIGKILL


def test_a_stopped_follower_is_noticed_and_ends_once_it_runs_again() -> None:
    region = _core.Region(2, 1, 64, 64)
    leader = _core.Ranks(region, 0, timeout=0.2)
    child = started(region)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(_core.RankLost, match="rank 1 of 2 has not answered"):
        _core.time_exchanges(leader, np.zeros(64, np.float32), 1)
    os.kill(child.pid, signal.SIGCONT)
    assert child.wait(60) == 1


def test_bad_regions_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="1, 2, 4 or 8 ranks, not 3"):
        _core.Region(3, 1, 64, 64)
    with open(os.devnull) as file, pytest.raises(RuntimeError, match="sealed"):
        _core.Region.open(file.fileno())
    region = _core.Region(2, 1, 64, 64)
    _leader = _core.Ranks(region, 0)
    with pytest.raises(ValueError, match="is rank 0 already"):
        _core.Ranks(region, 0)
    with pytest.raises(ValueError, match="ranks 0 to 1, not 2"):
        _core.Ranks(region, 2)


def test_shares_of_columns() -> None:
    # SmolLM2: nine heads of 64; the MLP has 24 units of 64 columns.
    assert _core.column_shares(576, 64, 2) == [(0, 256), (256, 576)]
    assert [end - begin for begin, end in _core.column_shares(576, 64, 4)] == [128, 128, 128, 192]
    assert _core.column_shares(1536, 64, 2) == [(0, 768), (768, 1536)]
    with pytest.raises(ValueError, match="cannot be cut for 8 ranks"):
        _core.column_shares(256, 64, 8)
    assert [_core.block_columns(kind) for kind in ("Q8_0", "Q4_K", "G4_128", "BF16")] == [64, 256, 128, 64]
