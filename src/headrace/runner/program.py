"""What a back end is to the runner: programs, which are models made ready, and what a step of one asks and answers.

Live sequences and hidden rows are the back end's own (numpy, tensors); the runner hands them on.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from headrace.data.config import ModelConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import Answers, Feed, NewSlot, StepPlan
from headrace.runner.span import Span
from headrace.runner.stored_rows import Kept


class Live(Protocol):
    """A live sequence: its known tokens, whose number is its length, its block tables (`table`: that of its tokens,
    `source_table`: that of its source), and how it is sampled."""

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


AnyLive = Any  # a Live of the back end at hand
Source = tuple[Sequence[int], Sequence[int]]  # what an encoder reads: its tokens, and the blocks where it will be found


class Step(Protocol):
    """What one run of a program is fed, and asked. Feeds are added before the run; answers are there after it."""

    def draw_each(self, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> bool:
        """The short way for most steps: after one known token of each feed a token is drawn, and nothing else is asked. False:
        these feeds are or want something else, or there is no such way, and nothing was done."""

    def drawn(self) -> list[Answers]:
        """What came of `draw_each`."""

    def feed(self, feed: Feed, live: AnyLive, amateur: Any = None) -> None:
        """Add a feed and what it wants. Its rows of logits are combined with those that the step of an amateur kept for the
        same slot."""

    def rows(self, feed: Feed, live: AnyLive) -> None:
        """Add a feed, and keep the rows of logits that its wants name."""

    def answers(self) -> list[list[Any]]:
        """What each feed's wants got, in their order; None where hidden rows are pooled."""


class InputRows(Protocol):
    """The rows that a program begins with which has no table of tokens. `chains`: they are made of rows that it left before."""

    chains: bool

    def rows(self, feeds: Sequence[Feed], slots: dict[int, AnyLive], features: Kept) -> Any:
        """Rows [n, hidden] for the feeds, from the target's kept ones."""

    def at_exit(self, exit: int, hidden: Any) -> Any:
        """Rows [n, hidden] for the exit of a number, from those that its layers left in this step."""

    def sure(self, exit: int, row: np.ndarray) -> float:
        """How likely the exit of a number is right about a row [hidden], float64, by its classifier."""

    def left(self, feeds: Sequence[Feed], hidden: Any) -> None:
        """The program has left rows [n, hidden] after its last layer."""


class Program(Protocol):
    """A model made ready, with a paged pool of its own. `inputs`: what its steps begin with instead of tokens."""

    config: ModelConfig
    inputs: InputRows | None

    def live(self, new: NewSlot) -> AnyLive:
        """A live sequence set up from scratch, for all programs of the back end."""

    def step(self) -> Any:
        """An empty Step; the one before it is over."""

    def encode(self, sources: Sequence[Source]) -> None:
        """Encode sources, and store what each layer reads of them; a model without an encoder has nothing to do."""

    def run(self, step: Any, span: Span, rows: Any = None, keep: bool = False) -> Any:
        """Carry out a step; `rows` [n, hidden] are what it begins with where `inputs` are there. Returns the rows [n, hidden]
        after the last layer, if they are to be kept."""

    def final(self, hidden: Any) -> Any:
        """Hidden rows after the norm that is between them and the head."""

    def on_host(self, rows: Any) -> np.ndarray:
        """Hidden rows as float64."""

    def rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies in the pool."""

    def kept(self) -> Kept:
        """Room for a hidden row of each token, on the pool's block ids; its memory is not taken yet."""

    def kv_bytes(self) -> int: ...

    def close(self) -> None: ...
