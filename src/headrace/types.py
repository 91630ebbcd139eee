"""The data of the loop: plain values that import nothing of Headrace but the request's parameters.

Identity types (Sequence, Request) live on the host. StepPlan and StepOutput are what crosses to an executor and back:
they are msgspec structs whose msgpack round trip is a test, so the executor may be another process or rank. What is made
anew for every token is small: a struct of its own with tuples for what is mostly empty, left alone by the garbage collector
(gc=False), as no cycle can come of it. After a step of the model nothing is in the caches, and every line touched counts.
"""

import enum
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.params import SamplingParams

MAX_NODES = 64  # an ancestor mask is one uint64


class Draft(msgspec.Struct):
    """A tree of proposed tokens below a sequence's last known token (at most 64 nodes)."""

    tokens: list[int]
    parents: list[int]  # index of the parent node, -1 = the last known token
    required: bool = False  # a required draft waits for budget and blocks, an optional one is dropped
    q: list[bytes] | None = None  # what each token of a chain was drawn from: float32 rows; None: it was not drawn
    drafter: str = ""  # who proposes it
    trust: int = 0  # how sure the drafter is, by its own measure; drafts of equal trust are counted together
    heard: bool = False  # the drafter wants to know what the target draws after each node
    memo: list[Any] = []  # what the drafter notes of each node: a node that is pruned takes its note along


class Child(msgspec.Struct, gc=False):
    """What becomes of a sequence: accept these draft nodes, then append this token. No child: the sequence is dropped.

    Where there are several children, all paths are empty. `logprobs`: none, or one for each token of path and token.
    """

    path: tuple[int, ...] = ()
    token: int | None = None
    score: float = 0.0
    index: int | None = None  # the child index of the noise key; None keeps the parent's
    state: Any = None
    logprobs: tuple["TokenLogprob", ...] = ()


@dataclass(eq=False, slots=True)
class Sequence:
    """One hypothesis. `computed[g]` counts the tokens whose K/V group g holds; known work is len(tokens) - computed[0]."""

    id: int
    index: int  # child index: which of the n outputs, and the noise key
    tokens: list[int]
    prompt_len: int
    tables: list[list[int]] = field(default_factory=lambda: [[]])  # block ids, one list per block table
    computed: list[int] = field(default_factory=lambda: [0])  # one count per KV group
    groups: int = 1  # bits of the KV groups that the target's feeds fill, and that a prefix hit must have
    exact_until: int | None = None  # K/V beyond this is approximate and never published; None: all exact
    draft: Draft | None = None  # to be verified by the next step that reaches the last known token
    moves: list[tuple[int, int]] = field(default_factory=list)  # accepted K/V off its place: KV indices (from, to)
    score: float = 0.0
    slot: int = -1  # runner slot, -1 = none
    sent: int = 0  # tokens the runner's slot knows
    synced: list[int] = field(default_factory=lambda: [0])  # per table: entries the runner's slot knows
    salt: bytes = b""  # root of the prefix hash chain: tenant, adapter, media
    hashes: list[bytes] = field(default_factory=list)  # hash of each full block of `tokens`, as far as asked for
    published: int = 0  # full blocks offered to the prefix cache
    text: Any = None  # the detokenizer's state
    stops: Any = None  # the matcher's of its stop strings; None where it has none
    shown: str = ""  # the output's text, where a strategy gives results at the end
    state: Any = None  # the strategy's state
    constraint: Any = None  # where it stands in its grammar; None where its output is free
    logprobs: list["TokenLogprob"] = field(default_factory=list)  # of the output, where a strategy gives results at the end
    drafting: dict[str, Any] = field(default_factory=dict)  # what each drafter remembers
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def pending(self) -> int:
        """Known tokens whose K/V the target has still to compute."""
        return len(self.tokens) - self.computed[0]

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
    prompt: list[int]
    params: SamplingParams
    seed: int
    strategy: Any
    arrival: int  # order of arrival, the tie-break of equal priorities
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
    dropped: str = ""  # why a sequence was given up last, where others go on without it
    pool: str = ""  # first | last | mean: what an embedding is made of; empty: none is asked for
    pooled: list[float] = field(default_factory=list)  # the row, or the sum of the rows so far
    pooled_until: int = 0  # prompt tokens that are in it
    speculates: bool = False  # optional drafts may be verified
    drafts: bool = False  # the strategy has drafts of its own
    prompt_logprobs: list["TokenLogprob | None"] = field(default_factory=list)
    metrics: "RequestMetrics" = field(default_factory=lambda: RequestMetrics())  # noqa: PLW0108 - defined below

    @property
    def order(self) -> tuple[int, int]:
        """Schedules before another request when smaller."""
        return (self.params.priority, self.arrival)


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

    def accept(self, count: int) -> None:
        """A draft was accepted for `count` tokens."""
        self.accepted += count
        self.accepted_at += [0] * (count - len(self.accepted_at))
        for place in range(count):
            self.accepted_at[place] += 1


WANT_KINDS = frozenset({"sample", "verify", "top", "score", "reject", "propose", "pool", "logits"})
WANT_ROWS = frozenset({"first", "last", "nodes", "all"})


