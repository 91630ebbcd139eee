"""Perplexity of a model on a text, over overlapping windows of fixed length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.llm import LLM
from headrace.text.tokenizer import Tokenizer

# Tokens of a window, unless the model's context is shorter.
DEFAULT_WINDOW = 512
# Windows of one `LLM.score` call: few, so that a caller's progress and Ctrl-C come soon.
BATCH = 4


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that the model reads together; the last `scored` of them count."""

    tokens: list[int]
    scored: int


def text_windows(llm: LLM, text: str, window: int, stride: int, limit: int | None = None) -> list[Window]:
    """Cut a text into windows as `cut` does, after at most `limit` tokens. Raises ValueError."""
    tokens = llm.tokenizer.encode(text, add_special=False, parse_special=False)[:limit]
    return list(cut(tokens, prefix_of(llm.tokenizer), window, stride))


def cut(tokens: Sequence[int], prefix: list[int], size: int, stride: int) -> Iterator[Window]:
    """Yield windows of `size` tokens that begin with `prefix` (BOS, or nothing), `stride` tokens apart.

    A window scores its second half, or its last `stride` tokens if these are fewer, so no token is scored twice. A rest shorter
    than a window is dropped unless it is the whole text. Raises ValueError if the text has no token to score.
    """
    room = size - len(prefix)
    if len(tokens) + len(prefix) < 2:
        raise ValueError("the text has too few tokens to score; give a longer one")
    for start in range(0, max(len(tokens) - room, 0) + 1, stride):
        window = [*prefix, *tokens[start : start + room]]
        yield Window(window, max(min(len(window) // 2, stride), 1))


def prefix_of(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that this model reads before every text: BOS, or nothing."""
    return [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]


def score(llm: LLM, windows: Sequence[Window], advance: Callable[[int], None] = lambda count: None) -> list[float]:
    """Return the natural log-probabilities of the tokens that count.

    advance: receives the number of windows done since its last call.
    """
    logprobs: list[float] = []
    for start in range(0, len(windows), BATCH):
        batch = windows[start : start + BATCH]
        for window, scored in zip(batch, llm.score([window.tokens for window in batch]), strict=True):
            logprobs += scored.logprobs[-window.scored :]
        advance(len(batch))
    return logprobs
