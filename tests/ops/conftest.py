"""What the tests of drawing share."""

import pytest

from headrace.ops.keys import key
from tests.ops.sampling_reference import SEEDS, N


@pytest.fixture(scope="module")
def keys() -> dict[int, list[int]]:
    """For each seed as many noise keys as there are draws."""
    return {seed: [key(seed, child) for child in range(N)] for seed in SEEDS}
