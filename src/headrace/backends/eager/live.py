"""State of a live sequence in the torch back end, between steps."""

from dataclasses import dataclass, field

from headrace.data.params import SamplingParams
from headrace.data.plan import SOURCE, TOKENS, WINDOWS, NewSlot
from headrace.ops.penalties import TokenCounts


@dataclass(slots=True)
class EagerLive:
    """A live sequence: known tokens, block tables (of its tokens, its source and window layers), sampling parameters, penalty
    counts, and the number of its adapter."""

    tokens: list[int]
    prompt_len: int
    seed: int
    params: SamplingParams
    stop_ids: list[int]
    tables: tuple[list[int], ...] = field(default_factory=lambda: ([], [], []))
    reads: int = 0
    counts: TokenCounts | None = None
    adapter: int = 0

    @classmethod
    def of(cls, new: NewSlot, adapter: int = 0) -> "EagerLive":
        assert new.params is not None
        return cls(new.tokens, new.prompt_len, new.seed, new.params, new.stop_ids, reads=new.reads, adapter=adapter)

    @property
    def table(self) -> list[int]:
        return self.tables[TOKENS]

    @property
    def source_table(self) -> list[int]:
        return self.tables[SOURCE]

    @property
    def window_table(self) -> list[int]:
        return self.tables[WINDOWS]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: tuple[int, ...]) -> None:
        self.tokens += tokens

    def set_table(self, table: int, start: int, blocks: list[int]) -> None:
        self.tables[table][start:] = blocks

    def fork(self) -> "EagerLive":
        counts = None if self.counts is None else self.counts.copy()
        tables = tuple(map(list, self.tables))
        drawn = self.seed, self.params, self.stop_ids
        return EagerLive(list(self.tokens), self.prompt_len, *drawn, tables, self.reads, counts, self.adapter)
