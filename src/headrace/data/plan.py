"""What crosses to an executor and back: plans of steps, what is wanted of them, and the answers.

Msgspec structs whose msgpack round trip is a test, so the executor may be another process or rank. What is made anew for
every token is small: a struct of its own with tuples for what is mostly empty, left alone by the garbage collector
(gc=False), as no cycle can come of it. After a step of the model nothing is in the caches, and every line touched counts.
"""

import enum

import msgspec

from headrace.data.params import SamplingParams

MAX_NODES = 64  # an ancestor mask is one uint64


class Where(enum.Enum):
    """Which rows of a feed a want is about: FIRST · LAST (the last known token) · NODES (each node of the draft) · TREE (the
    last known token and each node) · ALL (every row fed). What is asked of NODES or TREE is answered by `Each`."""

    FIRST = "first"
    LAST = "last"
    NODES = "nodes"
    TREE = "tree"
    ALL = "all"


class Want(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """What a feed needs back, declared before execution so that it is computed where the logits are; one of the kinds below.

    `child` carries the noise key, `logprobs` how many alternatives are told of each token (None: nothing), `mu` mirostat's
    state before the draw (None: at its beginning).
    """


class Sample(Want, frozen=True, array_like=True, gc=False):
    """Draw `n` tokens with the noise keys of children child..child+n-1: Drawn. At LAST, NODES or TREE."""

    child: int = 0
    n: int = 1
    logprobs: int | None = None
    mu: float | None = None
    at: Where = Where.LAST


class Verify(Want, frozen=True, array_like=True, gc=False):
    """Draw at the last known token, follow the draft's child that has the drawn token, draw there, and so on: Drawn."""

    child: int = 0
    logprobs: int | None = None
    mu: float | None = None


class Reject(Want, frozen=True, array_like=True, gc=False):
    """Verify a chain by rejection, as the parameters say: Drawn."""

    child: int = 0
    logprobs: int | None = None


class Propose(Want, frozen=True, array_like=True, gc=False):
    """A token for a draft, `known` tokens after the round's own, and what it was drawn from: Drawn, with q."""

    child: int = 0
    known: int = 0


class Top(Want, frozen=True, array_like=True, gc=False):
    """The `k` best tokens with their log-probabilities; with `live` the `k` best that end no output follow, as far as they are
    not among them. At LAST or NODES: Ranked; with `closest`, at NODES, how near each comes to the tokens before it."""

    k: int
    live: bool = False
    closest: bool = False
    at: Where = Where.LAST


class Score(Want, frozen=True, array_like=True, gc=False):
    """The log-probability of each next known token, at every row: Scores."""

    logprobs: int = 0


class Pool(Want, frozen=True, array_like=True, gc=False):
    """Hidden rows after the final norm: that of FIRST or LAST, or of ALL the sum from KV index `start` on, begun with `before`,
    the sum of the rows below it: Pooled."""

    at: Where
    start: int = 0
    before: tuple[float, ...] = ()


class Logits(Want, frozen=True, array_like=True, gc=False):
    """Whole rows, for users' own processors. At LAST or TREE: LogitRow."""

    at: Where = Where.LAST


class Classify(Want, frozen=True, array_like=True, gc=False):
    """The class of a text that is fed whole, by the first exit (`runner.classifier`) that is sure enough by a criterion and its
    threshold, else by the last: Classified. An empty criterion is sure of nothing."""

    criterion: str = ""
    threshold: float = 0.0


AnyWant = Sample | Verify | Reject | Propose | Top | Score | Pool | Logits | Classify
WANTS: dict[type[Want], tuple[Where, ...]] = {  # where each may be asked
    Sample: (Where.LAST, Where.NODES, Where.TREE),
    Verify: (),
    Reject: (),
    Propose: (),
    Top: (Where.LAST, Where.NODES),
    Score: (),
    Pool: (Where.FIRST, Where.LAST, Where.ALL),
    Logits: (Where.LAST, Where.TREE),
    Classify: (),
}


def wanted(want: object) -> bool:
    """Whether a step can give it."""
    places = WANTS.get(type(want))  # type: ignore[arg-type]
    return places is not None and (not places or want.at in places)  # type: ignore[attr-defined]


class NewSlot(msgspec.Struct, array_like=True):
    """A runner slot to be set up before the step: from scratch (`tokens`), or as a copy of `source` (a fork)."""

    slot: int
    source: int = -1
    seed: int = 0
    prompt_len: int = 0
    tokens: list[int] = []
    params: SamplingParams | None = None
    stop_ids: list[int] = []  # what min_tokens masks
    reads: int = 0  # tokens of its source, whose K and V table 1 has


class TableDelta(msgspec.Struct, array_like=True):
    """table[start : start + len(blocks)] = blocks, for one slot and one block table."""

    slot: int
    table: int
    start: int
    blocks: list[int]


class Feed(msgspec.Struct, array_like=True, gc=False):
    """One sequence's work in one step: known tokens start..start+count, then the nodes of its draft.

    `new` are the known tokens the slot has not been told yet. A companion's feed may begin beyond the known tokens:
    count 0, nodes=[token], parents=[-1] stores a draft token at KV index `start`, after everything before it. `allowed` says
    what may be drawn where the output is held to a grammar: a bit per token id (little-endian words of 32), one row for the
    last known token and one for each node. `q`: what each node of a chain was drawn from, as in Draft; empty: not drawn. With
    `full` each node sees all nodes, and not its ancestors alone; positions are as the tree has them. `source`: tokens to be
    encoded before this, whole, into the slot's table 1. `lag`: so many tokens before `start` have no K and V yet in the layers
    above the target's exit, or, in a cascade, in any of the target's. `depth`: after so many layers its rows have left, and are
    left as they are (0: they have not; a last known token's may leave now).
    """

    slot: int
    start: int
    count: int
    new: tuple[int, ...] = ()
    wants: tuple[AnyWant, ...] = ()
    nodes: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    allowed: bytes = b""
    q: tuple[bytes, ...] = ()
    full: bool = False
    source: tuple[int, ...] = ()
    lag: int = 0
    depth: int = 0


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
        return sum(feed.count + len(feed.nodes) + len(feed.source) for feed in self.feeds)


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability (natural log) and rank (1 = best) of a token, and the best alternatives with theirs."""

    token: int
    logprob: float
    rank: int = 0
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Drawn(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Tokens: the drawn ones, or of a verification those of the path and then the one after it. `path`: the nodes that were
    accepted, from the root down. `logprobs`, `mus` (mirostat's state): one a token, or none. `q`: what a proposal was drawn
    from, a float32 row."""

    tokens: tuple[int, ...]
    path: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    mus: tuple[float, ...] = ()
    q: bytes = b""


class Ranked(msgspec.Struct, array_like=True, gc=False, tag=True):
    """The likeliest tokens, best first. `closest`: the largest cosine of the node's hidden state with all known tokens'."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    closest: float = 0.0


class Scores(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Row p scored token p + 1, as far as that is known."""

    scores: tuple[TokenLogprob, ...] = ()


class Pooled(msgspec.Struct, array_like=True, gc=False, tag=True):
    """A hidden row, or the sum of them, float64 [hidden]."""

    row: tuple[float, ...]


class LogitRow(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Logits [vocabulary] as float32, little-endian. `other`: of a token that may exit early, the row of the one that does not
    write it (the exit or the smaller model, or the full model), and after how many layers that one writes."""

    row: bytes
    other: bytes = b""
    layers: int = 0


class Classified(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Logits [classes] of every exit that the text came by, in their order; the last ones decide."""

    logits: tuple[tuple[float, ...], ...]


class Failed(msgspec.Struct, array_like=True, gc=False, tag=True):
    """This row alone gave nothing: broken logits, or nothing that may come."""

    error: str


class Each(msgspec.Struct, array_like=True, gc=False, tag=True):
    """What came of each row that a want named: of the last known token first, where it is named, then of the nodes."""

    answers: tuple[Drawn | Ranked | LogitRow | Failed, ...]


Answer = Drawn | Ranked | Scores | Pooled | LogitRow | Classified | Each | Failed
Answers = tuple[Answer, ...]  # of a feed, in the order of its wants


class Exited(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """After how many layers of the model a token was written (0: by the smaller model of a cascade), and how sure who was asked
    first was (None: nobody). `votes`: under an audit, what that one would write and what the whole model would."""

    layers: int
    confidence: float | None = None
    votes: tuple[int, ...] = ()


class StepOutput(msgspec.Struct):
    """The answers of each feed of the plan, in its order. `seconds`: what the step took where it ran; 0: nobody measured it.
    `exited`: by number of the feed, of those that may leave early; `unfilled`: those that did, and have no K and V above;
    `propagated`: those that did, and have some there, made of the row they left with."""

    step: int
    feeds: list[Answers] = []
    seconds: float = 0.0
    exited: dict[int, Exited] = {}
    unfilled: tuple[int, ...] = ()
    propagated: tuple[int, ...] = ()


class KVGroup(msgspec.Struct, frozen=True):
    """A family of per-token state that shares one block table: the target's K/V, a draft's, hidden states … Where it is
    propagated, K and V of a row that left below are made of that row."""

    name: str
    kind: str = "full"  # full | window | cross | state | hidden | propagated
    layers: tuple[int, ...] = ()
    table: int = 0
    model: int = 0  # whose feeds fill it: 0 the target's, i >= 1 companion i's


TARGET = KVGroup("target")
DRAFT, AMATEUR, HIDDEN, FEATURES = "draft", "amateur", "hidden", "features"  # names of groups
UPPER, PROPAGATED = "upper", "propagated"  # the target's K and V above its exit, and their kind where they never lag
CASCADE = "cascade"  # the smaller model's of a cascade; then all of the target's are UPPER
