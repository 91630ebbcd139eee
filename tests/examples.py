"""Hypothesis' examples: the same on every machine, in every order of the tests, and wherever the repository lies.

Hypothesis draws some of them from the constants of the local modules that happen to be loaded; which are local, it tells by
their path. Here they are those of the whole package.
"""

from functools import cache
from pathlib import Path

import hypothesis
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants, _constants_from_source

SOURCE = Path(__file__).parents[1] / "src" / "headrace"
THEIRS = providers._get_local_constants
NONE = providers._local_constants  # in sorted sets, which are drawn from in the same order


@cache
def constants() -> Constants:
    """Those of every module of the package."""
    found = Constants()
    for path in SOURCE.rglob("*.py"):
        found |= _constants_from_source(path.read_bytes(), limit=True)
    return NONE | found


def settle() -> None:
    """For this process; and no limits on time: what a machine is busy with must not decide a test."""
    providers._get_local_constants = constants
    hypothesis.settings.register_profile(
        "headrace",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("headrace")
