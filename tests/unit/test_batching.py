"""Static against continuous batching, and memory by reservation scheme, on the trace of `benchmarks.batching`."""

import pytest

from benchmarks.batching import MAX_LEN, PolicyResult, memory_table, run_on_fake_model, trace
from benchmarks.reservation import TraceRequest, contiguous, paged, power_of_two, schemes


def test_the_trace_has_its_stated_lengths() -> None:
    jobs = trace(4000)
    assert trace(50) == trace(50) != trace(50, seed=1)
    assert sum(job.prompt for job in jobs) / len(jobs) == pytest.approx(300, rel=0.1)
    assert sum(job.output for job in jobs) / len(jobs) == pytest.approx(150, rel=0.1)
    outputs = sorted(job.output for job in jobs)
    assert outputs[-40] > 5 * outputs[len(outputs) // 2], "the tail is not heavy"
    assert all(job.prompt + job.output <= MAX_LEN for job in jobs)


def test_continuous_batching_takes_far_fewer_steps() -> None:
    jobs = trace(60)
    results: dict[str, PolicyResult] = {policy: run_on_fake_model(jobs, policy) for policy in ("static", "continuous")}
    assert results["static"].tokens == results["continuous"].tokens == sum(job.output for job in jobs)
    assert results["static"].steps > 1.5 * results["continuous"].steps
    assert results["continuous"].waste < 0.04


def test_paging_wastes_least_and_reservations_as_the_paper_orders_them() -> None:
    table = memory_table(trace(120))
    assert table["paged (16)"].waste < 0.04
    assert table["paged (16)"].waste < table["oracle"].waste < table["pow2"].waste < table["max"].waste
    assert len({shares.used for shares in table.values()}) == 1, "every scheme stores the same tokens"


def test_reservations_on_paper() -> None:
    assert power_of_two(TraceRequest(10, 100)) == 138
    assert power_of_two(TraceRequest(10, 1)) == 11
    one = contiguous([TraceRequest(4, 3)], 20, schemes(20)["max"])
    # Three steps with 4, 5 and 6 tokens stored; 13 of the 20 slots are never used.
    assert (one.steps, one.used, one.reserved, one.internal) == (3, 15, 6, 39)
    two = paged([TraceRequest(4, 3)], 20, 4)
    assert (two.steps, two.used, two.internal) == (3, 15, 0 + 3 + 2)


def test_external_fragmentation_is_free_memory_in_gaps_too_small() -> None:
    jobs = [TraceRequest(4, 2), TraceRequest(4, 8), TraceRequest(4, 2), TraceRequest(9, 1)]
    shares = contiguous(jobs, 24, lambda job: job.prompt + job.output)
    # After two steps the first and third have left two gaps of six; ten slots in one piece are not there.
    assert shares.external > 0
    assert contiguous(jobs[:2], 24, lambda job: job.prompt + job.output).external == 0


def test_the_2048_over_provisioning_of_the_seed() -> None:
    """S2: a server that reserves 2,048 slots for a request that ends after 100 tokens wastes 95 % of them."""
    shares = contiguous([TraceRequest(50, 50)], 2048, lambda job: 2048)
    assert shares.internal / (shares.steps * 2048) == pytest.approx(1 - 100 / 2048)


def test_requests_beyond_the_memory_are_an_error() -> None:
    with pytest.raises(ValueError, match="give more memory"):
        contiguous([TraceRequest(4, 3)], 5, lambda job: job.prompt + job.output)
    with pytest.raises(ValueError, match="give more memory"):
        paged([TraceRequest(40, 3)], 32, 16)
