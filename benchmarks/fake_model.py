"""Fake model whose next token is a hash of all context tokens in the paged pool, and a reference without a cache.

The hash covers the tokens, so a block with tokens of another sequence changes the output.
"""

import hashlib
import random
import struct
from array import array
from collections import deque
from collections.abc import Callable

from headrace.backends.eager.live import EagerLive
from headrace.data.plan import (
    Answer,
    Answers,
    AnyWant,
    Drawn,
    Each,
    Failed,
    Feed,
    LogitRow,
    Logits,
    Ranked,
    Sample,
    Score,
    Scores,
    StepOutput,
    StepPlan,
    TokenLogprob,
    Top,
    Verify,
    Where,
)
from headrace.ops.trees import walk
from headrace.runner.runner import Slots

VOCAB = 61
EOS = 60
EMPTY = -1
NONE = -2  # no token may come
NOTHING = "no token can be drawn"


def draw(context: list[int], seed: int, child: int) -> int:
    """Token after `context`: a pure function of the context, the seed and the child."""
    message = array("q", context).tobytes() + b"%d,%d" % (seed, child)
    return int.from_bytes(hashlib.blake2b(message, digest_size=4).digest(), "little") % VOCAB


def allowed(token: int, mask: bytes) -> int:
    """The token, or the next one up that a grammar's mask has (a bit per id, little-endian); NONE where it has none."""
    if not mask:
        return token
    bits = int.from_bytes(mask, "little")
    return next(((token + up) % VOCAB for up in range(VOCAB) if bits >> (token + up) % VOCAB & 1), NONE)


def logits_of(context: list[int]) -> list[float]:
    """Logits after `context`, all different: 0 to VOCAB - 1 in an order that depends on all of it."""
    order = list(range(VOCAB))
    random.Random(draw(context, -1, -1) * 2**32 + draw(context[-7:], -2, len(context))).shuffle(order)
    return [float(rank) for rank in order]


