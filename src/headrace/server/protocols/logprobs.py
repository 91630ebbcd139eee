"""Log-probabilities in the formats of chats and completions, and early exits of tokens."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from headrace.data.plan import Exited, TokenLogprob
from headrace.server.protocols.openai_types import TokenExit
from headrace.server.protocols.time_slices import slices
from headrace.text.tokenizer import IncrementalDetokenizer, Tokenizer

# Stands for minus infinity, which JSON cannot write.
MIN_LOGPROB = -9999.0
# Encoded before the event loop runs other requests.
TOKENS_PER_SLICE = 256
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
# Log-probabilities in JSON, which takes far less room than objects. By list: its entries, one or several in each element.
EncodedLogprobs = dict[str, list[bytes]]
_encode = msgspec.json.encode


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob | None], top: int) -> EncodedLogprobs:
    """One object for each token: text, bytes, log-probability, and the `top` best tokens of that place."""
    return {"content": [_encode(_entry(tokenizer, entry, top)) for entry in entries if entry is not None]}


def _entry(tokenizer: Tokenizer, entry: TokenLogprob, top: int) -> dict[str, Any]:
    best = zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
    own = token_logprob(tokenizer, entry.token, entry.logprob)
    return {**own, "top_logprobs": [token_logprob(tokenizer, token, value) for token, value in best]}


def token_exits(tokenizer: Tokenizer, exits: Iterable[Exited]) -> list[TokenExit]:
    """The exit of each token. Votes, which are token ids in the engine, become texts."""
    return [
        TokenExit(one.layers, one.confidence, [_text(tokenizer.token_bytes(token)) for token in one.votes]) for one in exits
    ]


def token_logprob(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """Text, log-probability and bytes of a token."""
    data = tokenizer.token_bytes(token)
    return {"token": _text(data), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(data)}


def _text(data: bytes) -> str:
    """The text of a token. Bytes that are not UTF-8 become "bytes:\\x…", as in the protocol."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def joined(written: EncodedLogprobs) -> dict[str, msgspec.Raw]:
    """The lists as JSON."""
    return {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in written.items()}


class CompletionLogprobs:
    """Log-probabilities of one answer in the format of completions. `text_offset` counts characters from the first token."""

    def __init__(self, tokenizer: Tokenizer, top: int, prompt: list[int], echo: bool) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._detokenizer = IncrementalDetokenizer(tokenizer, [] if echo else prompt)
        self._offset = 0

    async def encode(self, tokens: list[int], entries: Sequence[TokenLogprob | None]) -> EncodedLogprobs:
        """Encode the next tokens; a token without an entry (the first of a prompt) gets null. A long prompt is encoded in time
        slices: in JSON it takes a hundredth of the memory."""
        result: EncodedLogprobs = {name: [] for name in LISTS}
        async for places in slices(range(len(tokens)), TOKENS_PER_SLICE):
            these = slice(places[0], places[-1] + 1)
            for name, values in self._lists(tokens[these], entries[these]).items():
                result[name].append(msgspec.json.encode(values)[1:-1])
        return result

    def _lists(self, tokens: list[int], entries: Sequence[TokenLogprob | None]) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = {name: [] for name in LISTS}
        for token, entry in zip_longest(tokens, entries):
            lists["tokens"].append(_text(self._tokenizer.token_bytes(token)))
            lists["token_logprobs"].append(None if entry is None else max(entry.logprob, MIN_LOGPROB))
            lists["top_logprobs"].append(None if entry is None else self._best(entry))
            lists["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.append([token]))
        return lists

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens, and the sampled token, which may not be among them."""
        pairs = [*zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True), (entry.token, entry.logprob)]
        return {_text(self._tokenizer.token_bytes(token)): max(value, MIN_LOGPROB) for token, value in reversed(pairs)}
