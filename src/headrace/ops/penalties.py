"""Processing of logits before temperature: biases, barred tokens, and penalties on repeated tokens.

Functions on rows take logits z [r, V] float32 and return new ones. History is an argument, as token ids or counts, so that the
same functions serve at a draft node with its longer history.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from headrace.data.params import DRY_LONGEST, SamplingParams
from headrace.ops.filters import POINT, fixed

NEVER = float("-inf")
MAX_DRY_COST = 1e4
Setting = torch.Tensor | float


def bias(z: torch.Tensor, biases: Sequence[Mapping[int, float] | None]) -> torch.Tensor:
    """Add each row's {token id: value}; None adds nothing."""
    z = z.clone()
    for row, chosen in zip(z, biases, strict=True):
        if chosen:
            ids = torch.tensor(list(chosen), device=z.device)
            row[ids] += torch.tensor(list(chosen.values()), dtype=z.dtype, device=z.device)
    return z


def allow(z: torch.Tensor, allowed: Sequence[Sequence[int] | None]) -> torch.Tensor:
    """Keep only these token ids in each row; None keeps all."""
    z = z.clone()
    for row, ids in zip(z, allowed, strict=True):
        if ids is not None:
            index = torch.tensor(list(ids), dtype=torch.int64, device=z.device)
            values = row[index]
            row.fill_(NEVER)
            row[index] = values
    return z


