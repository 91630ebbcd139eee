"""Choice of a replica for each request by predicted seconds: pure, without I/O, so that a simulator can run it.

The router believes that a replica keeps the prefixes of the requests that it got, up to the size of its K/V cache. The engine
reports the cached tokens of each request, which correct this. One cost then decides everything: a request goes to the replica
with its prefix until the wait there is longer than computing the prefix elsewhere. That copy makes a second holder. With peers,
another replica fetches the prefix from its holder, which costs a small share of computing it.

Source: rendezvous hashing, Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

import random
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import get_args

from headrace.data.settings import RoutePolicy
from headrace.kv.chain import chain

ENTRY = 128  # tokens of an entry
HOLDERS, HASHED, RANDOM = 4, 2, 8  # candidates: of the deepest prefixes, by rendezvous hash, at random
FETCHED = 0.05  # cost of a prompt token that is fetched from another replica, as a share of computing it
LEARN = 0.1  # weight of a new measurement
POLICIES: tuple[RoutePolicy, ...] = get_args(RoutePolicy)


def entries(prompt: Sequence[int], root: bytes) -> list[bytes]:
    """Return the hash chain of a prompt, one hash per ENTRY tokens. root: tenant salt and adapter, which share no prefixes."""
    try:
        return chain(prompt, root, ENTRY)
    except struct.error:  # no ids of tokens: the engine refuses them
        return []


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of a ready replica. queued: prompt tokens to compute. running: answers in its batch. capacity: tokens of its K/V."""

    queued: int = 0
    running: int = 0
    capacity: int = 1 << 20


@dataclass(slots=True)
class Speed:
    """Predicted seconds: of a prompt token, and of one more answer in a step. answer: tokens of a usual answer."""

    prompt_token: float = 1e-3
    row: float = 1e-3
    answer: float = 128.0


@dataclass(frozen=True, slots=True)
class Route:
    """The replica of one request. hit: prompt tokens that it should have cached. seconds: predicted cost."""

    replica: str
    chain: Sequence[bytes]
    hit: int
    seconds: float
    used: Sequence[int]  # when each entry of the hit was used before
    holder: str = ""  # with peers: another replica that should have more of the prompt cached; empty: none
    held: int = 0  # prompt tokens that it should have


class Prefixes:
    """Entries that one replica should have cached, with the time of their last use; the least recently used is first."""

    def __init__(self) -> None:
        self._used: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def depth(self, chain: Sequence[bytes]) -> int:
        """Return the number of leading entries of `chain` that are cached.

        An entry is always older than the entries before it in its chain, so the cached ones of a chain are a prefix of it.
        """
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if chain[middle] in self._used else (low, middle)
        return low

    def add(self, chain: Sequence[bytes], depth: int, now: int, most: int) -> list[int]:
        """Use all entries of a chain, and forget the oldest above `most`. Returns the last use of the first `depth` ones."""
        before = [self._used[entry] for entry in chain[:depth]]
        # The deepest entry is the oldest: an engine also frees the end of a prefix first.
        for entry in reversed(chain):
            self._used[entry] = now
            self._used.move_to_end(entry)
        while len(self._used) > most:
            self._used.popitem(last=False)
        return before

    def forget(self, until: int) -> None:
        """Forget the entries that were last used at `until` or earlier."""
        while self._used and next(iter(self._used.values())) <= until:
            self._used.popitem(last=False)


class Router:
    """Chooses a replica for each request. One per model.

    policy: affinity (least predicted seconds), least (the same without cached prefixes) or round (in turns). seed: of the
    random candidates. peers: replicas fetch K/V from each other.
    """

    def __init__(
        self, policy: RoutePolicy = "affinity", speed: Speed | None = None, seed: int = 0, peers: bool = False
    ) -> None:
        self.policy = policy
        self.peers = peers
        self.speed = speed or Speed()
        self._prefixes: dict[str, Prefixes] = {}
        self._random = random.Random(seed)
        self._count = 0  # requests, which is also the time of the entries

    def pick(self, chain: Sequence[bytes], tokens: int, loads: Mapping[str, ReplicaLoad]) -> Route | None:
        """Return the route of a prompt with this hash chain and length. loads: the ready replicas; None if there are none."""
        if not loads:
            return None
        self._count += 1
        depths = {name: self._of(name).depth(chain) for name in loads}
        holder = max(depths, key=depths.__getitem__)
        best: tuple[float, int, str] | None = None
        for rank, name in enumerate(self._candidates(chain, depths)):
            known = depths[name] if self.policy == "affinity" else 0
            fetched = depths[holder] - known if self.peers else 0
            seconds = self._seconds(max(0, tokens - (known + fetched) * ENTRY) + FETCHED * fetched * ENTRY, loads[name])
            if best is None or seconds < best[0]:
                best = seconds, rank, name
        assert best is not None
        seconds, _, name = best
        depth = depths[name]
        used = self._of(name).add(chain, depth, self._count, loads[name].capacity // ENTRY)
        if not self.peers or depths[holder] <= depth:
            return Route(name, chain, min(tokens, depth * ENTRY), seconds, used)
        return Route(name, chain, min(tokens, depth * ENTRY), seconds, used, holder, min(tokens, depths[holder] * ENTRY))

    def answered(self, route: Route, cached: int) -> None:
        """Correct the entries of a replica by the prompt tokens that it had cached.

        A replica that has freed an entry has also freed those that were used earlier.
        """
        if cached + ENTRY <= route.hit and (prefixes := self._prefixes.get(route.replica)) is not None:
            prefixes.forget(route.used[cached // ENTRY])

    def learn(self, tokens: int, seconds: float, answer: int) -> None:
        """Correct the predicted speed by a request: computed prompt tokens, their seconds, and the length of the answer."""
        if tokens > 0 and seconds > 0:
            measured = seconds / tokens
            # A row of an answer is computed like a prompt token. Short prompts also wait for a step, so they say less.
            weight = LEARN * min(1.0, tokens / ENTRY)
            self.speed.prompt_token += weight * (measured - self.speed.prompt_token)
            self.speed.row = self.speed.prompt_token
        self.speed.answer += LEARN * (answer - self.speed.answer)

    def forget(self, replica: str) -> None:
        """Forget the entries of a replica whose K/V cache is lost."""
        self._prefixes.pop(replica, None)

    def _of(self, name: str) -> Prefixes:
        return self._prefixes.setdefault(name, Prefixes())

    def _seconds(self, tokens: float, load: ReplicaLoad) -> float:
        """Predict the cost of `tokens` more: wait, prefill, and the time shared with the running answers."""
        speed = self.speed
        return (load.queued + tokens) * speed.prompt_token + load.running * speed.row * speed.answer

    def _candidates(self, chain: Sequence[bytes], depths: Mapping[str, int]) -> list[str]:
        """Return the replicas to compare, the preferred one of equal costs first."""
        names = list(depths)
        if self.policy == "round":
            return [names[self._count % len(names)]]
        # Without entries the order is random, or the first replica would get every short request of an idle server.
        first = chain[0] if chain else self._random.randbytes(8)
        names.sort(key=lambda name: blake2b(name.encode(), key=first, digest_size=8).digest())
        if len(names) <= HOLDERS + HASHED + RANDOM:
            return names
        chosen = names[:HASHED]
        chosen += sorted((name for name in names[HASHED:] if depths[name]), key=lambda name: -depths[name])[:HOLDERS]
        rest = [name for name in names if name not in chosen]
        return chosen + self._random.sample(rest, min(RANDOM, len(rest)))
