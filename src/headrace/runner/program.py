"""The interface of a back end: programs, which are models ready to run, and their steps.

Live sequences and hidden rows are of the back end's own types (numpy arrays, tensors); the runner only passes them on.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from headrace.data.config import ModelConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import Answers, Feed, NewSlot, StepPlan
from headrace.data.sources import Source
from headrace.runner.span import Span
from headrace.runner.stored_rows import StoredRows


class Live(Protocol):
    """A live sequence: its known tokens (their number is its length), block tables and sampling parameters. table: blocks of
    its tokens. source_table: blocks of its source."""

    params: SamplingParams
    prompt_len: int

    @property
    def table(self) -> list[int]: ...

    @property
    def source_table(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def extend(self, tokens: tuple[int, ...]) -> None: ...

    def set_table(self, table: int, start: int, blocks: list[int]) -> None: ...

    def fork(self) -> "Live": ...


AnyLive = Any  # a Live of one back end
Placed = tuple[Source, Sequence[int]]  # an encoder's input, and the blocks for its K/V


class Step(Protocol):
    """The feeds of one run of a program, and its answers. Feeds are added before the run, answers are there after it."""

    def draw_each(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        """Fast path of most steps: each feed has one known token and wants one drawn token. Returns False, having done nothing,
        if these feeds need more or the back end has no such path."""

    def drawn(self) -> list[Answers]:
        """The answers of `draw_each`."""

    def feed(self, feed: Feed, live: AnyLive, amateur: Any = None) -> None:
        """Add a feed with its wants. amateur: a step of the amateur model, whose rows of logits for the same slot are combined
        with this feed's."""

    def feed_for_rows(self, feed: Feed, live: AnyLive) -> None:
        """Add a feed, and keep the rows of logits that its wants name."""

    def answers(self) -> list[list[Any]]:
        """The answers of each feed, in the order of its wants; None for pooled hidden rows."""


class InputRows(Protocol):
    """The input rows of a program that has no token embedding. chains: they include rows that the program itself computed
    before."""

    chains: bool

    def rows(self, feeds: Sequence[Feed], slots: dict[int, AnyLive], features: StoredRows) -> Any:
        """Rows [n, hidden] for the feeds, from the target's stored rows."""

    def at_exit(self, exit: int, hidden: Any) -> Any:
        """Rows [n, hidden] for exit number `exit`, from the rows after its layers."""

    def confidence(self, exit: int, row: np.ndarray) -> float:
        """The exit classifier's probability that exit number `exit` is right about a row [hidden] float64."""

    def store_tips(self, feeds: Sequence[Feed], hidden: Any) -> None:
        """Store the program's rows [n, hidden] after its last layer, for the next step of the chains."""


class Program(Protocol):
    """A model ready to run, with its own paged pool. inputs: the input rows of its steps, instead of tokens."""

    config: ModelConfig
    inputs: InputRows | None

    def live(self, new: NewSlot) -> AnyLive:
        """A live sequence, used by all programs of the back end."""

    def step(self) -> Any:
        """An empty Step; it replaces the one before."""

    def encode(self, sources: Sequence[Placed]) -> None:
        """Encode sources and store their K/V for each decoder layer. Does nothing for a model without an encoder."""

    def run(
        self, step: Any, span: Span, rows: Any = None, keep: bool = False, taps: dict[str, np.ndarray] | None = None
    ) -> Any:
        """Run a step. rows: input rows [n, hidden] if the program has `inputs`. taps: by name, receives the rows [n, hidden]
        float32 of the model's taps. Returns the rows [n, hidden] after the last layer if `keep`."""

    def source_keys(self, live: AnyLive, layer: int, positions: int) -> np.ndarray:
        """K of the first positions of a sequence's source in a layer, [positions, heads, head size] float32."""

    def final(self, hidden: Any) -> Any:
        """Hidden rows after the final norm."""

    def on_host(self, rows: Any) -> np.ndarray:
        """Hidden rows as float64."""

    def rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies in the pool."""

    def kept(self) -> StoredRows:
        """A store of one hidden row per token, on the pool's block ids; not allocated yet."""

    def block_bytes(self) -> int:
        """Bytes of one block of the pool."""

    def read_blocks(self, blocks: Sequence[int], out: np.ndarray) -> None:
        """Copy whole blocks of the pool into `out`, uint8. A step that does not write them may run in another thread."""

    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        """Copy whole blocks into the pool, between steps."""

    def kv_bytes(self) -> int: ...

    def close(self) -> None: ...
