"""Log-probabilities as the two kinds of completion write them, and exits of tokens."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from headrace.data.plan import Exited, TokenLogprob
from headrace.server.protocols.openai_types import TokenExit
from headrace.server.protocols.time_slices import slices
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON has not
TOKENS_PER_SLICE = 256  # tokens that are written in one turn
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
# Log-probabilities in JSON, which takes far less room than objects. By list: its entries, one or several in each element.
EncodedLogprobs = dict[str, list[bytes]]
_encode = msgspec.json.encode


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob | None], top: int) -> EncodedLogprobs:
    """One object for each token: text, bytes, log-probability, and the `top` best tokens of that place."""
    return {"content": [_encode(_entry(tokenizer, entry, top)) for entry in entries if entry is not None]}


def _entry(tokenizer: Tokenizer, entry: TokenLogprob, top: int) -> dict[str, Any]:
    best = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
    own = _token(tokenizer, entry.token, entry.logprob)
    return {**own, "top_logprobs": [_token(tokenizer, token, value) for token, value in best]}


def token_exits(tokenizer: Tokenizer, exits: Iterable[Exited]) -> list[TokenExit]:
    """Of each token the layers after which it was written; what was voted for as text."""
    return [
        TokenExit(one.layers, one.confidence, [_text(tokenizer.token_bytes(token)) for token in one.votes]) for one in exits
    ]


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": _text(data), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}


def _text(data: bytes) -> str:
    """A token's text; bytes that are no whole characters are spelled out, as the protocol does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def joined(written: EncodedLogprobs) -> dict[str, msgspec.Raw]:
    """The lists, as they are sent."""
    return {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in written.items()}


class CompletionLogprobs:
    """Lists over the tokens of one answer, the older form. `text_offset` counts characters of the text they make up."""

    def __init__(self, tokenizer: Tokenizer, top: int, prompt: list[int], echo: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._detokenizer = IncrementalDetokenizer(tokenizer, [] if echo else prompt)
        self._offset = 0

    async def written(self, tokens: list[int], entries: Sequence[TokenLogprob | None]) -> EncodedLogprobs:
        """The next tokens' lists; a token without an entry (the first of a prompt) has null. A long prompt's are written in
        turns, as they take a hundred times less room when they are."""
        made: EncodedLogprobs = {name: [] for name in LISTS}
        async for places in slices(range(len(tokens)), TOKENS_PER_SLICE):
            these = slice(places[0], places[-1] + 1)
            for name, values in self._lists(tokens[these], entries[these]).items():
                made[name].append(msgspec.json.encode(values)[1:-1])
        return made

    def _lists(self, tokens: list[int], entries: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {name: [] for name in LISTS}
        for token, entry in zip_longest(tokens, entries):
            made["tokens"].append(_text(self._tokenizer.token_bytes(token)))
            made["token_logprobs"].append(None if entry is None else max(entry.logprob, MIN_LOGPROB))
            made["top_logprobs"].append(None if entry is None else self._best(entry))
            made["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.append([token]))
        return made

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens and the drawn one, which may not be among them."""
        pairs = [*zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True), (entry.token, entry.logprob)]
        return {_text(self._tokenizer.token_bytes(token)): max(value, MIN_LOGPROB) for token, value in reversed(pairs)}
