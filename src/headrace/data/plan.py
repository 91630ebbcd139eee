"""What crosses to an executor and back: plans of steps, what is wanted of them, and the answers.

Msgspec structs whose msgpack round trip is a test, so the executor may be another process or rank. What is made anew for
every token is small: a struct of its own with tuples for what is mostly empty, left alone by the garbage collector
(gc=False), as no cycle can come of it. After a step of the model nothing is in the caches, and every line touched counts.
"""

import msgspec

from headrace.data.params import SamplingParams

MAX_NODES = 64  # an ancestor mask is one uint64

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
