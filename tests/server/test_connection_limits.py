"""Which connection is closed when there are too many."""

from dataclasses import dataclass, field

import pytest

from headrace.server.http.connection import GRACE, ConnectionTable
from headrace.server.http.proxies import client_group


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class One:
    """A connection that records its end."""

    address: str
    closed: list["One"] = field(repr=False)

    def abort(self) -> None:
        self.closed.append(self)


class Made:
    """A table, and the connections that it has closed."""

    def __init__(self, most: int, anonymous: int) -> None:
        self.clock = Clock()
        self.table = ConnectionTable(most, anonymous, self.clock)
        self.closed: list[One] = []

    def enter(self, address: str, admitted: bool = False, limited: bool = True) -> One:
        made = One(address, self.closed)
        self.table.add(made, limited)
        if admitted:
            self.table.mark_busy(made)
            self.table.admit(made)
        return made


def test_one_more_anonymous_connection_of_an_address_closes_its_oldest() -> None:
    made = Made(100, 2)
    first, second = made.enter("a"), made.enter("a")
    other = made.enter("b")
    made.clock.now += GRACE
    made.enter("a")
    assert made.closed == [first]
    made.table.admit(second)
    made.enter("a")
    assert made.closed == [first]
    made.table.remove(other)


def test_admitted_connections_do_not_count_for_their_address() -> None:
    """A client with a key keeps its connections, busy or not, whatever comes from its address."""
    made = Made(100, 2)
    keyed = [made.enter("a", admitted=True) for _ in range(10)]
    for one in keyed[:5]:
        made.table.mark_idle(one)
    for _ in range(50):
        made.clock.now += GRACE
        made.enter("a")
    assert len(made.closed) == 48
    assert not set(made.closed) & set(keyed)


def test_a_burst_of_new_connections_has_a_grace_period_for_its_keys() -> None:
    made = Made(100, 2)
    burst = [made.enter("a") for _ in range(20)]
    assert made.closed == []
    for one in burst:
        made.table.admit(one)
    made.clock.now += GRACE
    made.enter("a")
    assert made.closed == []


def test_a_trusted_proxy_has_no_connection_limit() -> None:
    made = Made(100, 2)
    for _ in range(20):
        made.enter("proxy", limited=False)
        made.clock.now += GRACE
    assert made.closed == []


def test_at_the_limit_the_largest_address_loses_its_oldest_connection() -> None:
    """An address with one connection stays, although it came first; a client with a key stays, although it waits."""
    made = Made(5, 100)
    keyed = made.enter("a", admitted=True)
    made.table.mark_idle(keyed)
    honest = made.enter("b")
    flood = [made.enter("c") for _ in range(8)]
    assert made.closed == flood[:5]
    new = made.enter("d")
    assert made.closed == flood[:6]
    assert {keyed, honest, new} & set(made.closed) == set()


def test_at_the_limit_the_longest_idle_connection_with_a_key_is_closed() -> None:
    made = Made(3, 100)
    keyed = [made.enter("a", admitted=True) for _ in range(3)]
    for one in (keyed[1], keyed[0]):
        made.table.mark_idle(one)
    made.enter("b")
    assert made.closed == [keyed[1]]
    made.table.mark_busy(keyed[0])
    made.table.admit(made.enter("c"))  # in place of the one from b
    assert len(made.closed) == 2
    made.enter("d")  # all that are left have requests
    assert keyed[0] not in made.closed
    assert keyed[2] not in made.closed


def test_ended_connections_leave_no_entries() -> None:
    made = Made(3, 2)
    for number in range(10):
        one = made.enter(str(number), admitted=number % 2 == 0)
        made.table.mark_idle(one)
        made.table.remove(one)
        made.table.mark_idle(one)
    assert not made.table._all
    assert not made.table._anonymous
    assert not made.table._idle


@pytest.mark.parametrize(
    ("address", "group"),
    [
        ("1.2.3.4", "1.2.3.4"),
        ("2001:db8:1:2:3:4:5:6", "20010db800010002/64"),
        ("2001:db8:1:2::1", "20010db800010002/64"),
        ("fe80::1%eth0", "fe80000000000000/64"),
        ("::ffff:1.2.3.4", "::ffff:1.2.3.4"),
        ("", ""),
    ],
)
def test_the_addresses_of_one_ipv6_network_count_as_one(address: str, group: str) -> None:
    assert client_group(address) == group
