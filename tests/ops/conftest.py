"""What the tests of drawing share."""

import pytest

from headrace.ops.keys import key
from tests.ops.sampling_reference import N


class Keys(dict[int, list[tuple[int, int]]]):
    """For each seed as many noise keys as there are draws."""

    def __missing__(self, seed: int) -> list[tuple[int, int]]:
        self[seed] = [key(seed, child) for child in range(N)]
        return self[seed]


@pytest.fixture(scope="session")
def keys() -> Keys:
    return Keys()
