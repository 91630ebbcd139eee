"""Admission queue in front of the engine: its limits, the order of clients, and the error if it is full."""

from collections import Counter
from dataclasses import dataclass, field

from headrace.server.access.principals import ANONYMOUS, PRINCIPAL


class QueueFullError(Exception):
    """The queue is full; `retry_after`: seconds until a new attempt."""

    def __init__(self, reason: str, retry_after: int) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(slots=True)
class AdmissionQueue:
    """Counts requests between their submission and their first token.

    `max_requests` and `max_tokens` (prompt tokens) limit the queue. An empty queue accepts every request, so that a long prompt
    can run on an idle server. One of several principals cannot fill it. Each request gets a turn: a client's third request
    comes after the second ones of other clients.

    Source: self-clocked fair queueing, Golestani 1994.
    """

    max_requests: int
    max_tokens: int
    requests: int = 0
    tokens: int = 0
    _own: Counter[tuple[str, str]] = field(default_factory=Counter)  # requests and tokens by principal
    _turns: dict[str, int] = field(default_factory=dict)  # last turn of each client with waiting requests
    _waiting: Counter[str] = field(default_factory=Counter)  # requests by client
    _begun: int = 0  # the largest turn that has begun

    def enter(self, prompts: list[int]) -> None:
        """Accept prompts of these lengths, all or none. Raises QueueFullError, QuotaError."""
        who, size = PRINCIPAL.get(), sum(prompts)
        match self._lacks(prompts):
            case "tokens":
                what = f"{self.tokens} prompt tokens are waiting and {self.max_tokens} may (--max-queued-tokens)"
                raise QueueFullError(what, self._retry_after())
            case "requests":
                what = f"{self.requests} requests are waiting and {self.max_requests} may (--max-queued-requests)"
                raise QueueFullError(what, self._retry_after())
        who.charge("tokens", size)
        self.requests, self.tokens = self.requests + len(prompts), self.tokens + size
        self._own.update({(who.name, "requests"): len(prompts), (who.name, "tokens"): size})

    def has_room(self, prompts: list[int]) -> bool:
        """Return whether prompts of these lengths would be accepted."""
        return not self._lacks(prompts) and PRINCIPAL.get().has("tokens", sum(prompts))

    def turn(self, client: str) -> int:
        """Return the turn of a client's next request: after its last turn, and after the largest that has begun."""
        self._waiting[client] += 1
        self._turns[client] = max(self._begun, self._turns.get(client, 0)) + 1
        return self._turns[client]

    def leave(self, prompt: int, principal: str = ANONYMOUS, client: str = "", turn: int = 0) -> None:
        """Remove a prompt: its answer has begun, or it has ended."""
        self.requests -= 1
        self.tokens -= prompt
        self._own -= Counter({(principal, "requests"): 1, (principal, "tokens"): prompt})
        self._begun = max(self._begun, turn)
        self._waiting -= Counter([client])
        if client not in self._waiting:
            self._turns.pop(client, None)

    def _lacks(self, prompts: list[int]) -> str:
        """Return the limit that the prompts exceed: "tokens", "requests" or "" for none."""
        who = PRINCIPAL.get()
        requests, tokens = self._own[who.name, "requests"], self._own[who.name, "tokens"]
        if not self.requests:
            return "" if len(prompts) <= self.max_requests else "requests"
        if sum(prompts) > who.room(self.max_tokens, self.tokens, tokens):
            return "tokens"
        return "requests" if len(prompts) > who.room(self.max_requests, self.requests, requests) else ""

    def _retry_after(self) -> int:
        """Estimate the seconds until there is room from the length of the queue, at most 60."""
        return min(60, 1 + self.requests // 8 + self.tokens // 8192)
