"""The simulation of replicas: a small trace that is generated, and the published one if it is here."""

import json
import random
from pathlib import Path

import pytest

from headrace.bench import router as bench
from headrace.bench.router import BLOCK, BlockCache, Machine, TraceRequest
from headrace.server.engines.router import POLICIES

PUBLISHED = Path(__file__).parents[3] / "shared/data/traces/mooncake_synthetic.jsonl"
MACHINE = Machine(prompt_token=1 / 8000, row=2e-4, capacity=60 * BLOCK)


def conversations(count: int = 40, turns: int = 6) -> list[TraceRequest]:
    """Conversations of which each turn has the turns before it as its beginning."""
    chance = random.Random(5)
    requests = []
    for number in range(count):
        arrival, start = chance.uniform(0, 40), number * 1000
        for turn in range(turns):
            blocks = list(range(start, start + 2 * turn + 2))
            requests.append(TraceRequest(arrival, len(blocks) * BLOCK - 37, 20, blocks))
            arrival += chance.uniform(2, 6)
    return sorted(requests, key=lambda request: request.arrival)


def write(path: Path, requests: list[TraceRequest]) -> Path:
    rows = [
        {"timestamp": 1000 * one.arrival, "input_length": one.prompt, "output_length": one.answer, "hash_ids": one.blocks}
        for one in requests
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_the_router_keeps_most_hits_and_shortens_the_wait(tmp_path: Path) -> None:
    trace = bench.read_trace(write(tmp_path / "trace.jsonl", conversations()))
    figures = bench.compare(trace, 4, MACHINE, POLICIES)
    affinity, least, turns = figures["rows"]
    assert figures["predicted"] is True
    assert max(least["of_pooled"], turns["of_pooled"]) < 0.8 < 0.9 <= affinity["of_pooled"]
    assert affinity["ttft_p99"] < min(least["ttft_p99"], turns["ttft_p99"])
    assert affinity["busiest"] < 0.4
    assert all(request.generated == request.answer for request in trace)


def test_one_replica_has_the_hits_of_one_cache() -> None:
    trace = conversations(10)
    (row,) = bench.compare(trace, 1, Machine(1e-6, 0.0, 10**6), ["affinity"])["rows"]
    assert row["of_pooled"] == pytest.approx(1.0)


def test_a_faster_trace_arrives_sooner(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", conversations(3))
    slow, fast = bench.read_trace(path), bench.read_trace(path, rate=2.0, most=5)
    assert len(fast) == 5
    assert fast[-1].arrival == pytest.approx(slow[4].arrival / 2)


def test_the_simulated_cache_evicts_the_end_of_the_oldest_prefix() -> None:
    cache = BlockCache(4 * BLOCK)
    cache.use([1, 2, 3])
    cache.use([7, 8])
    assert (cache.find([1, 2, 3]), cache.find([7, 8])) == (2, 2)


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"timestamp": 1, "input_length": "x", "output_length": 1, "hash_ids": []}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line}\n", "utf-8")
    with pytest.raises(ValueError, match=r"trace\.jsonl: line 1 is no request"):
        bench.read_trace(path)
    path.write_text("", "utf-8")
    with pytest.raises(ValueError, match="has no requests"):
        bench.read_trace(path)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="the trace of Mooncake is not here")
def test_eight_replicas_reach_nine_tenths_of_one_pooled_cache() -> None:
    figures = bench.compare(bench.read_trace(PUBLISHED), 8, Machine(1 / 8000, 2e-4, 4_000_000), ["affinity", "least"])
    affinity, least = figures["rows"]
    assert affinity["of_pooled"] >= 0.90
    assert affinity["ttft_p50"] <= 0.3 * least["ttft_p50"]
