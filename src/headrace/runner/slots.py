"""What a runner remembers between steps, so that a plan carries only what is new: one `Slot` per live sequence."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace.data.params import SamplingParams
from headrace.data.plan import StepPlan
from headrace.ops.penalties import TokenCounts


@dataclass(slots=True)
class Slot:
    """A sequence as the runner knows it: known tokens, block tables, how to sample."""

    tokens: list[int]
    prompt_len: int
    seed: int
    params: SamplingParams
    stop_ids: list[int]
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    counts: TokenCounts | None = None  # what the penalties need, kept as the output grows

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def table(self) -> list[int]:
        return self.tables[0]

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens

    def fork(self) -> "Slot":
        tables = [list(table) for table in self.tables]
        counts = None if self.counts is None else self.counts.copy()
        return Slot(list(self.tokens), self.prompt_len, self.seed, self.params, self.stop_ids, tables, counts)


class Slots(Mapping[int, Slot]):
    """Slots by number, kept up to date by the deltas of each plan."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def apply(self, plan: StepPlan) -> None:
        """Free, set up and fork slots, extend tables, append the tokens each feed brings."""
        for slot in plan.free:
            self._slots.pop(slot, None)  # after a step that failed a slot may be given back twice
        for new in plan.new:
            if new.source >= 0:
                self._slots[new.slot] = self._slots[new.source].fork()
            else:
                assert new.params is not None
                self._slots[new.slot] = Slot(new.tokens, new.prompt_len, new.seed, new.params, new.stop_ids)
        for delta in plan.tables:
            self._slots[delta.slot].tables[delta.table][delta.start :] = delta.blocks
        for feed in plan.feeds:
            self._slots[feed.slot].tokens += feed.new
