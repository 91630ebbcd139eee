"""Threads that share an engine: each gets its own, and none waits for ever."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.engine.lockstep import FairLock


def test_the_lock_is_granted_in_the_order_of_requests() -> None:
    """A thread that hands the lock on and asks again comes after those that waited."""
    turns, order = FairLock(), []
    waiting = threading.Barrier(2)

    def second() -> None:
        waiting.wait()
        with turns:
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with turns:
            other = pool.submit(second)
            waiting.wait()
            while not turns._waiting:
                time.sleep(0.001)
            order.append("first")
        with turns:
            order.append("first again")
        other.result(300)
    assert order == ["first", "second", "first again"]


def test_at_most_one_thread_holds_the_lock() -> None:
    turns, inside, most = FairLock(), [0], [0]

    def work(_: int) -> None:
        for _ in range(200):
            with turns:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert most == [1]
    assert not turns._held
    assert not turns._waiting


def test_an_error_inside_hands_it_on() -> None:
    turns = FairLock()
    with pytest.raises(RuntimeError, match="inside"), turns:
        raise RuntimeError("inside")
    with turns:
        pass


def test_an_interrupted_waiter_leaves_the_queue() -> None:
    """Ctrl-C while the main thread waits for its turn."""
    turns, release = FairLock(), threading.Event()

    def hold() -> None:
        with turns:
            while not turns._waiting:
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            release.wait(300)

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold)
        while not turns._held:
            time.sleep(0.001)
        with pytest.raises(KeyboardInterrupt), turns:
            pass
        assert not turns._waiting
        release.set()
        holder.result(300)
    with turns:
        pass
