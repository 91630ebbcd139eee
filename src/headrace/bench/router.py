"""Simulation of replicas and their router on a virtual clock, with the requests of a trace. Every figure is a prediction.

The router is the one of the server. A simulated replica computes steps: rows of all running answers, and a chunk of the first
prompt in its queue. Its prefix cache has a size, and evicts the least recently used blocks, the end of a prefix first.
"""

import heapq
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from headrace.bench.figures import Column, percent
from headrace.data.settings import RoutePolicy
from headrace.server.engines.router import ENTRY, ReplicaLoad, Route, Router, Speed

BLOCK = 512  # tokens of a hash id in the traces of Mooncake
BATCH = 64  # most running answers of a replica
COLUMNS = (
    Column("route", "{route}"),
    Column("hits", lambda row: percent(row["hits"])),
    Column("of one pooled cache", lambda row: percent(row["of_pooled"])),
    Column("TTFT p50", "{ttft_p50:.2f} s"),
    Column("TTFT p99", "{ttft_p99:.2f} s"),
    Column("busiest replica", lambda row: percent(row["busiest"])),
)


@dataclass(slots=True)
class TraceRequest:
    """One request of a trace. arrival: seconds. blocks: ids of blocks of BLOCK tokens, equal for equal prefixes."""

    arrival: float
    prompt: int
    answer: int
    blocks: Sequence[int]
    cached: int = 0
    left: int = 0  # prompt tokens to compute
    generated: int = 0
    first_token: float = 0.0
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """A simulated replica: seconds of a prompt token, and of an answer in a step; tokens of its K/V cache; tokens of a step."""

    prompt_token: float
    row: float
    capacity: int
    chunk: int = 2048


def read_trace(path: Path, rate: float = 1.0, most: int | None = None) -> list[TraceRequest]:
    """Read requests as Mooncake publishes them: JSON lines with timestamp (ms), input_length, output_length and hash_ids.

    rate: requests arrive this number of times as fast. Raises ValueError, which names the line.
    """
    requests = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                data = json.loads(line)
                arrival, prompt = float(data["timestamp"]) / 1000 / rate, int(data["input_length"])
                requests.append(TraceRequest(arrival, prompt, int(data["output_length"]), list(map(int, data["hash_ids"]))))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path.name}: line {number} is no request of a trace ({error})") from None
            if len(requests) == most:
                break
    if not requests:
        raise ValueError(f"{path.name}: the trace has no requests")
    return sorted(requests, key=lambda request: request.arrival)


class BlockCache:
    """Prefix cache of a replica by block ids; the least recently used block is first."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK
        self._blocks: OrderedDict[Any, None] = OrderedDict()

    def find(self, blocks: Sequence[Any]) -> int:
        """Return the number of leading blocks that are cached."""
        return next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def use(self, blocks: Sequence[Any]) -> None:
        """Cache blocks, or renew their use."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


