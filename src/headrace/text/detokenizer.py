"""Incremental detokenization: token ids to final text. The bytes of an incomplete character are held back."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Self

from headrace.text.tokenizer import Tokenizer

# Most bytes of a UTF-8 character.
MAX_CHARACTER = 4


def _decode(data: bytes) -> tuple[str, bytes]:
    """Return the text of all complete characters (U+FFFD for invalid bytes), and the bytes of an incomplete last one."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]


class IncrementalDetokenizer:
    """Text of one output, token by token, at a constant cost per token.

    The joined texts, with `flush` at the end, are what `decode(prompt + output)` adds to `decode(prompt)`: after a prompt, a
    space before the first word is kept, and a character that the prompt leaves incomplete is completed.
    """

    __slots__ = ("_ascii", "_at_start", "_hidden", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._ascii = tokenizer.ascii
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._at_start = tokenizer.strip_space and not any(self._spell([token]) for token in prompt_ids)
        tail = b""
        for token in reversed(prompt_ids):
            if len(tail) >= MAX_CHARACTER:
                break
            tail = self._spell([token]) + tail
        self._pending = _decode(tail)[1]

    def push(self, token: int) -> str:
        """Append one token. Fast path for plain ASCII with no pending bytes, which most tokens are."""
        text = self._ascii.get(token)
        return self.append((token,)) if text is None or self._pending or self._at_start else text

    def append(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; empty while a character is incomplete."""
        data = self._spell(token_ids)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        text, self._pending = _decode(self._pending + data)
        return text

    def flush(self) -> str:
        """Return U+FFFD for held-back bytes, at the end of the output."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    def copy(self) -> Self:
        """Copy the state for a fork (a beam, another of n outputs)."""
        twin = object.__new__(type(self))
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def _spell(self, token_ids: Iterable[int]) -> bytes:
        spell, hidden = self._tokenizer.token_bytes, self._hidden
        return b"".join([spell(token) for token in token_ids if token not in hidden])
