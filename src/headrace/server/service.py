"""What the routes share: the model being served, its name, its limits, its figures."""

import time
from dataclasses import dataclass, field

from headrace.server.async_llm import AsyncLLM
from headrace.server.errors import ApiError
from headrace.server.metrics import Metrics
from headrace.server.settings import Limits, ServerSettings


@dataclass(slots=True)
class Service:
    """One served model."""

    llm: AsyncLLM
    settings: ServerSettings
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.settings.model_name

    @property
    def limits(self) -> Limits:
        return self.settings.limits

    def check_model(self, model: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        if model is not None and model != self.name:
            raise ApiError(
                404, f"the model {model[:100]!r} is not served here; use {self.name!r}", param="model", code="model_not_found"
            )
