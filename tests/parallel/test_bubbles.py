"""Bubbles of pipelines: the formulas are what a schedule on a virtual clock gives, exactly."""

from fractions import Fraction
from itertools import product

import pytest

from headrace.parallel.pipeline.bubbles import (
    chunk_speedup,
    decode_schedule,
    decode_utilisation,
    idle_share,
    one_shot_bubble,
    schedule,
)

SIZES = list(product(range(1, 6), range(1, 9)))


@pytest.mark.parametrize(("stages", "batches"), SIZES)
def test_batches_that_pass_once(stages: int, batches: int) -> None:
    times = schedule([[1] * batches] * stages)
    assert times[-1][-1][1] == batches + stages - 1
    assert Fraction(idle_share(times)).limit_denominator(1000) == Fraction(stages - 1, batches + stages - 1)
    assert one_shot_bubble(stages, batches) == pytest.approx(idle_share(times), abs=1e-12)
    # One process with the threads of one stage computes each batch in p units.
    assert chunk_speedup(stages, batches) == pytest.approx(batches * stages / times[-1][-1][1])


@pytest.mark.parametrize(("stages", "lanes"), SIZES)
def test_decoding_needs_as_many_batches_as_stages(stages: int, lanes: int) -> None:
    """W31: the next token of a sequence depends on its last one, so k batches keep min(k, p) of p stages busy."""
    steps = 400
    times = decode_schedule([1] * stages, lanes, steps)
    assert 1 - idle_share(times) == pytest.approx(decode_utilisation(stages, lanes), abs=0.02)
    ends = [end for _, end in times[-1]]
    for earlier, later in zip(ends, times[0][lanes:], strict=False):
        assert later[0] >= earlier, "a lane's next step began before its last one had ended"


def test_without_the_dependency_one_batch_would_fill_the_pipeline() -> None:
    """Control: batches that do not wait for their own last step, as in training, leave a bubble at the ends alone."""
    free = schedule([[1] * 400] * 4)
    bound = decode_schedule([1] * 4, 1, 400)
    assert idle_share(free) < 0.01 < 0.7 < idle_share(bound)


def test_the_slowest_stage_sets_the_pace() -> None:
    times = schedule([[1] * 10, [3] * 10, [1] * 10])
    assert times[-1][-1][1] == 1 + 10 * 3 + 1
    assert times[2][0] == (4, 5)
