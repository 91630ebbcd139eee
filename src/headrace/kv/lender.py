"""Blocks of the prefix cache that are held while other replicas copy them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from headrace.kv.blocks import BlockManager
from headrace.kv.segments import SEGMENT_BLOCKS

HELD_SHARE = 4  # at most a quarter of the blocks is held for the store's writer, and as many for peers


@dataclass(eq=False, slots=True)
class Loan:
    """Leading segments of a chain that a peer copies. blocks: held until the loan is returned, SEGMENT_BLOCKS for a segment."""

    groups: int
    blocks: list[int] = field(default_factory=list)


class Lender:
    """Holds blocks for peers. A peer's thread calls `lend` and `give_back`, the engine's thread `serve`."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._asked: deque[tuple[Sequence[bytes], int, Future[Loan]]] = deque()
        self._returned: deque[Loan] = deque()
        self._loans: list[Loan] = []
        self.wake: Callable[[], None] = lambda: None  # makes an idle engine call `serve`

    @property
    def held(self) -> Iterable[int]:
        return (block for loan in self._loans for block in loan.blocks)

    def lend(self, hashes: Sequence[bytes], groups: int) -> "Future[Loan]":
        """Hold the leading segments whose blocks are all cached. hashes: of the blocks, in order. groups: bit mask of the KV
        groups that each block must have."""
        result: Future[Loan] = Future()
        self._asked.append((hashes, groups, result))
        self.wake()
        return result

    def give_back(self, loan: Loan) -> None:
        """Drop the blocks of a loan, soon."""
        self._returned.append(loan)
        self.wake()

    def serve(self) -> None:
        """Hold what peers have asked for, and drop what they have returned."""
        while self._returned:
            loan = self._returned.popleft()
            self._loans.remove(loan)
            for block in reversed(loan.blocks):
                self._blocks.pool.drop(block)
        while self._asked:
            hashes, groups, result = self._asked.popleft()
            if not result.set_running_or_notify_cancel():
                continue
            loan = self._loan(hashes, groups)
            self._loans.append(loan)
            result.set_result(loan)

    def _loan(self, hashes: Sequence[bytes], groups: int) -> Loan:
        pool, most = self._blocks.pool, self._blocks.num_blocks // HELD_SHARE
        room = most - sum(len(loan.blocks) for loan in self._loans)
        loan = Loan(groups)
        for start in range(0, len(hashes) - SEGMENT_BLOCKS + 1, SEGMENT_BLOCKS):
            hits = [pool.find(key, groups) for key in hashes[start : start + SEGMENT_BLOCKS]]
            blocks = [block for block in hits if block is not None]
            if len(blocks) < len(hits) or len(loan.blocks) + len(blocks) > room:
                break
            for block in blocks:
                pool.share(block)
            loan.blocks += blocks
        return loan
