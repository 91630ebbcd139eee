"""Interface of a back end: what it must implement so that `startup.backend` can run models on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.backends.memory import MemoryPlan
from headrace.backends.recipe import Recipe
from headrace.data.plan import RankLostError
from headrace.parallel.ranks.share import Share
from headrace.runner.program import Program


@dataclass(frozen=True, slots=True)
class LoadedPrograms:
    """The programs of a recipe by role, the memory plan that they were made with, and the name of their number format."""

    programs: Mapping[str, Program]
    plan: MemoryPlan
    dtype: str


class RankGroup(Protocol):
    """The processes that share a model, as one of them sees them. share: this rank's. core: the native core's `Ranks`."""

    share: Share
    core: Any

    def ready(self) -> None:
        """Wait until every rank has loaded its share. Raises ValueError with the first rank's problem."""

    def lost(self, error: Exception) -> RankLostError:
        """End the other ranks after one was lost. Returns the error to raise."""

    def close(self) -> None:
        """End the other ranks."""


class Backend(Protocol):
    """A back end.

    row_invariant: outputs do not depend on batch, chunks or drafts. Otherwise the order of sums depends on the number of rows,
    so tokens of nearly equal probability may swap. kv_dtypes: number formats of the KV cache that it supports.
    """

    name: str
    row_invariant: bool
    kv_dtypes: frozenset[str]

    def unsupported_reason(self, recipe: Recipe) -> str:
        """Why this back end cannot run the recipe; empty if it can."""

    def load(self, recipe: Recipe) -> LoadedPrograms:
        """Load the weights of all models.

        Raises ValueError, also if they do not fit in memory, and RecordError if a model has an operation that it lacks.
        """

    def free_memory(self, recipe: Recipe) -> int:
        """Free bytes of the memory that holds the KV cache."""
