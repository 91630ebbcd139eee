"""Principals: the owner of a key, its rights, and its quotas."""

import math
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

ANONYMOUS = "anonymous"  # the only principal of a server with one key, or none
SLOTS = 60  # parts of a quota's window
UNITS = {"requests": "requests", "tokens": "tokens", "bytes": "bytes of bodies"}


class QuotaError(Exception):
    """A quota is used up. `retry_after`: seconds until there is room; None: the request is larger than the quota."""

    def __init__(self, message: str, retry_after: int | None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaMeter:
    """Use of one quota in the last `window` seconds; `most` is the quota. Counts are kept by sixtieths of the window and
    dropped when a whole sixtieth is past, so no window contains more than `most`."""

    def __init__(self, most: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self.window = most, window
        self._clock = clock
        self._slots: deque[list[int]] = deque()  # number of the slot, amount used in it

    def take_over(self, before: "QuotaMeter") -> None:
        """Continue the counts of a meter with the same window."""
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

    def seconds_until(self, amount: int) -> float:
        """Return the seconds until `amount` is free; infinite if it is more than the quota."""
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
    """The owner of a key. Stored objects (files, batches, responses) belong to a principal by its name."""

    name: str = ANONYMOUS
    salt: bytes = b""  # of its cached prefixes; principals without a salt share theirs
    private: bool = True  # no other principal has this salt
    alone: bool = True  # the server has no other principal
    operator: bool = False  # loads and unloads models, and sees the metrics of all principals
    priority: int | None = None  # the least that its requests may name; None: the server's limit
    meters: dict[str, QuotaMeter] = field(default_factory=dict)  # by unit, of UNITS
    models: frozenset[str] = frozenset()  # names of the models it may use; empty: all

    @property
    def operates(self) -> bool:
        """Whether it may load and unload models, and sees the metrics of all: the only principal, or an operator."""
        return self.alone or self.operator

    def may_use(self, *names: str) -> bool:
        """Whether it may use a model with one of these names."""
        return not self.models or not self.models.isdisjoint(names)

    def salted(self, salt: bytes) -> bytes:
        """Return the salt of a request that names `salt`. It is never another principal's: the first byte occurs in no text, so
        clients without a salt of their own cannot name it."""
        return b"\xff" + self.salt + salt if self.salt else salt

    def has(self, unit: str, amount: int) -> bool:
        """Return whether `amount` of a quota is free."""
        return unit not in self.meters or not self.meters[unit].seconds_until(amount)

    def check(self, unit: str, amount: int) -> None:
        """Raises QuotaError if `amount` of a quota is not free."""
        if self.has(unit, amount):
            return
        meter = self.meters[unit]
        seconds = meter.seconds_until(amount)
        may = f"this key may use {meter.most} {UNITS[unit]} in {meter.window:g} s"
        if math.isinf(seconds):
            raise QuotaError(f"{may} and the request has {amount}; send less", None)
        wait = max(1, math.ceil(seconds))
        raise QuotaError(f"rate limit reached: {may} and has used {meter.used}; try again in {wait} s", wait)

    def charge(self, unit: str, amount: int) -> None:
        """Use `amount` of a quota. Raises QuotaError if it is not free."""
        self.check(unit, amount)
        self.use(unit, amount)

    def use(self, unit: str, amount: int) -> None:
        """Count `amount` as used, also above the quota."""
        if amount and (meter := self.meters.get(unit)) is not None:
            meter.add(amount)

    @property
    def seconds_until_free(self) -> float:
        """Seconds until at least 1 of every quota is free."""
        return max((meter.seconds_until(1) for meter in self.meters.values()), default=0.0)

    def room(self, most: int, held: int, own: int) -> int:
        """Return how many more of `most` things the principal may hold, if all principals hold `held` and it holds `own`. With
        several principals each may hold as many as it leaves free, so half at first."""
        free = most - held
        return free if self.alone else (free - own) // 2


PRINCIPAL: ContextVar[Principal] = ContextVar("PRINCIPAL", default=Principal())  # noqa: B039 - it has no quotas, nothing changes it
