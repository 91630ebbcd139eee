"""Simulation of KV memory use: paging and contiguous reservation (the schemes of the PagedAttention paper).

All schemes serve one trace in arrival order in the same memory. In every step each running request gains one token. Memory
without a token is divided as in the paper: `reserved` will be used later by the same request, `internal` never will be, and
`external` is free but in gaps too small for the first waiting request.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: prompt and output length in tokens."""

    prompt: int
    output: int


@dataclass(slots=True)
class MemoryUse:
    """Token slots summed over all steps, by their use."""

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
        """Share of the allocated memory that held no token."""
        return 1 - self.used / self.taken if self.taken else 0.0


@dataclass(eq=False, slots=True)
class Running:
    """A running request and its contiguous piece of memory."""

    job: TraceRequest
    start: int
    size: int
    stored: int


@dataclass(slots=True)
class Contiguous:
    """Memory with one contiguous piece per request, allocated first fit."""

    memory: int
    pieces: list[Running] = field(default_factory=list)

    def place(self, job: TraceRequest, size: int) -> Running | None:
        """Allocate the first gap of `size` slots; None if there is none."""
        at = 0
        for piece in sorted(self.pieces, key=lambda piece: piece.start):
            if piece.start - at >= size:
                break
            at = piece.start + piece.size
        if self.memory - at < size:
            return None
        piece = Running(job, at, size, job.prompt)
        self.pieces.append(piece)
        return piece

    @property
    def free(self) -> int:
        return self.memory - sum(piece.size for piece in self.pieces)


def power_of_two(job: TraceRequest) -> int:
    """Slots for the prompt and an output of the next power of two (Orca-Pow2)."""
    return job.prompt + (1 << max(job.output - 1, 0).bit_length())


def schemes(max_len: int) -> dict[str, Callable[[TraceRequest], int]]:
    """Reserved slots of a request by contiguous scheme."""
    return {
        "max": lambda job: max_len,
        "pow2": power_of_two,
        "oracle": lambda job: job.prompt + job.output,
    }


def contiguous(jobs: list[TraceRequest], memory: int, reserve: Callable[[TraceRequest], int]) -> MemoryUse:
    """Serve the trace with one contiguous reservation per request."""
    use, space, waiting = MemoryUse(), Contiguous(memory), deque(jobs)
    while waiting or space.pieces:
        while waiting and space.place(waiting[0], reserve(waiting[0])):
            waiting.popleft()
        stuck = waiting and space.free >= reserve(waiting[0])
        if not space.pieces:
            raise ValueError(f"a reservation of {reserve(waiting[0])} tokens does not fit in {memory}; give more memory")
        for piece in space.pieces:
            final = piece.job.prompt + piece.job.output
            use.used += piece.stored
            use.reserved += final - piece.stored
            use.internal += piece.size - final
            piece.stored += 1
        use.external += space.free if stuck else 0
        use.steps += 1
        space.pieces = [piece for piece in space.pieces if piece.stored < piece.job.prompt + piece.job.output]
    return use


def paged(jobs: list[TraceRequest], memory: int, block_size: int) -> MemoryUse:
    """Serve the trace with blocks allocated on demand. If none is free, the last request is preempted and restarts."""
    use, waiting, running = MemoryUse(), deque(jobs), list[Running]()
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
            use.used += piece.stored
            use.internal += held(piece.stored) * block_size - piece.stored
        use.steps += 1
        for piece in running:
            piece.stored += 1
        running = [piece for piece in running if piece.stored < piece.job.prompt + piece.job.output]
        while sum(held(piece.stored) for piece in running) > blocks:
            waiting.appendleft(running.pop().job)
    return use
