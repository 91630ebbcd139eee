"""Cells: named combinations of batch size and lengths in which speed is measured, the same for every engine."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` prompts of `prompt` random tokens.

    new_tokens: 0 measures prefill, until all sequences have their first token; otherwise decoding of `new_tokens` tokens per
    sequence after its first. fed: tokens of a sequence in a step; above 1 it measures verification: `new_tokens` steps of the
    last token and `fed` - 1 drafted tokens, all rejected.
    """

    name: str
    batch: int
    prompt: int
    new_tokens: int
    fed: int = 1

    @property
    def tokens(self) -> int:
        """Tokens in the KV cache at the end of a measurement."""
        return self.batch * (self.prompt + self.new_tokens + self.fed)

    def prompts(self, vocab_size: int, seed: object) -> list[list[int]]:
        """Prompts of one measurement: equal for equal seeds, so that all engines get the same ones, and new for each seed."""
        rng = random.Random(f"{self.name} {seed}")
        return [[rng.randrange(vocab_size) for _ in range(self.prompt)] for _ in range(self.batch)]


def _decode(batch: int) -> Cell:
    return Cell(f"b{batch}", batch, 128, 64 if batch <= 4 else 32)


CELLS = {
    cell.name: cell
    for cell in (
        Cell("pp512", 1, 512, 0),
        Cell("pp2048", 1, 2048, 0),
        *(_decode(batch) for batch in (1, 2, 4, 8, 16, 32)),
        Cell("b1_4k", 1, 4000, 64),
    )
}


def pick(names: str) -> list[Cell]:
    """Cells of a comma-separated list of names, all if it is empty. Raises ValueError for an unknown name."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(CELLS)
    if unknown := [name for name in wanted if name not in CELLS]:
        raise ValueError(f"there is no cell {unknown[0]!r}; choose from {', '.join(CELLS)}")
    return [CELLS[name] for name in dict.fromkeys(wanted)]
