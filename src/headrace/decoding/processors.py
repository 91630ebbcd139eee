"""Logit processors of the user's own: plain objects that change the model's logits on the host.

    class NoDigits:
        scope = "pointwise"

        def __init__(self, digit_ids):
            self.ids = digit_ids

        def apply(self, logits, history, paths):
            logits[:, self.ids] = float("-inf")
            return logits

They run in the given order, before bias, penalties, temperature and filters. Raw log-probabilities are those of the logits
before any processor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

SCOPES = ("pointwise", "path", "stateful")


class History(NamedTuple):
    """The committed tokens of a sequence."""

    prompt: Sequence[int]
    output: Sequence[int]


class Processor(Protocol):
    """Changes the logits of one request's sequences.

    `scope` is what the result depends on, which decides where the processor may be used:
    * pointwise: on the logits alone;
    * path: also on history and path. Both are right at every node of a draft;
    * stateful: on what the processor itself remembers from call to call. It needs the tokens one at a time, in order:
      a request with such a processor takes no drafts and one output (n = 1).
    """

    scope: str

    def apply(self, logits: Any, history: History, paths: Sequence[Sequence[int]]) -> Any:
        """logits, a torch tensor [n, V] float32 on the CPU and a copy that may be changed in place -> logits [n, V].

        Row i has the logits after prompt, output and the draft tokens paths[i] (empty without a draft). -inf
        makes a token impossible. numpy users: `logits.numpy()` shares the memory, and an array may be returned.
        """


class ProcessorError(ValueError):
    """A user's processor failed; only its request fails."""


class NoTokenError(ProcessorError):
    """A row leaves no token to draw."""


def check_processors(processors: Sequence[Processor]) -> None:
    """Raise ProcessorError, at admission, for an object that is not a processor."""
    for processor in processors:
        name = type(processor).__name__
        if not callable(getattr(processor, "apply", None)):
            raise ProcessorError(f"logit processor {name} has no method apply(logits, history, paths)")
        scope = getattr(processor, "scope", None)
        if scope not in SCOPES:
            raise ProcessorError(f"logit processor {name}: scope must be one of {', '.join(SCOPES)}, not {scope!r}")


class LengthNudge:
    """Leads an answer to its end: after `start` output tokens the end token's logit grows by `slope` per token.

    Unlike max_tokens it does not cut a sentence short. A negative slope makes the answer longer.
    """

    scope = "path"

    def __init__(self, end_id: int, start: int, slope: float = 0.5) -> None:
        self.end_id = end_id
        self.start = start
        self.slope = slope

    def apply(self, logits: Any, history: History, paths: Sequence[Sequence[int]]) -> Any:
        for row, path in zip(logits, paths, strict=True):
            over = len(history.output) + len(path) - self.start
            row[self.end_id] += self.slope * max(over, 0)
        return logits
