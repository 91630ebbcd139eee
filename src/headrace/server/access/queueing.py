"""The queue in front of the engine: how much may wait, whose turn it is, and what a request that finds it full is told."""

from collections import Counter
from dataclasses import dataclass, field

from headrace.server.access.principals import ANONYMOUS, PRINCIPAL


class QueueFullError(Exception):
    """There is no room; try again in `retry_after` seconds."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(slots=True)
class AdmissionQueue:
    """Counts what was submitted and has not begun to answer.

    `max_requests` and `max_tokens` (prompt tokens) bound it; a request that finds the queue empty is always let in, so
    that a long prompt can run on an idle server. Of several principals none fills it. Clients have their turns: what one
    queues comes after what others have queued as often (self-clocked fair queueing, Golestani 1994).
    """

    max_requests: int
    max_tokens: int
    requests: int = 0
    tokens: int = 0
    _own: Counter[tuple[str, str]] = field(default_factory=Counter)  # requests and tokens by principal
    _turns: dict[str, int] = field(default_factory=dict)  # the last one of each client that has something waiting
    _waiting: Counter[str] = field(default_factory=Counter)  # requests by client
    _begun: int = 0  # the last turn that was had

    def enter(self, prompts: list[int]) -> None:
        """Let prompts of these lengths in, all or none. Raises QueueFullError, QuotaError."""
        who, size = PRINCIPAL.get(), sum(prompts)
        match self._lacks(prompts):
            case "tokens":
                what = f"{self.tokens} prompt tokens are waiting and {self.max_tokens} may (--max-queued-tokens)"
                raise QueueFullError(what, self._patience())
            case "requests":
                what = f"{self.requests} requests are waiting and {self.max_requests} may (--max-queued-requests)"
                raise QueueFullError(what, self._patience())
        who.charge("tokens", size)
        self.requests, self.tokens = self.requests + len(prompts), self.tokens + size
        self._own.update({(who.name, "requests"): len(prompts), (who.name, "tokens"): size})

    def has_room(self, prompts: list[int]) -> bool:
        """Whether prompts of these lengths would be let in."""
        return not self._lacks(prompts) and PRINCIPAL.get().has("tokens", sum(prompts))

    def turn(self, client: str) -> int:
        """The turn of a client's next request: after its own before, and after the last that was had."""
        self._waiting[client] += 1
        self._turns[client] = max(self._begun, self._turns.get(client, 0)) + 1
        return self._turns[client]

    def leave(self, prompt: int, principal: str = ANONYMOUS, client: str = "", turn: int = 0) -> None:
        """A prompt has begun to answer, or has ended before that."""
        self.requests -= 1
        self.tokens -= prompt
        self._own -= Counter({(principal, "requests"): 1, (principal, "tokens"): prompt})
        self._begun = max(self._begun, turn)
        self._waiting -= Counter([client])
        if client not in self._waiting:
            self._turns.pop(client, None)

    def _lacks(self, prompts: list[int]) -> str:
        """What there is no room for; empty where there is for all."""
        who = PRINCIPAL.get()
        requests, tokens = self._own[who.name, "requests"], self._own[who.name, "tokens"]
        if not self.requests:
            return "" if len(prompts) <= self.max_requests else "requests"
        if sum(prompts) > who.room(self.max_tokens, self.tokens, tokens):
            return "tokens"
        return "requests" if len(prompts) > who.room(self.max_requests, self.requests, requests) else ""

    def _patience(self) -> int:
        """Seconds until room is likely: longer the more waits, a minute at most."""
        return min(60, 1 + self.requests // 8 + self.tokens // 8192)
