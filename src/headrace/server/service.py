"""What a request's handlers share: the model it is for, its name, its limits, its figures."""

import time
from dataclasses import dataclass, field

from headrace.server.async_llm import AsyncLLM
from headrace.server.metrics import Metrics
from headrace.server.settings import Limits, ServerSettings


@dataclass(eq=False, slots=True)
class Service:
    """One served model. `name` is what clients call it."""

    llm: AsyncLLM
    name: str
    settings: ServerSettings
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    def deadline(self, asked: float | None) -> float | None:
        """Seconds after which a request is ended: its own, or the server's."""
        return self.limits.deadline if asked is None else asked

    @property
    def limits(self) -> Limits:
        return self.settings.limits
