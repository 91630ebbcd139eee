"""Messages between the engine and an executor: step plans, the wants of their feeds, and the answers.

All are msgspec structs that survive a msgpack round trip (a test checks it), so the executor may be another process or rank.
Structs that are created for every token are small, use tuples for fields that are mostly empty, and are untracked by the
garbage collector (gc=False), as they cannot form cycles. A step of the model evicts the CPU caches, so each line counts.
"""

import enum
from collections.abc import Sequence

import msgspec

from headrace.data.params import SamplingParams
from headrace.data.sources import Source

MAX_NODES = 64  # an ancestor mask is one uint64


class Where(enum.Enum):
    """The rows of a feed that a want is about.

    FIRST, LAST (the last known token), NODES (each node of the draft), TREE (the last known token and each node), ALL (every
    row). The answer to a want at NODES or TREE is an `Each`.
    """

    FIRST = "first"
    LAST = "last"
    NODES = "nodes"
    TREE = "tree"
    ALL = "all"


class Want(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base of the results that a feed asks for. They are declared before the step, so the executor computes them where the
    logits are.

    child: index of the output, part of the noise key. logprobs: number of alternatives to report per token (None: no
    log-probabilities). mu: mirostat's state before the draw (None: initial).
    """


class Sample(Want, frozen=True, array_like=True, gc=False):
    """Sample `n` tokens with the noise keys of children child..child+n-1. Answer: Drawn. At LAST, NODES or TREE."""

    child: int = 0
    n: int = 1
    logprobs: int | None = None
    mu: float | None = None
    at: Where = Where.LAST


class Verify(Want, frozen=True, array_like=True, gc=False):
    """Sample at the last known token, move to the draft node with the sampled token, sample there, and so on. Answer: Drawn."""

    child: int = 0
    logprobs: int | None = None
    mu: float | None = None


class Reject(Want, frozen=True, array_like=True, gc=False):
    """Verify a drafted chain by rejection sampling (`SamplingParams.verification`). Answer: Drawn."""

    child: int = 0
    logprobs: int | None = None


class Propose(Want, frozen=True, array_like=True, gc=False):
    """Sample a token for a draft, `known` tokens after the last verified one. Answer: Drawn, with its distribution q."""

    child: int = 0
    known: int = 0


class Top(Want, frozen=True, array_like=True, gc=False):
    """The `k` best tokens with their log-probabilities. Answer: Ranked. At LAST or NODES.

    live: append the `k` best tokens that do not end the output, without duplicates. closest: at NODES, also the largest
    cosine between the node's hidden state and those of the tokens before it (contrastive search).
    """

    k: int
    live: bool = False
    closest: bool = False
    at: Where = Where.LAST


class Score(Want, frozen=True, array_like=True, gc=False):
    """The log-probability of the next known token at every row. Answer: Scores."""

    logprobs: int = 0


class Pool(Want, frozen=True, array_like=True, gc=False):
    """A hidden row after the final norm, at FIRST or LAST; at ALL the sum of the rows from KV index `start` on, added to
    `before`, the sum of earlier feeds. Answer: Pooled."""

    at: Where
    start: int = 0
    before: tuple[float, ...] = ()


class Logits(Want, frozen=True, array_like=True, gc=False):
    """Whole rows of logits, for the caller's own processors. Answer: LogitRow. At LAST or TREE."""

    at: Where = Where.LAST


# Of a confidence: one threshold for all exits, or one for each exit but the last.
Threshold = float | tuple[float, ...]


class Classify(Want, frozen=True, array_like=True, gc=False):
    """Class logits of a text that is fed in one step. Answer: Classified.

    The first exit (`runner.classifier`) whose `criterion` passes `threshold` ends the computation, otherwise the last exit.
    An empty criterion never passes.
    """

    criterion: str = ""
    threshold: Threshold = 0.0


class Align(Want, frozen=True, array_like=True, gc=False):
    """The position of an encoder-decoder's source at which each token begins, by cross-attention. Answer: Aligned.

    The feed has all rows of its sequence. heads: (layer, head), whose attention weights are averaged. first: the first aligned
    row; its next token begins the text. positions: of the source that count; the others are silence.
    """

    heads: tuple[tuple[int, int], ...]
    first: int
    positions: int


AnyWant = Sample | Verify | Reject | Propose | Top | Score | Pool | Logits | Classify | Align
# Allowed rows of each want; empty: it has no `at`.
WANTS: dict[type[Want], tuple[Where, ...]] = {
    Sample: (Where.LAST, Where.NODES, Where.TREE),
    Verify: (),
    Reject: (),
    Propose: (),
    Top: (Where.LAST, Where.NODES),
    Score: (),
    Pool: (Where.FIRST, Where.LAST, Where.ALL),
    Logits: (Where.LAST, Where.TREE),
    Classify: (),
    Align: (),
}


def wanted(want: object) -> bool:
    """Whether a step can answer this want."""
    places = WANTS.get(type(want))  # type: ignore[arg-type]
    return places is not None and (not places or want.at in places)  # type: ignore[attr-defined]


class NewSlot(msgspec.Struct, array_like=True):
    """A runner slot to set up before the step: from `tokens`, or as a copy of slot `source` (a fork).

    stop_ids: token ids that min_tokens masks. reads: positions of an encoder-decoder's source, whose K/V are in table 1.
    """

    slot: int
    source: int = -1
    seed: int = 0
    prompt_len: int = 0
    tokens: list[int] = []
    params: SamplingParams | None = None
    stop_ids: list[int] = []
    reads: int = 0


class TableDelta(msgspec.Struct, array_like=True):
    """table[start : start + len(blocks)] = blocks, for one slot and one block table."""

    slot: int
    table: int
    start: int
    blocks: list[int]


class Feed(msgspec.Struct, array_like=True, gc=False):
    """One sequence's part of a step: known tokens start..start+count, then the nodes of its draft.

    new: known tokens that the slot does not have yet.
    nodes, parents: the draft tree; parent -1 is the last known token. A draft model's feed may begin beyond the known tokens:
        count 0, nodes=[token], parents=[-1] stores a drafted token at KV index `start`.
    allowed: tokens that a grammar allows, one bit per token id (little-endian 32-bit words), one row for the last known token
        and one per node.
    q: distribution that each node of a chain was sampled from, as in Draft; empty: the nodes were not sampled.
    full: each node attends to all nodes, not to its ancestors alone. Positions follow the tree.
    source: an encoder-decoder's source, to encode into the slot's table 1 before this feed.
    lags: for each exit of the target, ascending, the number of tokens before `start` without K/V in the layers above it, up to
        the next exit (in a cascade: in any layer of the target). Empty if no layer lags.
    depth: number of layers after which these rows exited, unchanged from there on (0: they did not; the row of the last known
        token may exit in this step).
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
    source: Source | None = None
    lags: tuple[int, ...] = ()
    depth: int = 0

    @property
    def lag(self) -> int:
        """Tokens that the layers above the last exit lag."""
        return self.lags[-1] if self.lags else 0


class StepPlan(msgspec.Struct):
    """One step as plain data. Order of execution: free, new, tables, moves, copies, forward, wants.

    The plan of another model than the target has only feeds: all models share the slots and block tables, and moves and copies
    of the target's plan apply to every pool.
    """

    step: int
    model: int = 0  # 0: the target; i >= 1: the i-th other model
    free: list[int] = []  # slots to release
    new: list[NewSlot] = []
    tables: list[TableDelta] = []
    moves: list[tuple[int, int, int]] = []  # (table, from, to): flat positions block * block_size + offset
    copies: list[tuple[int, int, int]] = []  # (table, from block, to block)
    feeds: list[Feed] = []

    @property
    def num_tokens(self) -> int:
        sources = sum(feed.source.positions for feed in self.feeds if feed.source is not None)
        return sources + sum(feed.count + len(feed.nodes) for feed in self.feeds)


class TokenLogprob(msgspec.Struct, array_like=True):
    """Log-probability (natural log) and rank (1 = best) of a token, and the best alternatives with theirs."""

    token: int
    logprob: float
    rank: int = 0
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Drawn(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Sampled tokens; of a verification the tokens of the accepted nodes and then the next one.

    path: accepted nodes, from the root down. logprobs, mus (mirostat's states): one per token, or empty. q: the distribution
    that a proposal was sampled from, [vocabulary] float32.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    mus: tuple[float, ...] = ()
    q: bytes = b""


class Ranked(msgspec.Struct, array_like=True, gc=False, tag=True):
    """The most probable tokens, best first. closest: largest cosine of the node's hidden state with those of known tokens."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    closest: float = 0.0


class Scores(msgspec.Struct, array_like=True, gc=False, tag=True):
    """The entry of row p scores token p + 1, if that token is known."""

    scores: tuple[TokenLogprob, ...] = ()


class Pooled(msgspec.Struct, array_like=True, gc=False, tag=True):
    """A hidden row, or the sum of them, float64 [hidden]."""

    row: tuple[float, ...]


class LogitRow(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Logits [vocabulary] float32, little-endian.

    other: for a token that may exit early, the row of the model that does not write it (the exit or smaller model, or the full
    model). layers: the number of layers behind that row.
    """

    row: bytes
    other: bytes = b""
    layers: int = 0


class Classified(msgspec.Struct, array_like=True, gc=False, tag=True):
    """Logits [classes] of every exit that was computed, in order. The last ones give the class."""

    logits: tuple[tuple[float, ...], ...]


class Aligned(msgspec.Struct, array_like=True, gc=False, tag=True):
    """For each row from `Align.first` on, but for the last one, the position at which its next token begins."""

    starts: tuple[int, ...]


class Failed(msgspec.Struct, array_like=True, gc=False, tag=True):
    """A row without an answer: its logits are broken, or no token is allowed. Other rows are not affected."""

    error: str


class Each(msgspec.Struct, array_like=True, gc=False, tag=True):
    """One answer per row of a want at NODES or TREE: first the last known token (TREE only), then the nodes."""

    answers: tuple[Drawn | Ranked | LogitRow | Failed, ...]


Answer = Drawn | Ranked | Scores | Pooled | LogitRow | Classified | Aligned | Each | Failed
Answers = tuple[Answer, ...]  # of a feed, in the order of its wants


class Exited(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Record of a token that was allowed to exit early.

    layers: number of layers that were computed for it (0: the smaller model of a cascade wrote it). confidence: of the exit or
    smaller model (None: it did not run). votes: in an audit, its token and the full model's.
    """

    layers: int
    confidence: float | None = None
    votes: tuple[int, ...] = ()


class StepOutput(msgspec.Struct):
    """The answers of a step, one entry per feed of the plan.

    seconds: duration of the step where it ran (0: not measured). exited: by feed number, for feeds that may exit early.
    unfilled: by number, the layers of feeds that exited and have no K/V above these. propagated: by number, the layers of feeds
    that exited and have approximate K/V above these, computed from the row at the exit.
    """

    step: int
    feeds: list[Answers] = []
    seconds: float = 0.0
    exited: dict[int, Exited] = {}
    unfilled: dict[int, int] = {}
    propagated: dict[int, int] = {}


class RankLostError(RuntimeError):
    """A process that holds a part of the model has ended or hangs: its K/V are lost, and no step can run any more."""


class KVGroup(msgspec.Struct, frozen=True):
    """Per-token state of one kind: the target's K/V, a draft model's K/V, hidden rows. It lies in the blocks of `table`.

    kind: full, window, cross, state, hidden, or propagated (K/V above an exit are computed from the row at the exit). model:
    the model whose feeds fill it, 0 for the target.
    """

    name: str
    kind: str = "full"
    layers: tuple[int, ...] = ()
    table: int = 0
    model: int = 0


# Block tables of a sequence: of its tokens, of its source, and of the layers whose window is shorter than the context. The
# first two share pool 0; the window layers have pool 1.
TOKENS, SOURCE, WINDOWS = 0, 1, 2


def pairs_of(changes: Sequence[tuple[int, int, int]], pool: int) -> list[tuple[int, int]]:
    """The pairs (from, to) of moves or copies (table, from, to) in one pool."""
    return [(source, to) for table, source, to in changes if (table == WINDOWS) == pool]


TARGET = KVGroup("target")
# Names of groups.
DRAFT, AMATEUR, HIDDEN, FEATURES = "draft", "amateur", "hidden", "features"
# The target's K/V above an exit, up to the next exit, and their kind if they never lag. One group for each exit.
UPPER, PROPAGATED = "upper", "propagated"
# K/V of a cascade's smaller model. All K/V of the target are then UPPER.
CASCADE = "cascade"
