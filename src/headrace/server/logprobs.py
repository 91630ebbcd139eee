"""Log-probabilities as the two kinds of completion write them."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from headrace.data.plan import TokenLogprob
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import Tokenizer

FLOOR = -9999.0  # stands for minus infinity, which JSON has not


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob], top: int) -> dict[str, Any]:
    """One object a token: text, bytes, log-probability, and the `top` best tokens of that place."""
    return {
        "content": [
            {
                **_token(tokenizer, entry.token, entry.logprob),
                "top_logprobs": [
                    _token(tokenizer, token, value)
                    for token, value in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": _text(data), "logprob": max(logprob, FLOOR), "bytes": list(data)}


def _text(data: bytes) -> str:
    """A token's text; bytes that are no whole characters are spelled out, as the protocol does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """Lists over the tokens of one answer, the older form. `text_offset` counts characters of the text they make up."""

    def __init__(self, tokenizer: Tokenizer, top: int, prompt: list[int], echo: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._detokenizer = IncrementalDetokenizer(tokenizer, [] if echo else prompt)
        self._offset = 0

    def lists(self, tokens: list[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The next tokens' lists; a token without an entry (the first of a prompt) has null."""
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip_longest(tokens, entries):
            made["tokens"].append(_text(self._tokenizer.token_bytes(token)))
            made["token_logprobs"].append(None if entry is None else max(entry.logprob, FLOOR))
            made["top_logprobs"].append(None if entry is None else self._best(entry))
            made["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.append([token]))
        return made

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens and the drawn one, which may not be among them."""
        pairs = [*zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True), (entry.token, entry.logprob)]
        return {_text(self._tokenizer.token_bytes(token)): max(value, FLOOR) for token, value in reversed(pairs)}