class Want(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a feed needs back, declared before execution so that it is computed where the logits are.

    kind: sample (draw `n` tokens with the noise keys of children child..child+n-1) | verify (draw at the last known token,
    follow the draft's child that has the drawn token, draw there, and so on) | top (the `k` best log-probs; with `live` those
    of the `k` best tokens that end no output follow, as far as they are not among them) | score (log-prob of each next known
    token) | reject (verify a chain by rejection, as the parameters say) | propose (a token for a draft, `k` tokens after the
    round's known ones, and in FeedOutput.logits what it was drawn from) | pool (hidden rows after the final norm: of `rows`
    first or last that one, of all the sum from KV index `k` on, begun with `before`) | logits (the whole row, for custom
    processors).
    rows: last (the last known token) | nodes (each node of the draft: FeedOutput.nodes; verify has the last known token and
    all nodes, and logits with `nodes` too) | all (every row fed) | first.
    """

    rows: str = "last"  # first | last | nodes | all
    kind: str = "sample"
    n: int = 1
    child: int = 0
    k: int = 0
    logprobs: int | None = None
    hidden: tuple[str, ...] = ()
    mu: float | None = None  # mirostat's state before the draw; None: at its beginning
    closest: bool = False  # with nodes: how near each one's hidden state comes to those of the tokens before
    before: tuple[float, ...] = ()  # with pool: the sum of the rows before KV index `k`, which is gone on with
    live: bool = False  # with top: as many that go on, however many ends there are


class NewSlot(msgspec.Struct, array_like=True):
    """A runner slot to be set up before the step: from scratch (`tokens`), or as a copy of `source` (a fork)."""

    slot: int
    source: int = -1
    seed: int = 0
    prompt_len: int = 0
    tokens: list[int] = []
    params: SamplingParams | None = None
    stop_ids: list[int] = []  # what min_tokens masks


class TableDelta(msgspec.Struct, array_like=True):
    """table[start : start + len(blocks)] = blocks, for one slot and one block table."""

    slot: int
    table: int
    start: int
    blocks: list[int]


class Feed(msgspec.Struct, array_like=True, gc=False):
    """One sequence's work in one step: known tokens start..start+count, then the nodes of its draft.

    `new` are the known tokens the slot has not been told yet. A companion's feed may begin beyond the known tokens:
    count 0, nodes=[token], parents=[-1] stores a draft token at KV index `start`, after everything before it. `masks` say
    what may be drawn where the output is held to a grammar: a bit per token id (little-endian words of 32), one row for the
    last known token and one for each node. `q`: what each node of a chain was drawn from, as in Draft; empty: not drawn.
    """

    slot: int
    start: int
    count: int
    new: tuple[int, ...] = ()
    wants: tuple[Want, ...] = ()
    whole: bool = False
    nodes: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    masks: bytes = b""
    q: tuple[bytes, ...] = ()


class StepPlan(msgspec.Struct):
    """One step as plain data. Order of execution: free, new, tables, moves, copies, forward, wants.

    A companion's plan carries feeds alone: slots and tables are shared, and the target's plan changes all pools at once.
    """

    step: int
    model: int = 0  # 0: the target; i >= 1: companion i
    free: list[int] = []  # slots given back
    new: list[NewSlot] = []
    tables: list[TableDelta] = []
    moves: list[tuple[int, int, int]] = []  # (table, from, to): flat positions block * block_size + offset
    copies: list[tuple[int, int, int]] = []  # (table, from block, to block)
    feeds: list[Feed] = []

    @property
    def num_tokens(self) -> int:
        return sum(feed.count + len(feed.nodes) for feed in self.feeds)


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability (natural log) and rank (1 = best) of a token, and the best alternatives with theirs."""

    token: int
    logprob: float
    rank: int = 0
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class FeedOutput(msgspec.Struct, array_like=True, gc=False):
    """What came back for one feed, each part only where a Want asked for it."""

    tokens: tuple[int, ...] = ()  # verify: those of the path, then the one after it
    path: tuple[int, ...] = ()  # verify: the nodes that were accepted, from the root down
    logprobs: tuple[TokenLogprob, ...] = ()
    mus: tuple[float, ...] = ()  # mirostat's state after each of `tokens`
    scores: tuple[TokenLogprob, ...] = ()
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    pooled: tuple[float, ...] = ()
    logits: bytes = b""  # float32, little-endian, one row
    closest: tuple[float, ...] = ()  # of each node, the largest cosine of its hidden state with those of all known tokens
    error: str = ""  # this feed alone failed: NaN logits, an empty kept set
    nodes: tuple["FeedOutput", ...] = ()  # what Wants with rows="nodes" asked for, one for each node of the draft


class StepOutput(msgspec.Struct):
    """One FeedOutput per feed of the plan, in its order."""

    step: int
    feeds: list[FeedOutput] = []


class KVGroup(msgspec.Struct, frozen=True):
    """A family of per-token state that shares one block table: the target's K/V, a draft's, hidden states …"""

    name: str
    kind: str = "full"  # full | window | cross | state | hidden
    layers: tuple[int, ...] = ()
    table: int = 0
    model: int = 0  # whose feeds fill it: 0 the target's, i >= 1 companion i's


TARGET = KVGroup("target")
DRAFT, AMATEUR, HIDDEN, FEATURES = "draft", "amateur", "hidden", "features"  # names of groups


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
    drafter: str = ""  # who proposed the first `accepted` of these tokens; "": nothing was drafted
    accepted: int = 0
    drafted: int = 0  # tokens the drafter proposed
    finished: bool = False  # the whole request
