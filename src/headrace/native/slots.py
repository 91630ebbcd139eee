"""What the native runner remembers of a live sequence between steps."""

from dataclasses import dataclass, field
from typing import Any

from headrace.native import core
from headrace.native.sampling import sample_params
from headrace.ops.noise import Key, key
from headrace.params import SamplingParams
from headrace.types import NewSlot


@dataclass(slots=True)
class Slot:
    """A live sequence: what the core knows of it, and the keys of its noise."""

    sequence: Any  # _core.Sequence
    seed: int
    params: SamplingParams
    keys: dict[int, Key] = field(default_factory=dict)  # by child
    child: int = -1  # whose key the core has
    plain: bool = field(init=False)  # nothing but tokens comes of its draws

    def __post_init__(self) -> None:
        self.plain = not (self.params.penalty_alpha or self.params.mirostat_tau)

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def table(self) -> list[int]:
        table: list[int] = self.sequence.table
        return table

    def extend(self, tokens: list[int]) -> None:
        self.sequence.extend(tokens)

    def fork(self) -> "Slot":
        return Slot(self.sequence.copy(), self.seed, self.params, self.keys)

    def key(self, child: int) -> Key:
        if child not in self.keys:
            self.keys[child] = key(self.seed, child)
        return self.keys[child]

    def draw_as(self, child: int) -> None:
        """Tell the core with whose key a token is drawn where nothing else is asked."""
        self.child, self.sequence.key = child, self.key(child)


def new_slot(new: NewSlot) -> Slot:
    """A slot set up from scratch."""
    assert new.params is not None
    sequence = core().Sequence(new.tokens[: new.prompt_len], sample_params(new.params, new.stop_ids))
    sequence.extend(new.tokens[new.prompt_len :])
    return Slot(sequence, new.seed, new.params)
