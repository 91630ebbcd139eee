"""State of a live sequence in the native back end, between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace import core
from headrace.data.fields import Use, fields_with_use
from headrace.data.params import SamplingParams
from headrace.data.plan import Feed, NewSlot
from headrace.ops.keys import Key, key

# Fields with the same names in the core.
SAME = fields_with_use(SamplingParams, Use.CORE)


def sample_params(params: SamplingParams, stop_ids: Sequence[int] = ()) -> Any:
    """The core's SampleParams. `stop_ids` (EOS and stop_token_ids) cannot be drawn before `params.min_tokens`."""
    out = core.module().SampleParams()
    for name in SAME:
        setattr(out, name, getattr(params, name))
    out.logit_bias = list((params.logit_bias or {}).items())
    out.bad_words = [list(word) for word in params.bad_words]
    out.stop_ids = list(stop_ids)
    if params.dry_multiplier:
        out.dry_breakers = list(params.dry_breakers)
    out.constrained = params.constrained
    if params.timestamps is not None:
        out.mass_from = params.timestamps.first
    if params.logprobs_mode == "masked":
        out.masked_logprobs = True
    out.allowed = None if params.allowed_token_ids is None else list(params.allowed_token_ids)
    return out


@dataclass(slots=True)
class NativeLive:
    """A live sequence: the core's object, and the keys of its noise by child.

    child: the child whose key the core has. plain: its draws return tokens and nothing else. live: bit per token that does not
    end the output, computed on demand.
    """

    sequence: Any  # _core.Sequence
    seed: int
    params: SamplingParams
    stop_ids: list[int]
    keys: dict[int, Key] = field(default_factory=dict)
    child: int = -1
    prompt_len: int = 0
    plain: bool = field(init=False)
    live: bytes = b""

    def __post_init__(self) -> None:
        self.plain = not (self.params.penalty_alpha or self.params.mirostat_tau)

    @classmethod
    def of(cls, new: NewSlot, adapter: int = 0) -> "NativeLive":
        """adapter: number of the sequence's adapter, 0 for none."""
        assert new.params is not None
        sampling, more = sample_params(new.params, new.stop_ids), {"adapter": adapter} if adapter else {}
        sequence = core.module().Sequence(new.tokens[: new.prompt_len], sampling, new.reads, **more)
        sequence.extend(new.tokens[new.prompt_len :])
        return cls(sequence, new.seed, new.params, new.stop_ids, prompt_len=new.prompt_len)

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def table(self) -> list[int]:
        table: list[int] = self.sequence.table
        return table

    @property
    def source_table(self) -> list[int]:
        table: list[int] = self.sequence.source_table
        return table

    def extend(self, tokens: tuple[int, ...]) -> None:
        self.sequence.extend(tokens)

    def set_table(self, table: int, start: int, blocks: list[int]) -> None:
        self.sequence.set_table(table, start, blocks)

    def fork(self) -> "NativeLive":
        copied = self.sequence.copy()
        return NativeLive(copied, self.seed, self.params, self.stop_ids, self.keys, prompt_len=self.prompt_len, live=self.live)

    def key(self, child: int) -> Key:
        if child not in self.keys:
            self.keys[child] = key(self.seed, child)
        return self.keys[child]

    def live_masks(self, feed: Feed, vocab_size: int) -> bytes:
        """Allowed tokens that do not end the output, for the last known token and each node, in the format of Feed.allowed."""
        if not self.live:
            bits = np.ones(-(-vocab_size // 32) * 32, bool)
            bits[[token for token in self.stop_ids if token < vocab_size]] = False
            self.live = np.packbits(bits, bitorder="little").tobytes()
        rows = 1 + len(feed.nodes)
        if not feed.allowed:
            return self.live * rows
        held: np.ndarray = np.frombuffer(feed.allowed, np.uint8).reshape(rows, -1) & np.frombuffer(self.live, np.uint8)
        return held.tobytes()

    def draw_as(self, child: int) -> None:
        """Set the noise key that the core uses in `draw_each`."""
        self.child, self.sequence.key = child, self.key(child)