def check_mask(bits: bytes, vocab_size: int) -> None:
    """Raise ValueError unless there is a bit for every token: an output under a grammar is never drawn without a mask."""
    if len(bits) != -(-vocab_size // 32) * 4:
        raise ValueError("the grammar gave no mask for a token to be drawn")


def mask(z: torch.Tensor, masks: Sequence[bytes]) -> torch.Tensor:
    """Bar the tokens without a bit in each row's mask (token i: bit i % 32 of little-endian word i // 32)."""
    bits = np.stack([np.frombuffer(bits, dtype=np.uint8) for bits in masks])
    allowed = torch.from_numpy(np.unpackbits(bits, axis=1, count=z.shape[-1], bitorder="little").view(bool))
    return z.masked_fill(~allowed.to(z.device), NEVER)


def compare_mass(z: torch.Tensor, firsts: Sequence[int]) -> torch.Tensor:
    """Bar the tokens below `first` in each row if those from `first` on are together likelier than the likeliest of them."""
    z = z.clone()
    for row, first in zip(z, firsts, strict=True):
        below, others = row[:first], row[first:]
        if not len(below) or not len(others) or below.max() == NEVER:
            continue
        best = below.max()
        if others.max() > best or int(fixed(others.double().sub_(best.double()).exp_()).sum()) > POINT:
            below.fill_(NEVER)
    return z


def ban(z: torch.Tensor, banned: Sequence[Iterable[int]]) -> torch.Tensor:
    """Bar these token ids in each row."""
    z = z.clone()
    for row, ids in zip(z, banned, strict=True):
        row[torch.tensor(list(ids), dtype=torch.int64, device=z.device)] = NEVER
    return z


def completed_words(history: Sequence[int], words: Iterable[Sequence[int]]) -> set[int]:
    """The token ids that would complete one of `words` (token sequences) as the next token."""
    return {word[-1] for word in words if len(word) == 1 or tuple(history[1 - len(word) :]) == tuple(word[:-1])}


def repeated_ngrams(history: Sequence[int], n: int) -> set[int]:
    """The token ids that would repeat an n-gram of `history` as the next token; n >= 1.

    Source: Paulus et al., "A Deep Reinforced Model for Abstractive Summarization", arXiv 1705.04304.
    """
    tokens = np.asarray(history, dtype=np.int64)
    starts = len(tokens) - n + 1
    if starts <= 0:
        return set()
    match = np.ones(starts, dtype=bool)
    for offset in range(n - 1):
        match &= tokens[offset : offset + starts] == tokens[starts + offset]
    return set(tokens[n - 1 :][match].tolist())


def dry(history: Sequence[int], params: SamplingParams) -> dict[int, float]:
    """The cost of each token that would continue a repetition (DRY, "don't repeat yourself", p-e-w, 2024).

    If the last n tokens occur earlier in the history (its last `dry_range` tokens), followed by t, then t costs
    `dry_multiplier` * `dry_base` ** (n - `dry_allowed_length`), for the longest such n, if that exceeds the allowed length. n
    counts up to 64, and no repetition crosses a breaker. At a draft node the node's path is history.
    """
    tokens = np.asarray(history[-params.dry_range :], dtype=np.int64)
    breaks = np.isin(tokens, params.dry_breakers)
    if not len(tokens) or breaks[-1]:
        return {}
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where an earlier occurrence of the last n tokens ends
    ends = ends[~breaks[ends + 1]]
    costs: dict[int, float] = {}
    cost, length = params.dry_multiplier, 1
    while len(ends) and length <= DRY_LONGEST:
        if length >= params.dry_allowed_length:
            costs.update(dict.fromkeys(tokens[ends + 1].tolist(), cost))
            cost = min(cost * params.dry_base, MAX_DRY_COST)
        length += 1
        ends = ends[ends >= length - 1]
        before = len(tokens) - length
        if before < 0 or breaks[before]:
            break
        ends = ends[tokens[ends - (length - 1)] == tokens[before]]
    return costs


def repetition(z: torch.Tensor, seen: torch.Tensor, penalty: Setting) -> torch.Tensor:
    """Divide positive and multiply negative logits by `penalty`, once for each seen id.

    seen: bool [r, V], ids in prompt or output. 1 is neutral. Not invariant to a shift of all logits. CTRL always divides, which
    would favour repeated ids with negative logits; here the sign counts.

    Source: Keskar et al., "CTRL", arXiv 1909.05858.
    """
    scale = _column(z, penalty)
    return torch.where(seen, torch.where(z > 0, z / scale, z * scale), z)


def frequency_presence(z: torch.Tensor, counts: torch.Tensor, frequency: Setting, presence: Setting) -> torch.Tensor:
    """z - frequency * count - presence * [count > 0]; counts [r, V] of each id in the output only. 0 is neutral."""
    return z - (_column(z, frequency) * counts + _column(z, presence) * (counts > 0))


def _column(z: torch.Tensor, setting: Setting) -> torch.Tensor:
    return torch.as_tensor(setting, dtype=z.dtype, device=z.device).expand(len(z))[:, None]


class TokenCounts:
    """The token counts of one growing sequence, for the penalties: tensors [V] on the device of the logits.

    seen (bool): ids in prompt or output. output (float32): count of each id in the output. length: output tokens counted.
    Raises ValueError for an id outside the vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.output = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.length = 0
        self.seen[self._index(prompt)] = True
        self.extend(output)

    def extend(self, tokens: Sequence[int]) -> None:
        """Count more output tokens."""
        index = self._index(tokens)
        self.seen[index] = True
        self.output.index_add_(0, index, torch.ones(len(index), device=self.output.device))
        self.length += len(tokens)

    def copy(self) -> "TokenCounts":
        """A copy, for a fork or a draft path."""
        other = TokenCounts(0)
        other.seen, other.output, other.length = self.seen.clone(), self.output.clone(), self.length
        return other

    def plus(self, tokens: Sequence[int]) -> "TokenCounts":
        """Counts with more output tokens: itself if there are none, else a copy."""
        if not tokens:
            return self
        longer = self.copy()
        longer.extend(tokens)
        return longer

    def _index(self, tokens: Sequence[int]) -> torch.Tensor:
        size = len(self.seen)
        if tokens and (min(tokens) < 0 or max(tokens) >= size):
            raise ValueError(f"a token id of the history is outside the vocabulary of {size}")
        return torch.tensor(list(tokens), dtype=torch.int64, device=self.seen.device)