@dataclass(slots=True)
class SimulatedReplica:
    """Queue, batch and cache of one replica."""

    machine: Machine
    cache: BlockCache
    queue: deque[TraceRequest] = field(default_factory=deque)
    running: list[TraceRequest] = field(default_factory=list)
    stepping: bool = False
    busy: float = 0.0  # seconds of all steps

    @property
    def load(self) -> ReplicaLoad:
        queued = sum(request.left for request in self.queue)
        return ReplicaLoad(queued, len(self.running), self.machine.capacity)

    def begin_step(self) -> float:
        """Choose the prompt tokens of a step; returns its seconds."""
        self.stepping = True
        seconds, room = len(self.running) * self.machine.row, self.machine.chunk
        for request in list(self.queue)[: max(0, BATCH - len(self.running))]:
            if request.cached < 0:
                hit = min(self.cache.find(request.blocks) * BLOCK, request.prompt - 1)
                request.cached, request.left = hit, request.prompt - hit
            taken = min(room, request.left)
            request.left, room = request.left - taken, room - taken
            seconds += taken * self.machine.prompt_token
            if not room:
                break
        self.busy += seconds
        return seconds

    def end_step(self, now: float) -> list[TraceRequest]:
        """Generate a token of each running answer, and the first ones of computed prompts; returns the ended requests."""
        self.stepping = False
        for request in self.running:
            request.generated += 1
        while self.queue and not self.queue[0].left and self.queue[0].cached >= 0:
            request = self.queue.popleft()
            request.first_token, request.generated = now, 1
            self.cache.use(request.blocks)
            self.running.append(request)
        ended = [request for request in self.running if request.generated >= request.answer]
        self.running = [request for request in self.running if request.generated < request.answer]
        for request in ended:  # the answer takes blocks of the cache, too
            self.cache.use([(id(request), place) for place in range(request.answer // BLOCK)])
        return ended


def simulate(trace: Iterable[TraceRequest], replicas: int, machine: Machine, policy: RoutePolicy) -> dict[str, Any]:
    """Run a trace on replicas; returns the figures of one row."""
    router = Router(policy, Speed(machine.prompt_token, machine.row, 128.0))
    every = {str(number): SimulatedReplica(machine, BlockCache(machine.capacity)) for number in range(replicas)}
    requests = list(trace)
    for request in requests:
        request.cached, request.generated, request.left = -1, 0, 0
    steps: list[tuple[float, str]] = []
    arrivals = deque(requests)
    while arrivals or steps:
        if arrivals and (not steps or arrivals[0].arrival <= steps[0][0]):
            request = arrivals.popleft()
            now = request.arrival
            request.route = router.pick(_entries(request), request.prompt, {name: one.load for name, one in every.items()})
            assert request.route is not None
            name = request.route.replica
            request.left = request.prompt - request.route.hit
            every[name].queue.append(request)
        else:
            now, name = heapq.heappop(steps)
            for ended in every[name].end_step(now):
                assert ended.route is not None
                router.answered(ended.route, ended.cached)
                router.learn(0, 0.0, ended.answer)
        one = every[name]
        if not one.stepping and (one.queue or one.running):
            heapq.heappush(steps, (now + one.begin_step(), name))
    waits = sorted(request.first_token - request.arrival for request in requests)
    busy = [one.busy for one in every.values()]
    return {
        "route": policy,
        "hits": sum(request.cached for request in requests) / sum(request.prompt for request in requests),
        "ttft_p50": median(waits),
        "ttft_p99": quantiles(waits, n=100)[98] if len(waits) > 1 else waits[0],
        "busiest": max(busy) / max(sum(busy), 1e-9),
    }


def pooled_hits(trace: Sequence[TraceRequest], replicas: int, machine: Machine) -> float:
    """Return the share of prompt tokens that one cache of all replicas' size has: the most that a router can reach."""
    cache, hits = BlockCache(replicas * machine.capacity), 0
    for request in trace:
        hits += min(cache.find(request.blocks) * BLOCK, request.prompt - 1)
        cache.use(request.blocks)
    return hits / sum(request.prompt for request in trace)


def compare(trace: Sequence[TraceRequest], replicas: int, machine: Machine, policies: Sequence[RoutePolicy]) -> dict[str, Any]:
    """Simulate all policies on a trace; returns the figures, which are all predicted."""
    pooled = pooled_hits(trace, replicas, machine)
    rows = [simulate(trace, replicas, machine, policy) for policy in policies]
    for row in rows:
        row["of_pooled"] = row["hits"] / pooled if pooled else 1.0
    return {"predicted": True, "replicas": replicas, "requests": len(trace), "pooled_hits": pooled, "rows": rows}


def _entries(request: TraceRequest) -> list[bytes]:
    """The router's entries of a prompt, several for each block."""
    count = request.prompt // ENTRY
    return [b"%d:%d" % (block, part) for block in request.blocks for part in range(BLOCK // ENTRY)][:count]
