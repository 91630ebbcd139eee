"""One served model with its name, limits and metrics, for the handlers of requests."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace import __version__
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.inflight import TooLongError
from headrace.server.engines.metrics import ModelMetrics
from headrace.server.settings import Limits, ServerSettings
from headrace.weights.defaults import Defaults, SamplingDefaults


@dataclass(eq=False, slots=True)
class Service:
    """One served model. `name`: its name for clients."""

    llm: AsyncLLM
    name: str
    settings: ServerSettings
    metrics: ModelMetrics
    created: int = field(default_factory=lambda: int(time.time()))

    def deadline(self, asked: float | None) -> float | None:
        """Return the seconds after which a request ends: its own deadline, or the server's."""
        return self.limits.deadline if asked is None else asked

    @property
    def defaults(self) -> Defaults:
        """Sampling settings of requests without their own."""
        return {} if self.settings.sampling_defaults == SamplingDefaults.NEUTRAL else self.llm.opened.defaults

    @property
    def limits(self) -> Limits:
        return self.settings.limits

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint. It changes with the version, the model and its number format."""
        note = "" if self.llm.loaded is None else self.llm.loaded.note
        return f"fp_{hashlib.sha256(f'{__version__} {self.name} {note}'.encode()).hexdigest()[:10]}"

    def check_room(self, prompts: Sequence[Sequence[int]], answer: int | None, what: str) -> None:
        """Raises TooLongError if the longest prompt and `answer` tokens exceed the context. `what` names the prompt."""
        if answer is None or self.llm.loaded is None:
            return
        context, prompt = self.llm.loaded.max_model_len, max(map(len, prompts), default=0)
        if prompt + answer > context:
            raise TooLongError(
                f"This model's maximum context length is {context} tokens. However, you requested {prompt + answer} tokens "
                f"({prompt} in the {what}, {answer} in the completion); lower max_tokens, or shorten the {what}"
            )
