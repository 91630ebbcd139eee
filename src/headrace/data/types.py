"""The engine's state on the host: requests, their sequences, drafts, the results of a step, and the deltas for callers.

Sequence and Request compare by identity. Structs that are created for every token are untracked by the garbage collector, as
in `data.plan`.
"""

import enum
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.data.params import SamplingParams
from headrace.data.plan import Exited, TokenLogprob
from headrace.data.sources import Source, Tokens

ALL = sys.maxsize


class Draft(msgspec.Struct):
    """A tree of at most 64 drafted tokens below a sequence's last known token.

    parents: index of each node's parent, -1 for the last known token.
    required: the draft waits for token budget and blocks; an optional one is dropped.
    q: distribution that each token of a chain was sampled from, [vocabulary] float32; None: not sampled.
    drafter: name of the drafter. confidence: its own measure; acceptance is recorded per value.
    observed: the drafter receives the target's token after each node.
    memo: the drafter's note per node; pruning a node removes its note.
    full: each node attends to all nodes, so their K/V cannot be kept as a prefix.
    """

    tokens: list[int]
    parents: list[int]
    required: bool = False
    q: list[bytes] | None = None
    drafter: str = ""
    confidence: int = 0
    observed: bool = False
    memo: list[Any] = []
    full: bool = False


class Child(msgspec.Struct, gc=False):
    """Continuation of a sequence after a step: accept the draft nodes of `path`, then append `token`.

    A sequence without a child is dropped; with several children it forks, and all paths are empty. logprobs: empty, or one per
    token of the path and `token`.
    """

    path: tuple[int, ...] = ()
    token: int | None = None
    score: float = 0.0
    index: int | None = None  # the child index of the noise key; None keeps the parent's
    state: Any = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(eq=False, slots=True)
class Holding:
    """A sequence's part of the KV cache. Owned by the BlockManager.

    root: start of the prefix hash chain, from tenant, adapter, media and source.
    groups: bit set of the KV groups that the target's feeds fill, and that a prefix hit must have.
    tables: block ids, one list per block table; -1: a block that window layers have given up.
    computed: tokens with K/V, one count per KV group.
    exact_until: K/V from this index on are approximate and not shared; None: all exact.
    moves: accepted K/V that lie elsewhere, as KV indices (from, to).
    hashes: hash of each full block of tokens, computed on demand. published: full blocks in the prefix cache.
    source: positions of an encoder-decoder's source; its K/V are in table 1, shared by all outputs once `encoded`.
    left: KV indices, ascending, of rows that exited early and whose K/V above were propagated. depths: the layers below the
    exit of each.
    sought: number of segments (kv.segments) that were requested from the K/V store.
    peer: address of the replica that should have the first `peer_tokens` tokens; empty: none.
    """

    root: bytes = b""
    groups: int = 1
    tables: list[list[int]] = field(default_factory=lambda: [[]])
    computed: list[int] = field(default_factory=lambda: [0])
    exact_until: int | None = None
    moves: list[tuple[int, int]] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0
    source: int = 0
    encoded: bool = False
    left: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    sought: int = 0
    peer: str = ""
    peer_tokens: int = 0

    def fork(self) -> "Holding":
        """A copy that lists the same blocks; the block manager counts the references."""
        tables = [list(table) for table in self.tables]
        hashes = list(self.hashes)
        copy = Holding(self.root, self.groups, tables, list(self.computed), self.exact_until, [], hashes, self.published)
        copy.left, copy.depths, copy.source, copy.encoded = list(self.left), list(self.depths), self.source, self.encoded
        return copy


@dataclass(eq=False, slots=True)
class Wire:
    """State of a sequence's slot in the runner. Owned by the scheduler.

    slot: -1 if it has none. sent: number of tokens that the slot has. synced: per block table, number of entries that it has.
    fed: KV index up to which steps under way feed it.
    """

    slot: int = -1
    sent: int = 0
    synced: list[int] = field(default_factory=lambda: [0])
    fed: int = 0


@dataclass(eq=False, slots=True)
class Transcript:
    """An output's text and the reason it ended. Owned by Stopping.

    words: the detokenizer's state, None without a tokenizer. stops: state of the stop-string matcher, None without stop
    strings. shown, logprobs: text and log-probabilities of the output, if the strategy returns results only at the end.
    """

    words: Any = None
    stops: Any = None
    shown: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def fork(self) -> "Transcript":
        words = None if self.words is None else self.words.copy()
        return Transcript(words, None if self.stops is None else self.stops.copy(), self.shown)


