"""State of a live sequence in the torch back end, between steps."""

from dataclasses import dataclass, field

from headrace.data.params import SamplingParams
from headrace.data.plan import NewSlot
from headrace.ops.penalties import TokenCounts


@dataclass(slots=True)
class EagerLive:
    """A live sequence: known tokens, block tables (of its tokens and its source), sampling parameters, penalty counts."""

    tokens: list[int]
    prompt_len: int
    seed: int
    params: SamplingParams
    stop_ids: list[int]
    tables: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    reads: int = 0
    counts: TokenCounts | None = None

    @classmethod
    def of(cls, new: NewSlot) -> "EagerLive":
        assert new.params is not None
        return cls(new.tokens, new.prompt_len, new.seed, new.params, new.stop_ids, reads=new.reads)

    @property
    def table(self) -> list[int]:
        return self.tables[0]

    @property
    def source_table(self) -> list[int]:
        return self.tables[1]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: tuple[int, ...]) -> None:
        self.tokens += tokens

    def set_table(self, table: int, start: int, blocks: list[int]) -> None:
        self.tables[table][start:] = blocks

    def fork(self) -> "EagerLive":
        counts = None if self.counts is None else self.counts.copy()
        tables = list(self.tables[0]), list(self.tables[1])
        drawn = self.seed, self.params, self.stop_ids
        return EagerLive(list(self.tokens), self.prompt_len, *drawn, tables, self.reads, counts)
