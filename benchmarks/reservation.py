"""How much KV memory holds tokens: paging against contiguous reservation (the schemes of the PagedAttention paper).

All schemes serve one trace, first come first served, in the same memory. Every step each running request gains one token.
Memory that holds no token is split as the paper does: `reserved` will be used later by the same request, `internal` never
will be, `external` is free but in gaps too small for the request that waits.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a trace: tokens in, tokens out."""

    prompt: int
    output: int


@dataclass(slots=True)
class Shares:
    """Token slots summed over all steps, by what they were for."""

    used: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    steps: int = 0

    @property
    def taken(self) -> int:
        return self.used + self.reserved + self.internal

    @property
    def waste(self) -> float:
        """The share of taken memory that held no token."""
        return 1 - self.used / self.taken if self.taken else 0.0


@dataclass(eq=False, slots=True)
class Running:
    job: Job
    start: int  # of its contiguous piece
    size: int
    stored: int


@dataclass(slots=True)
class Contiguous:
    """One piece a request, first fit."""

    memory: int
    pieces: list[Running] = field(default_factory=list)

    def place(self, job: Job, size: int) -> Running | None:
        """The first gap of `size` slots, or None."""
        at = 0
        for piece in sorted(self.pieces, key=lambda piece: piece.start):
            if piece.start - at >= size:
                break
            at = piece.start + piece.size
        if self.memory - at < size:
            return None
        made = Running(job, at, size, job.prompt)
        self.pieces.append(made)
        return made

    @property
    def free(self) -> int:
        return self.memory - sum(piece.size for piece in self.pieces)


def power_of_two(job: Job) -> int:
    """Room for the prompt and an answer of the next power of two (the scheme Orca-Pow2)."""
    return job.prompt + (1 << max(job.output - 1, 0).bit_length())


def schemes(max_len: int) -> dict[str, Callable[[Job], int]]:
    """What each contiguous scheme reserves for a request."""
    return {
        "max": lambda job: max_len,
        "pow2": power_of_two,
        "oracle": lambda job: job.prompt + job.output,
    }


def contiguous(jobs: list[Job], memory: int, reserve: Callable[[Job], int]) -> Shares:
    """Serve the trace with one contiguous reservation a request."""
    shares, space, waiting = Shares(), Contiguous(memory), deque(jobs)
    while waiting or space.pieces:
        while waiting and space.place(waiting[0], reserve(waiting[0])):
            waiting.popleft()
        stuck = waiting and space.free >= reserve(waiting[0])
        if not space.pieces:
            raise ValueError(f"a reservation of {reserve(waiting[0])} tokens does not fit in {memory}; give more memory")
        for piece in space.pieces:
            final = piece.job.prompt + piece.job.output
            shares.used += piece.stored
            shares.reserved += final - piece.stored
            shares.internal += piece.size - final
            piece.stored += 1
        shares.external += space.free if stuck else 0
        shares.steps += 1
        space.pieces = [piece for piece in space.pieces if piece.stored < piece.job.prompt + piece.job.output]
    return shares


def paged(jobs: list[Job], memory: int, block_size: int) -> Shares:
    """Serve the trace with blocks handed out as tokens come; when they run out the last request starts again later."""
    shares, waiting, running = Shares(), deque(jobs), list[Running]()
    blocks = memory // block_size

    def held(stored: int) -> int:
        return -(-stored // block_size)

    while waiting or running:
        taken = sum(held(piece.stored) for piece in running)
        while waiting and taken + held(waiting[0].prompt + 1) + len(running) <= blocks:
            job = waiting.popleft()
            running.append(Running(job, 0, 0, job.prompt))
            taken += held(job.prompt)
        if not running:
            raise ValueError(f"a prompt of {waiting[0].prompt} tokens does not fit in {memory}; give more memory")
        for piece in running:
            shares.used += piece.stored
            shares.internal += held(piece.stored) * block_size - piece.stored
        shares.steps += 1
        for piece in running:
            piece.stored += 1
        running = [piece for piece in running if piece.stored < piece.job.prompt + piece.job.output]
        while sum(held(piece.stored) for piece in running) > blocks:
            waiting.appendleft(running.pop().job)
    return shares
