"""Ctrl-C: noted while the engine runs, acted on at once while a person is waited for, and never lost."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from headrace.cli.interrupt import Interrupt
from headrace.engine.lockstep import Uninterrupted


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_one_is_noted_and_a_second_raises() -> None:
    with Interrupt() as interrupt:
        press()
        assert interrupt()
        with pytest.raises(KeyboardInterrupt):
            press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_second_ctrl_c_does_not_end_a_chat() -> None:
    with Interrupt(second=False) as interrupt:
        for _ in range(3):
            press()
        with Uninterrupted():  # an engine step
            press()
            press()
        assert interrupt()


def test_ctrl_c_between_two_reads_is_not_lost() -> None:
    with Interrupt(second=False) as interrupt:
        press()
        with pytest.raises(KeyboardInterrupt):
            interrupt.wait(lambda: pytest.fail("nothing was to be read"))
        assert interrupt.wait(lambda: "a line") == "a line"  # once only
        with pytest.raises(KeyboardInterrupt):
            interrupt.wait(press)
        press()
        press()
        assert interrupt()


def test_a_signal_in_another_thread_ends_the_wait() -> None:
    """Another thread takes the signal, as if it had come just before the wait: nothing wakes the main thread but the timer."""
    read, write = os.pipe()
    other = threading.Timer(0.05, press)
    try:
        with Interrupt() as interrupt:
            other.start()
            with pytest.raises(KeyboardInterrupt):
                interrupt.wait(lambda: os.read(read, 1))
    finally:
        other.join()
        os.close(read)
        os.close(write)


def test_earlier_handlers_are_restored() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGALRM, mine)
    try:
        with Interrupt() as interrupt:
            assert interrupt.wait(lambda: signal.getitimer(signal.ITIMER_REAL))[1] > 0
            assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGALRM, before)


def test_where_it_is_ignored_it_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            interrupt.wait(press)
        assert not interrupt.requested
    finally:
        signal.signal(signal.SIGINT, before)


class OutOfTimeError(Exception):
    pass


@pytest.fixture
def handlers() -> Iterator[list[str]]:
    """Handlers of two signals that raise; the names of those that ran."""
    ran: list[str] = []

    def raise_timeout(number: int, frame: object) -> None:
        ran.append(signal.Signals(number).name)
        raise OutOfTimeError(ran[-1])

    before = {number: signal.signal(number, raise_timeout) for number in (signal.SIGALRM, signal.SIGUSR1)}
    yield ran
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_handler_runs_after_the_step_and_its_exception_reaches_the_caller() -> None:
    done = []

    def step() -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
            done.append("the step")
        except Exception:  # as the engine does
            done.append("swallowed")

    with pytest.raises(OutOfTimeError, match="SIGALRM"), Uninterrupted():
        step()
    assert done == ["the step"]
    with pytest.raises(OutOfTimeError, match="SIGALRM"):
        signal.raise_signal(signal.SIGALRM)  # at once again


def test_no_signal_is_lost_when_several_arrive_and_steps_nest(handlers: list[str]) -> None:
    done = []

    def abort() -> None:
        with Uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGALRM)
        done.append("after the inner one")

    with pytest.raises(OutOfTimeError), Uninterrupted():
        abort()
    assert done == ["after the inner one"]
    assert handlers == ["SIGUSR1", "SIGALRM"], "in order of arrival"