@dataclass(eq=False, slots=True)
class Decode:
    """Decoding state of a sequence. Owned by its strategy and drafters, and dropped with it.

    index: child index, which of the n outputs it is; part of the noise key. state: the strategy's.
    constraint: position in the grammar, None without one. exited: how the last token was written, if it may exit early.
    draft: verified by the next step that reaches the last known token. memory: per drafter, what it keeps of the sequence.
    """

    index: int = 0
    score: float = 0.0
    state: Any = None
    constraint: Any = None
    exited: Exited | None = None
    draft: Draft | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    def fork(self) -> "Decode":
        """Index and constraint alone: the strategy sets score and state, and drafts are verified before a fork."""
        return Decode(self.index, constraint=None if self.constraint is None else self.constraint.copy())


@dataclass(eq=False, slots=True)
class Sequence:
    """One hypothesis of a request: its tokens, and the state that other components keep of it."""

    id: int
    tokens: list[int]
    prompt_len: int
    kv: Holding = field(default_factory=Holding)
    wire: Wire = field(default_factory=Wire)
    text: Transcript = field(default_factory=Transcript)
    decode: Decode = field(default_factory=Decode)

    def fork(self, id: int) -> "Sequence":
        """A sequence with the same tokens and text. The scheduler gives it blocks and a slot."""
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
        """Number of known tokens without K/V of the target."""
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
    """The unit of scheduling: a prompt, its parameters, and the sequences that its strategy made of it.

    prompt: the decoder's tokens before the first output token. source: what an encoder-decoder reads next to it; None for
    other models. width: largest number of sequences at once.
    arrival: order of arrival, the tie-break for equal priority and turn. turn: order between clients of equal priority.
    tenant: owner; cached prefixes and learnt drafts are used for the same tenant only.
    stop_ids: token ids that end an output. processors: the caller's logit processors, run on the host.
    state: the strategy's, of the whole request. seqs, finished: running and ended sequences.
    in_flight: number of its feeds in submitted steps. Until their results are in, it is not preempted; it is scheduled only if
    it `overlaps`.
    constraint_failed: `error` is that of an output's constraint.
    dropped: reason of the last dropped sequence while others continue.
    pooled: of an embedding, the row or the sum of the rows so far; of an alignment, positions and log-probabilities of tokens.
    classified: class logits of the computed exits.
    speculates: optional drafts may be verified. drafts: its strategy drafts itself. observes: its strategy sees each answer.
    uncut: its prompt is fed in one step.
    shares: number of its tokens that may come from the prefix cache. overlaps: several chunks of its prompt may be under way.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    strategy: Any
    arrival: int
    source: Source | None = None
    turn: int = 0
    width: int = 1
    tenant: bytes = b""
    stop_ids: frozenset[int] = frozenset()
    processors: tuple[Any, ...] = ()
    state: Any = None
    seqs: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    status: Status = Status.WAITING
    in_flight: int = 0
    aborted: bool = False
    error: str | None = None
    constraint_failed: bool = False
    dropped: str = ""
    pooled: list[float] = field(default_factory=list)
    classified: list[tuple[float, ...]] = field(default_factory=list)
    speculates: bool = False
    shares: int = ALL
    drafts: bool = False
    observes: bool = False
    overlaps: bool = False
    uncut: bool = False
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    metrics: "RequestMetrics" = field(default_factory=lambda: RequestMetrics())  # noqa: PLW0108 - defined below

    @property
    def input_ids(self) -> list[int]:
        """The tokens that the caller gave: the source of a model that reads one as text, otherwise the prompt."""
        return list(self.source.ids) if isinstance(self.source, Tokens) else self.prompt

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of scheduling: smaller runs first."""
        return (self.params.priority, self.turn, self.arrival)


class RequestMetrics(msgspec.Struct):
    """Times of a request, in seconds of a monotonic clock (None: not yet), and counts.

    steps: of all its sequences. drafts, drafted, accepted: verified drafts, their tokens, and the accepted ones.
    accepted_at[i]: number of drafts of which more than i tokens were accepted.
    """

    arrival: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = []

    def wrote(self, now: float) -> None:
        """Record the time of new tokens."""
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def accept(self, count: int) -> None:
        """Record a draft of which `count` tokens were accepted."""
        self.accepted += count
        self.accepted_at += [0] * (count - len(self.accepted_at))
        for place in range(count):
            self.accepted_at[place] += 1


class Delta(msgspec.Struct, gc=False):
    """The part of an output that one step added.

    finish_reason: stop, length, abort or error. cumulative_logprob: of all tokens of the output, if the strategy keeps it.
    score: rank of a hypothesis. constraint_failed: `error` is that of the output's constraint, which the client chose.
    drafter: proposed the first `accepted` of these tokens; `drafted` is the size of its draft.
    exits: one record per token, if the request may exit early. finished: the whole request ended.
    """

    request_id: str
    index: int
    token_ids: list[int] = []
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    error: str | None = None
    constraint_failed: bool = False
    drafter: str = ""
    accepted: int = 0
    drafted: int = 0
    exits: tuple[Exited, ...] = ()
    finished: bool = False
