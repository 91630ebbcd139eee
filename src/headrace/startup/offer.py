"""What a back end offers to whoever opens models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.runner.program import Program
from headrace.startup.memory import MemoryPlan
from headrace.startup.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Loaded:
    """The programs of a recipe's roles, the memory plan they were made by, and what they compute in."""

    programs: Mapping[str, Program]
    plan: MemoryPlan
    dtype: str


class Offer(Protocol):
    """A back end. `row_invariant`: what batch, chunks and drafts can change of an output is nothing; else it is the choice
    between tokens that are nearly equally good, as sums then depend on how many rows there are. `kv_dtypes`: what it keeps K
    and V in, where it is told."""

    name: str
    row_invariant: bool
    kv_dtypes: frozenset[str]

    def why_not(self, recipe: Recipe) -> str:
        """Why it cannot be asked; empty when it can."""

    def load(self, recipe: Recipe) -> Loaded:
        """Load the weights of all models. Raises ValueError, DoesNotFit, WeightError; RecordError where it cannot run them."""

    def free_memory(self, recipe: Recipe) -> int:
        """Bytes that are free where K and V are."""
