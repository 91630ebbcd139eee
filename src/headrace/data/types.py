"""The data of the loop that lives on the host: requests, their sequences, drafts, what becomes of them, what callers are told.

Sequence and Request are compared by identity. What is made for every token is left alone by the garbage collector (gc=False),
as in `data.plan`.
"""

import enum
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.data.params import SamplingParams
from headrace.data.plan import Exited, TokenLogprob

ALL = sys.maxsize  # tokens, of however many there are


class Draft(msgspec.Struct):
    """A tree of proposed tokens below a sequence's last known token (at most 64 nodes)."""

    tokens: list[int]
    parents: list[int]  # index of the parent node, -1 = the last known token
    required: bool = False  # a required draft waits for budget and blocks, an optional one is dropped
    q: list[bytes] | None = None  # what each token of a chain was drawn from: float32 rows; None: it was not drawn
    drafter: str = ""  # who proposes it
    confidence: int = 0  # how sure the drafter is, by its own measure; drafts of equal confidence are counted together
    observed: bool = False  # the drafter wants to know what the target draws after each node
    memo: list[Any] = []  # what the drafter notes of each node: a node that is pruned takes its note along
    full: bool = False  # each node sees all nodes: what is stored of them is no prefix's, and no path of them may be kept


class Child(msgspec.Struct, gc=False):
    """What becomes of a sequence: accept these draft nodes, then append this token. No child: the sequence is dropped.

    Where there are several children, all paths are empty. `logprobs`: none, or one for each token of path and token.
    """

    path: tuple[int, ...] = ()
    token: int | None = None
    score: float = 0.0
    index: int | None = None  # the child index of the noise key; None keeps the parent's
    state: Any = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(eq=False, slots=True)
class Holding:
    """What a sequence has in the KV cache: BlockManager's. `computed[g]` counts the tokens whose K/V group g holds."""

    root: bytes = b""  # of the prefix hash chain: tenant, adapter, media, source
    groups: int = 1  # bits of the KV groups that the target's feeds fill, and that a prefix hit must have
    tables: list[list[int]] = field(default_factory=lambda: [[]])  # block ids, one list per block table
    computed: list[int] = field(default_factory=lambda: [0])  # one count per KV group
    exact_until: int | None = None  # K/V beyond this is approximate and shared with nobody; None: all exact
    moves: list[tuple[int, int]] = field(default_factory=list)  # accepted K/V off its place: KV indices (from, to)
    hashes: list[bytes] = field(default_factory=list)  # hash of each full block of `tokens`, as far as asked for
    published: int = 0  # full blocks offered to the prefix cache
    source: int = 0  # tokens of its source; table 1 has their K and V, written once and shared by all
    encoded: bool = False  # whether they are there
    left: list[int] = field(default_factory=list)  # KV indices, ascending, of rows that left and were propagated

    def fork(self) -> "Holding":
        """The same blocks, in lists of their own; the block manager counts who shares them."""
        tables = [list(table) for table in self.tables]
        hashes = list(self.hashes)
        made = Holding(self.root, self.groups, tables, list(self.computed), self.exact_until, [], hashes, self.published)
        made.left, made.source, made.encoded = list(self.left), self.source, self.encoded
        return made


@dataclass(eq=False, slots=True)
class Wire:
    """What the runner has been told of a sequence: the scheduler's."""

    slot: int = -1  # of the runner; -1: none
    sent: int = 0  # tokens it knows
    synced: list[int] = field(default_factory=lambda: [0])  # per table: entries it knows


@dataclass(eq=False, slots=True)
class Transcript:
    """What an output reads, and why it ended: Stopping's."""

    words: Any = None  # the detokenizer's state; None without a tokenizer
    stops: Any = None  # the matcher's of its stop strings; None where it has none
    shown: str = ""  # the text, where a strategy gives results at the end
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output, where a strategy gives results at the end
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def fork(self) -> "Transcript":
        words = None if self.words is None else self.words.copy()
        return Transcript(words, None if self.stops is None else self.stops.copy(), self.shown)


@dataclass(eq=False, slots=True)
class Decode:
    """Where decoding stands: the strategy's and the drafters', who forget with it."""

    index: int = 0  # child index: which of the n outputs, and the noise key
    score: float = 0.0
    state: Any = None  # the strategy's
    constraint: Any = None  # where it stands in its grammar; None where its output is free
    exited: Exited | None = None  # how the last step wrote, of a request that may leave early
    draft: Draft | None = None  # to be verified by the next step that reaches the last known token
    memory: dict[str, Any] = field(default_factory=dict)  # what each drafter remembers

    def fork(self) -> "Decode":
        """Score and state are the strategy's to say, a draft is verified before a fork."""
        return Decode(self.index, constraint=None if self.constraint is None else self.constraint.copy())


