"""A fake model whose next token is a hash of the tokens it finds in the paged pool, and a reference without any cache.

A model that compared positions only would not notice a block that holds another sequence's tokens; this one does.
"""

import hashlib
from collections import deque

from headrace.ops.trees import walk
from headrace.runner.slots import Slots
from headrace.types import Feed, FeedOutput, StepOutput, StepPlan, TokenLogprob, Want

VOCAB = 61
EOS = 60
EMPTY = -1


def draw(context: list[int], seed: int, child: int) -> int:
    """The token after `context`: a pure function of what was read, the seed and the child."""
    message = b",".join(str(value).encode() for value in (*context, seed, child))
    return int.from_bytes(hashlib.blake2b(message, digest_size=4).digest(), "little") % VOCAB


def reference(prompt: list[int], seed: int, child: int, max_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    """The output of one child, computed with no cache, batch or engine."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(draw(tokens, seed, child))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Carries out plans on a pool of tokens instead of keys and values."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = [EMPTY] * (num_blocks * block_size)
        self.slots = Slots()
        self.fed: list[list[tuple[int, int, int]]] = []  # per step: (slot, start, count)

    def execute(self, plan: StepPlan) -> StepOutput:
        self.slots.apply(plan)
        size = self.block_size
        moved = [(to, self.pool[source]) for _, source, to in plan.moves]
        for to, token in moved:
            self.pool[to] = token
        # Copies may run in any order; the unkindest is the reverse.
        for _, source, to in reversed(plan.copies):
            self.pool[to * size : (to + 1) * size] = self.pool[source * size : (source + 1) * size]
        for feed in plan.feeds:
            tokens = self.slots[feed.slot].tokens
            for position, token in enumerate([*tokens[feed.start : feed.start + feed.count], *feed.nodes], feed.start):
                self._write(feed.slot, position, token)
        self.fed.append([(feed.slot, feed.start, feed.count) for feed in plan.feeds])
        return StepOutput(plan.step, [self._answer(feed) for feed in plan.feeds])

    def _write(self, slot: int, position: int, token: int) -> None:
        self.pool[self._at(slot, position)] = token

    def _answer(self, feed: Feed) -> FeedOutput:
        slot, start, count = feed.slot, feed.start, feed.count
        state = self.slots[slot]
        context = [self.pool[self._at(slot, position)] for position in range(start + count)]
        out = FeedOutput()
        for want in feed.wants:
            if want.kind == "verify":
                path, tokens = self._verify(feed, want, context)
                out.path, out.tokens = tuple(path), tuple(tokens)
            elif want.kind == "sample":
                out.tokens = tuple(draw(context, state.seed, want.child + i) for i in range(want.n))
            elif want.kind == "score":
                ends = [end for end in range(start + 1, start + count + 1) if end < len(state.tokens)]
                out.scores = tuple(TokenLogprob(state.tokens[end], -float(draw(context[:end], 0, 0))) for end in ends)
        return out

    def _verify(self, feed: Feed, want: Want, context: list[int]) -> tuple[list[int], list[int]]:
        """A node's context are the known tokens and, from where the pool holds them, the nodes above it and itself."""
        drawn: list[int] = []

        def draw_at(node: int) -> int:
            above: list[int] = []
            while node >= 0:
                above.insert(0, self.pool[self._at(feed.slot, len(context) + node)])
                node = feed.parents[node]
            drawn.append(draw(context + above, self.slots[feed.slot].seed, want.child))
            return drawn[-1]

        return walk(feed.nodes, feed.parents, draw_at), drawn

    def _at(self, slot: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return self.slots[slot].tables[0][block] * self.block_size + offset

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

    def reserve_hidden(self) -> None:
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
