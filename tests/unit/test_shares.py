"""Clients' shares of CPU time in confined processes."""

import sys
import threading

import pytest

from headrace.confined.pool import BURST, CLIENTS, FREE, CpuShares


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shares(clock: Clock) -> CpuShares:
    return CpuShares(0.1, clock)


def test_a_client_is_over_its_share_after_a_burst_and_not_for_ever(shares: CpuShares, clock: Clock) -> None:
    shares.charge("a", BURST + FREE)
    assert not shares.used_up("a")
    shares.charge("a", 0.1 + FREE)
    assert shares.used_up("a")
    assert not shares.used_up("b")
    clock.now = 1.01
    assert not shares.used_up("a")


def test_short_questions_are_free(shares: CpuShares) -> None:
    for _ in range(100_000):
        shares.charge("a", FREE)
    assert not shares.used_up("a")


def test_the_program_itself_has_no_limit(shares: CpuShares) -> None:
    shares.charge("", 1000.0)
    assert not shares.used_up("")


def test_only_clients_over_their_share_are_remembered(shares: CpuShares, clock: Clock) -> None:
    for number in range(3 * CLIENTS):
        shares.charge(str(number), 0.01)
        clock.now += 1.0
    assert len(shares._until) <= CLIENTS


def test_threads_charge_at_once(shares: CpuShares) -> None:
    count = 2000
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [shares.charge("a", 0.25 + FREE) for _ in range(count)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert shares._until["a"] == pytest.approx(4 * count * 0.25 / shares.rate)