@dataclass(eq=False, slots=True)
class Sequence:
    """One hypothesis; known work is len(tokens) - kv.computed[0]."""

    id: int
    tokens: list[int]
    prompt_len: int
    kv: Holding = field(default_factory=Holding)
    wire: Wire = field(default_factory=Wire)
    text: Transcript = field(default_factory=Transcript)
    decode: Decode = field(default_factory=Decode)

    def fork(self, id: int) -> "Sequence":
        """A sequence with the same tokens and text; blocks and a slot are the scheduler's to give."""
        return Sequence(
            id,
            list(self.tokens),
            self.prompt_len,
            Holding(self.kv.root, self.kv.groups),
            Wire(),
            self.text.fork(),
            self.decode.fork(),
        )

    @property
    def pending(self) -> int:
        """Known tokens whose K/V the target has still to compute."""
        return len(self.tokens) - self.kv.computed[0]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """The unit of scheduling: a prompt, its parameters, and the sequences a strategy grew from it."""

    id: str
    prompt: list[int]  # what the caller gave; an encoder-decoder reads it as its source
    params: SamplingParams
    seed: int
    strategy: Any
    arrival: int  # order of arrival, the tie-break of equal priorities and turns
    turn: int = 0  # whose turn it is among equal priorities
    width: int = 1  # the most sequences it may ever hold at once
    tenant: bytes = b""  # whose request it is: what is cached, or learnt from its outputs, is for the same tenant
    stop_ids: frozenset[int] = frozenset()  # token ids that end an output: eos and the caller's
    processors: tuple[Any, ...] = ()  # host-side logit processors of the caller
    state: Any = None  # the strategy's state of the whole request
    seqs: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    status: Status = Status.WAITING
    in_flight: bool = False  # a submitted step works on it: neither scheduled nor preempted until its result is in
    aborted: bool = False
    error: str | None = None
    constraint_failed: bool = False  # the error is that of an output's constraint
    dropped: str = ""  # why a sequence was given up last, where others go on without it
    pooled: list[float] = field(default_factory=list)  # of embeddings: the row, or the sum of the rows so far
    classified: list[tuple[float, ...]] = field(default_factory=list)  # logits of the exits that it came by
    speculates: bool = False  # optional drafts may be verified
    shares: int = ALL  # so many of its tokens may be taken from what the cache has: the strategy's to say
    drafts: bool = False  # the strategy has drafts of its own
    observes: bool = False  # and wants to see what every feed brought
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    metrics: "RequestMetrics" = field(default_factory=lambda: RequestMetrics())  # noqa: PLW0108 - defined below

    @property
    def order(self) -> tuple[int, int, int]:
        """Schedules before another request when smaller."""
        return (self.params.priority, self.turn, self.arrival)


class RequestMetrics(msgspec.Struct):
    """Times in seconds of one monotonic clock; None where it has not happened."""

    arrival: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    drafts: int = 0  # that were verified
    drafted: int = 0  # tokens of these
    accepted: int = 0
    accepted_at: list[int] = []  # how many drafts were accepted as far as their first, second, … token

    def wrote(self, now: float) -> None:
        """A step has brought tokens."""
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def accept(self, count: int) -> None:
        """A draft was accepted for `count` tokens."""
        self.accepted += count
        self.accepted_at += [0] * (count - len(self.accepted_at))
        for place in range(count):
            self.accepted_at[place] += 1


class Delta(msgspec.Struct, gc=False):
    """What one step added to one output of one request."""

    request_id: str
    index: int
    token_ids: list[int] = []
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # where the strategy keeps it: of all the output's tokens
    score: float | None = None  # what hypotheses were ranked by
    error: str | None = None
    constraint_failed: bool = False  # the error is that of the output's constraint, which the client chose
    drafter: str = ""  # who proposed the first `accepted` of these tokens; "": nothing was drafted
    accepted: int = 0
    drafted: int = 0  # tokens the drafter proposed
    exits: tuple[Exited, ...] = ()  # of each of these tokens, where the request may leave early
    finished: bool = False  # the whole request
