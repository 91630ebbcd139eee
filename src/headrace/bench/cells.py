"""What speed is measured in: named cells, the same for every engine."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """`batch` prompts of `prompt` random tokens. `new_tokens` 0 measures prefill: until the first token of all of them;
    otherwise decode: so many tokens a sequence, after its first. `fed` above 1 measures verification: so many steps, each of
    the last token and a chain of drafted ones that are wrong."""

    name: str
    batch: int
    prompt: int
    new_tokens: int
    fed: int = 1  # tokens of a sequence in a step

    @property
    def tokens(self) -> int:
        """Tokens in the KV cache at the end."""
        return self.batch * (self.prompt + self.new_tokens + self.fed)

    def prompts(self, vocab_size: int, seed: object) -> list[list[int]]:
        """The prompts of one measurement: equal for equal seeds, so that all engines get the same, and none twice."""
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
    """The cells of a comma-separated list; empty: all. Raises ValueError for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(CELLS)
    if unknown := [name for name in wanted if name not in CELLS]:
        raise ValueError(f"there is no cell {unknown[0]!r}; choose from {', '.join(CELLS)}")
    return [CELLS[name] for name in dict.fromkeys(wanted)]
