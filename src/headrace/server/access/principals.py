"""Whose request it is: what the holder of a key is called, what he may ask for and what he has used of it."""

import math
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

ANONYMOUS = "anonymous"  # who asks a server that has one key, or none
SLOTS = 60  # parts of a window that are forgotten one by one
UNITS = {"requests": "requests", "tokens": "tokens", "bytes": "bytes of bodies"}


class QuotaError(Exception):
    """A principal has used what it may. `retry_after`: in how many seconds there is room; None: there never is."""

    def __init__(self, message: str, retry_after: int | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaMeter:
    """What was used in the last `window` seconds, of which it may be `most`. It is forgotten by sixtieths of the window, each
    when all of it is past: in no window is more used than may be."""

    def __init__(self, most: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.window = most, window
        self._clock = clock
        self._slots: deque[list[int]] = deque()  # number of the slot, what was used in it

    def goes_on(self, before: "QuotaMeter") -> None:
        """It takes the place of another: what was used remains used."""
        if before.window == self.window:
            self._slots = before._slots

    @property
    def used(self) -> int:
        past = self._number() - SLOTS
        while self._slots and self._slots[0][0] < past:
            self._slots.popleft()
        return sum(amount for _, amount in self._slots)

    def add(self, amount: int) -> None:
        number = self._number()
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append([number, 0])
        self._slots[-1][1] += amount

    def patience(self, amount: int) -> float:
        """Seconds until so much may be used; infinite where it is more than may be."""
        over = self.used + amount - self.most
        if over <= 0:
            return 0.0
        for number, gone in self._slots:
            over -= gone
            if over <= 0:
                return (number + SLOTS + 1) * self.window / SLOTS - self._clock()
        return math.inf

    def _number(self) -> int:
        return math.floor(self._clock() * SLOTS / self.window)


@dataclass(eq=False, slots=True)
class Principal:
    """Who asks. What a principal keeps (files, batches, responses) is its own alone, by its name."""

    name: str = ANONYMOUS
    salt: bytes = b""  # of its cached prefixes; without one they are shared with all who have none
    private: bool = True  # nobody else has this salt
    alone: bool = True  # nobody else has a key of this server
    operator: bool = False  # sees everybody's figures
    priority: int | None = None  # that it may name at least; None: what the server says
    meters: dict[str, QuotaMeter] = field(default_factory=dict)  # of UNITS

    def salted(self, salt: bytes) -> bytes:
        """The salt of a request that names this one: never another principal's. A first byte that no text has sets it apart
        from all that a client without a salt of its own can name."""
        return b"\xff" + self.salt + salt if self.salt else salt

    def has(self, unit: str, amount: int) -> bool:
        """Whether there is so much left of a quota."""
        return unit not in self.meters or not self.meters[unit].patience(amount)

    def check(self, unit: str, amount: int) -> None:
        """Raises QuotaError where there is not so much left."""
        if self.has(unit, amount):
            return
        meter = self.meters[unit]
        seconds = meter.patience(amount)
        may = f"this key may use {meter.most} {UNITS[unit]} in {meter.window:g} s"
        if math.isinf(seconds):
            raise QuotaError(f"{may} and the request has {amount}; send less", None)
        wait = max(1, math.ceil(seconds))
        raise QuotaError(f"rate limit reached: {may} and has used {meter.used}; try again in {wait} s", wait)

    def charge(self, unit: str, amount: int) -> None:
        """Use so much of a quota. Raises QuotaError."""
        self.check(unit, amount)
        self.use(unit, amount)

    def use(self, unit: str, amount: int) -> None:
        """Take in what was used, whether or not it might be."""
        if amount and (meter := self.meters.get(unit)) is not None:
            meter.add(amount)

    @property
    def patience(self) -> float:
        """Seconds until there is something left of every quota."""
        return max((meter.patience(1) for meter in self.meters.values()), default=0.0)

    def room(self, most: int, held: int, own: int) -> int:
        """How much more it may hold of `most` things of which all together hold `held` and it holds `own`. Of several each
        has at most as much as is left free: half of it at first, and there is something left for others."""
        free = most - held
        return free if self.alone else (free - own) // 2


PRINCIPAL: ContextVar[Principal] = ContextVar("PRINCIPAL", default=Principal())  # noqa: B039 - it has no quotas, nothing changes it
