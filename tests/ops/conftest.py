"""What the tests of drawing and of the core's kernels share."""

from typing import Any

import pytest

from headrace import core
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


@pytest.fixture(params=core.module().cpu_info()["isas"] if core.available() else [])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of this CPU."""
    return str(request.param)


@pytest.fixture(scope="module")
def pool() -> Any:
    return core.module().ThreadPool(2)
