"""The queue in front of the engine: how much may wait, and what a request that finds it full is told."""

from dataclasses import dataclass


class QueueFullError(Exception):
    """There is no room; try again in `retry_after` seconds."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(slots=True)
class Queue:
    """Counts what was submitted and has not begun to answer.

    `max_requests` and `max_tokens` (prompt tokens) bound it; a request that finds the queue empty is always let in, so
    that a long prompt can run on an idle server.
    """

    max_requests: int
    max_tokens: int
    requests: int = 0
    tokens: int = 0

    def enter(self, prompts: list[int]) -> None:
        """Let prompts of these lengths in, all or none. Raises QueueFullError."""
        requests, tokens = self.requests + len(prompts), self.tokens + sum(prompts)
        if self.requests and tokens > self.max_tokens:
            raise QueueFullError(f"{self.tokens} prompt tokens are waiting and {self.max_tokens} may", self._patience())
        if requests > self.max_requests:
            raise QueueFullError(f"{self.requests} requests are waiting and {self.max_requests} may", self._patience())
        self.requests, self.tokens = requests, tokens

    def has_room(self, prompts: list[int]) -> bool:
        """Whether prompts of these lengths would be let in."""
        fits = not self.requests or self.tokens + sum(prompts) <= self.max_tokens
        return fits and self.requests + len(prompts) <= self.max_requests

    def leave(self, prompt: int) -> None:
        """A prompt has begun to answer, or has ended before that."""
        self.requests -= 1
        self.tokens -= prompt

    def _patience(self) -> int:
        """Seconds until room is likely: longer the more waits, a minute at most."""
        return min(60, 1 + self.requests // 8 + self.tokens // 8192)
