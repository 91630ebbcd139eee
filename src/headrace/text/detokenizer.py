"""Token ids to text while they arrive: what is given out is final, a character cut by a token's end is held back."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Self

from headrace.text.tokenizer import Tokenizer

MAX_CHARACTER = 4  # bytes of a UTF-8 character


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text of all whole characters (U+FFFD for what is not UTF-8), and the bytes of one still incomplete."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]


class IncrementalDetokenizer:
    """The text of one output, given out as its tokens come; a few microseconds per token, whatever their number.

    However the output is cut into calls, the texts joined (with `flush` at the end) are `tokenizer.decode(output)` where
    there is no prompt, and what `decode(prompt + output)` adds to `decode(prompt)` where there is one: a space before
    the first word is kept after a prompt. A prompt that ends inside a character is completed by the output.
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
        """`append` of one token, quickly where it is plain ASCII with nothing pending: most tokens are."""
        text = self._ascii.get(token)
        return self.append((token,)) if text is None or self._pending or self._at_start else text

    def append(self, token_ids: Iterable[int]) -> str:
        """The text these tokens complete; empty while a character is still open."""
        data = self._spell(token_ids)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        text, self._pending = _decode(self._pending + data)
        return text

    def flush(self) -> str:
        """What is still held back, as U+FFFD: no token will complete it any more."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text

    def copy(self) -> Self:
        """The same state, for a fork (a beam, another of n outputs)."""
        twin = object.__new__(type(self))
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def _spell(self, token_ids: Iterable[int]) -> bytes:
        spell, hidden = self._tokenizer.token_bytes, self._hidden
        return b"".join([spell(token) for token in token_ids if token not in hidden])