def reference(
    prompt: list[int],
    seed: int,
    child: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    choose: Callable[[list[int], int, int], int] = draw,
) -> list[int]:
    """The output of one child, computed with no cache, batch or engine. `choose`: the token after a context."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(choose(tokens, seed, child))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Carries out plans on a pool of tokens instead of keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = [EMPTY] * (num_blocks * block_size)
        self.slots = Slots(EagerLive.of)
        self.fed: list[list[tuple[int, int, int]]] = []  # per step: (slot, start, count)

    def execute(self, plan: StepPlan) -> StepOutput:
        self.slots.apply(plan)
        self.rearrange(plan)
        for feed in plan.feeds:
            self.write(feed)
        self.fed.append([(feed.slot, feed.start, feed.count) for feed in plan.feeds])
        return StepOutput(plan.step, [self._answer(feed) for feed in plan.feeds])

    def rearrange(self, plan: StepPlan) -> None:
        """Carry out a plan's moves and copies."""
        size = self.block_size
        moved = [(to, self.pool[source]) for _, source, to in plan.moves]
        for to, token in moved:
            self.pool[to] = token
        # Copies may run in any order; the unkindest is the reverse.
        for _, source, to in reversed(plan.copies):
            self.pool[to * size : (to + 1) * size] = self.pool[source * size : (source + 1) * size]

    def write(self, feed: Feed) -> None:
        """Put a feed's tokens where its K and V would be."""
        tokens = self.slots[feed.slot].tokens
        for position, token in enumerate([*tokens[feed.start : feed.start + feed.count], *feed.nodes], feed.start):
            self._write(feed.slot, position, token)

    def _write(self, slot: int, position: int, token: int) -> None:
        self.pool[self._at(slot, position)] = token

    def _answer(self, feed: Feed) -> Answers:
        if not feed.wants:
            return ()
        context = self._known(feed.slot, feed.start + feed.count)
        return tuple(self._one(feed, want, context) for want in feed.wants)

    def _known(self, slot: int, count: int) -> list[int]:
        """The first `count` tokens of a slot, as its blocks hold them."""
        size, tokens = self.block_size, list[int]()
        for block in self.slots[slot].table[: -(-count // size)]:
            tokens += self.pool[block * size : (block + 1) * size]
        return tokens[:count]

    def _one(self, feed: Feed, want: AnyWant, context: list[int]) -> Answer:
        """Answer to a want. The context of a node are the known tokens and the pool's tokens of the nodes above it."""
        match want:
            case Verify():
                path, tokens = self._verify(feed, want, context)
                return Drawn(tuple(tokens), tuple(path)) if tokens else Failed(NOTHING)
            case Score():
                tokens = self.slots[feed.slot].tokens
                ends = [end for end in range(feed.start + 1, feed.start + feed.count + 1) if end < len(tokens)]
                return Scores(tuple(TokenLogprob(tokens[end], -float(draw(context[:end], 0, 0))) for end in ends))
            case Sample() | Top() | Logits():
                if want.at is Where.LAST:
                    return self._row(feed, want, context, -1)
                nodes = range(-1 if want.at is Where.TREE else 0, len(feed.nodes))
                return Each(
                    tuple(self._row(feed, want, context + self._above(feed, len(context), node), node) for node in nodes)
                )
            case _:
                raise ValueError(f"a fake model does not answer {want!r}")

    def _row(
        self, feed: Feed, want: Sample | Top | Logits, context: list[int], node: int
    ) -> Drawn | Ranked | LogitRow | Failed:
        match want:
            case Sample():
                return self._sample(feed, want, context, node)
            case Top():
                return self._top(feed, want, context, node)
            case Logits():
                return LogitRow(struct.pack(f"<{VOCAB}f", *logits_of(context)))

    def _above(self, feed: Feed, known: int, node: int) -> list[int]:
        """What the pool holds of a node and the nodes above it, from the root down; of all nodes where they see each other, and
        which of them it is."""
        if feed.full and node >= 0:
            return [*(self.pool[self._at(feed.slot, known + each)] for each in range(len(feed.nodes))), VOCAB + node]
        path: list[int] = []
        while node >= 0:
            path.insert(0, self.pool[self._at(feed.slot, known + node)])
            node = feed.parents[node]
        return path

    def _mask(self, feed: Feed, node: int) -> bytes:
        """What a grammar lets come after a node (-1: the last known token). Raises ValueError where it should be there."""
        if self.slots[feed.slot].params.structured_outputs is not None and not feed.allowed:
            raise ValueError("a request that is held to a grammar came without a mask")
        width = len(feed.allowed) // (1 + len(feed.nodes))
        return feed.allowed[(node + 1) * width : (node + 2) * width]

    def _verify(self, feed: Feed, want: Verify, context: list[int]) -> tuple[list[int], list[int]]:
        """A node's context are the known tokens and, from where the pool holds them, the nodes above it and itself."""
        drawn: list[int] = []

        def draw_at(node: int) -> int | None:
            token = draw(context + self._above(feed, len(context), node), self.slots[feed.slot].seed, want.child)
            token = allowed(token, self._mask(feed, node))
            if token == NONE:
                return None
            drawn.append(token)
            return token

        return walk(feed.nodes, feed.parents, draw_at), drawn

    def _sample(self, feed: Feed, want: Sample, context: list[int], node: int) -> Drawn | Failed:
        mask = self._mask(feed, node)
        children = range(want.child, want.child + want.n)
        tokens = tuple(allowed(draw(context, self.slots[feed.slot].seed, child), mask) for child in children)
        return Failed(NOTHING) if NONE in tokens else Drawn(tokens)

    def _top(self, feed: Feed, want: Top, context: list[int], node: int) -> Ranked:
        logits, mask = logits_of(context), self._mask(feed, node)
        best = sorted((t for t in range(VOCAB) if allowed(t, mask) == t), key=lambda token: -logits[token])
        live = [t for t in best if t not in self.slots[feed.slot].stop_ids][: want.k] if want.live else []
        ids = (*best[: want.k], *(token for token in live if token not in best[: want.k]))
        return Ranked(ids, tuple(logits[token] - VOCAB for token in ids))

    def _at(self, slot: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return self.slots[slot].table[block] * self.block_size + offset

    def kv_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class Deferred:
    """An executor with `depth` plans under way; a plan runs, in order, only when its result is asked for."""

    def __init__(self, runner: FakeRunner, depth: int) -> None:
        self.runner = runner
        self.depth = depth
        self._queue: deque[tuple[StepPlan, DeferredTicket]] = deque()

    def submit(self, plan: StepPlan) -> "DeferredTicket":
        ticket = DeferredTicket(self)
        self._queue.append((plan, ticket))
        return ticket

    def run_until(self, ticket: "DeferredTicket") -> None:
        while ticket.output is None:
            plan, next_ticket = self._queue.popleft()
            next_ticket.output = self.runner.execute(plan)

    def reserve(self, group: str) -> None:
        raise ValueError("a fake model has no hidden states")

    def kv_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class DeferredTicket:
    def __init__(self, executor: Deferred) -> None:
        self._executor = executor
        self.output: StepOutput | None = None

    def result(self) -> StepOutput:
        self._executor.run_until(self)
        assert self.output is not None
        return self.output
