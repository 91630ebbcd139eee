"""The router: prefixes, load, candidates, corrected beliefs. No process, no time."""

from collections import Counter

import pytest

from headrace.data.settings import RoutePolicy
from headrace.server.engines import router as routing
from headrace.server.engines.router import ENTRY, POLICIES, ReplicaLoad, Route, Router, Speed, entries

NAMES = [str(number) for number in range(4)]
IDLE = {name: ReplicaLoad() for name in NAMES}
BUSY = ReplicaLoad(queued=100_000)


def prompt(start: int, count: int = 8) -> list[int]:
    """Token ids of `count` entries, and 7 more."""
    return list(range(start, start + count * ENTRY + 7))


def pick(router: Router, tokens: list[int], loads: dict[str, ReplicaLoad] = IDLE, salt: bytes = b"") -> Route:
    route = router.pick(entries(tokens, salt), len(tokens), loads)
    assert route is not None
    return route


def test_a_prefix_goes_to_its_replica_and_is_a_hit() -> None:
    router = Router()
    first = pick(router, prompt(0))
    assert first.hit == 0
    longer = pick(router, [*prompt(0), *range(1000)])
    assert (longer.replica, longer.hit) == (first.replica, 8 * ENTRY)
    assert longer.seconds == pytest.approx(router.speed.prompt_token * 1007)
    half = pick(router, [*prompt(0)[: 4 * ENTRY], *range(9000, 9999)])
    assert (half.replica, half.hit) == (first.replica, 4 * ENTRY)


def test_a_hit_is_left_for_a_shorter_wait_and_then_two_replicas_hold_it() -> None:
    router = Router()
    first = pick(router, prompt(0)).replica
    short = {**IDLE, first: ReplicaLoad(queued=500)}
    assert pick(router, prompt(0), short).replica == first  # 1024 tokens to compute elsewhere
    long = {**IDLE, first: ReplicaLoad(queued=2000)}
    second = pick(router, prompt(0), long).replica
    assert second != first
    assert pick(router, prompt(0), {**IDLE, first: BUSY}).hit == 8 * ENTRY


def replay(router: Router, same_load: bool) -> Counter[str]:
    """The replicas of 64 prompts with one beginning, of which none ends."""
    queued: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for number in range(64):
        loads = {name: ReplicaLoad(0 if same_load else queued[name]) for name in NAMES}
        route = pick(router, [*prompt(0), *range(number * 10_000, number * 10_000 + 500)], loads)
        queued[route.replica] += 1531 - route.hit
        taken[route.replica] += 1
    return taken


def test_load_spreads_one_prefix_over_all_replicas() -> None:
    taken = replay(Router(), same_load=False)
    assert set(taken) == set(NAMES)
    assert max(taken.values()) <= 20


def test_the_control_without_load_one_replica_gets_all() -> None:
    assert list(replay(Router(), same_load=True).values()) == [64]


def test_running_answers_count() -> None:
    loads = {"a": ReplicaLoad(running=8), "b": ReplicaLoad(queued=100)}
    assert pick(Router(speed=Speed(1e-3, 1e-3, 100.0)), prompt(0), loads).replica == "b"


def test_tenants_share_no_hit() -> None:
    router = Router()
    assert pick(router, prompt(0), salt=b"one").hit == 0
    assert pick(router, prompt(0), salt=b"two").hit == 0
    assert pick(router, prompt(0), salt=b"one").hit == 8 * ENTRY


def test_least_does_not_look_at_prefixes_and_round_takes_turns() -> None:
    least, turns = Router("least"), Router("round")
    first = pick(least, prompt(0)).replica
    assert pick(least, prompt(0), {**IDLE, first: ReplicaLoad(queued=1)}).replica != first
    assert Counter(pick(turns, prompt(0)).replica for _ in range(8)) == dict.fromkeys(NAMES, 2)


def test_cached_tokens_correct_what_a_replica_has() -> None:
    """A replica that has freed an entry has freed all entries that were used before it."""
    router, one = Router(), {"a": ReplicaLoad()}
    for start in (0, 100_000, 200_000):
        pick(router, prompt(start), one)
    route = pick(router, prompt(100_000), one)
    assert route.hit == 8 * ENTRY
    router.answered(route, 8 * ENTRY)  # as expected
    assert pick(router, prompt(0), one).hit == 8 * ENTRY

    router = Router()
    for start in (0, 100_000, 200_000):
        pick(router, prompt(start), one)
    router.answered(pick(router, prompt(100_000), one), 3 * ENTRY)
    assert pick(router, prompt(0), one).hit == 0
    assert pick(router, prompt(200_000), one).hit == 8 * ENTRY
    assert pick(router, prompt(100_000), one).hit == 8 * ENTRY  # it was computed


def test_a_full_cache_forgets_the_oldest_prefix_from_its_end() -> None:
    router, small = Router(), {"a": ReplicaLoad(capacity=12 * ENTRY)}
    pick(router, prompt(0), small)
    pick(router, prompt(100_000), small)
    assert pick(router, prompt(0), small).hit == 4 * ENTRY


def test_a_lost_cache_is_forgotten() -> None:
    router, one = Router(), {"a": ReplicaLoad()}
    route = pick(router, prompt(0), one)
    router.forget("a")
    router.answered(route, 0)  # of a request that ended meanwhile
    assert pick(router, prompt(0), one).hit == 0


def test_no_replica_no_route() -> None:
    assert Router().pick([], 5, {}) is None


def test_short_prompts_go_to_all_replicas() -> None:
    router = Router()
    assert len({pick(router, [number]).replica for number in range(64)}) == len(NAMES)


def test_ids_beyond_32_bits_have_no_entries() -> None:
    assert entries([2**40] * 200, b"") == []


@pytest.mark.parametrize("policy", POLICIES)
def test_many_replicas_are_not_all_compared(policy: RoutePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    router, loads = Router(policy), {str(number): ReplicaLoad() for number in range(100)}
    compared = Counter[int]()
    monkeypatch.setattr(Router, "_seconds", lambda self, tokens, load: compared.update([tokens]) or tokens * 1.0)
    home = pick(router, prompt(0), loads).replica
    before = compared.total()
    again = pick(router, prompt(0), loads)
    assert compared.total() - before <= routing.HOLDERS + routing.HASHED + routing.RANDOM
    if policy == "affinity":
        assert (again.replica, again.hit) == (home, 8 * ENTRY)  # its holder is a candidate


def test_equal_costs_go_to_the_same_replica_after_a_restart_of_the_router() -> None:
    assert {pick(Router(seed=seed), prompt(0)).replica for seed in range(8)} == {pick(Router(), prompt(0)).replica}


def test_the_speed_is_learned() -> None:
    router = Router(speed=Speed(1e-3, 1e-3, 128.0))
    for _ in range(100):
        router.learn(1000, 0.2, 10)
    assert router.speed.prompt_token == pytest.approx(2e-4, rel=0.01)
    assert router.speed.answer == pytest.approx(10, rel=0.01)
    before = router.speed.prompt_token
    router.learn(0, 1.0, 10)  # all of it was cached
    assert router.speed.prompt_token == before
