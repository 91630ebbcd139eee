"""Tokenizer of a model: text to token ids and back, at once or incrementally."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.text.content_marks import MARK, SIGN, is_structure, unmark
from headrace.text.gguf_vocab import read_gguf
from headrace.text.hf_vocab import read_folder
from headrace.text.ranked_vocab import read_ranked
from headrace.text.vocabulary import TokenizerError, Vocabulary, clear_errors, spell

__all__ = ["Tokenizer", "TokenizerError"]
# Markup whose tokens are frequent in answers and late in vocabularies.
MARKUP = (
    "```",
    "```\n",
    "\n```\n",
    "```python\n",
    "**",
    "###",
    "\n\n###",
    "`,",
    "`.",
    ":\n\n",
    ".\n\n",
    "):\n",
    "();\n",
    "});\n",
)
# Most bytes of a UTF-8 character.
MAX_CHARACTER = 4


class Encoded(dict[str, Any]):
    """Result of calling a tokenizer, readable by key and by attribute as in transformers."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class Tokenizer:
    """A model's tokenizer, from GGUF metadata or a Hugging Face folder.

    `decode` joins `token_bytes` and reads them as UTF-8; invalid bytes become U+FFFD. If encoding adds a space before a text,
    decoding drops it. Ids 0 … vocab_size − 1 are tokens; further rows of a model (padding) stand for no bytes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._plain: Any = None
        self._unmarking: Any = None
        self._bytes: list[bytes | None] = [None] * vocabulary.size
        # Texts of the tokens decoded so far that are plain ASCII and no control tokens.
        self.ascii: dict[int, str] = {}
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eos_ids = vocabulary.eos_ids
        self.special_ids = vocabulary.special_ids
        self.strip_space = vocabulary.strip_space
        self.between = vocabulary.between
        self.templates = vocabulary.templates
        self.chat_template = vocabulary.templates.get("default")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Read the tokenizer of a GGUF file's metadata (keys `tokenizer.*`). Raises TokenizerError."""
        return cls(read_gguf(metadata))

    @classmethod
    def from_words(cls, words: Sequence[bytes], controls: Sequence[str], end: str) -> Self:
        """A byte-level BPE tokenizer from its words by rank and its control tokens. Raises TokenizerError."""
        return cls(read_ranked(words, controls, end))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read the tokenizer of a Hugging Face or Marian folder. Raises TokenizerError."""
        return cls(read_folder(Path(folder)))

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> "Encoded":
        """Encode one or several texts, as tokenizers of transformers do: {"input_ids", "attention_mask"}."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        batch = [self.encode(item, add_special_tokens) for item in text]
        return Encoded(input_ids=batch, attention_mask=[[1] * len(ids) for ids in batch])

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens, bos {self.bos_token!r}, eos {self.eos_token!r})"

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True, *, marked: bool = False) -> list[int]:
        """Return the token ids of a text.

        add_special: adds the tokens that the model expects around a text (BOS, [CLS] … [SEP]).
        parse_special: if false, names of control tokens are ordinary text.
        marked: the text is a rendered conversation, whose marked control tokens (`text.content_marks`) are ordinary text.
        Raises TokenizerError for lone surrogates, and for text that the vocabulary cannot spell.
        """
        marked = marked and SIGN in text
        # Some pre-tokenizers check whether a piece begins at character 0.
        while marked and text.startswith(MARK):
            text = text[len(MARK) :]
        self._check(unmark(text) if marked else text)
        encoder = self._unmarking_encoder() if marked else self._encoder(parse_special)
        with clear_errors("this text cannot be encoded"):
            # The library releases the GIL for batches alone, so this is a batch of one.
            (encoded,) = encoder.encode_batch_fast([text], add_special_tokens=False)
            ids: list[int] = encoded.ids
        if add_special:
            return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix]
        return ids

    def join_pair(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """Token ids of a pair of texts, whose own ids are given, as the model's template joins them."""
        words = self._vocabulary
        return [*words.prefix, *first, *words.between, *second, *words.suffix]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of token ids; `skip_special` leaves control tokens out."""
        return self.text_of(self.spelled(ids, skip_special))

    def spelled(self, ids: Iterable[int], skip_special: bool = True) -> bytes:
        """Return the bytes of token ids; those of a sequence are the joined bytes of its parts."""
        return b"".join([self.token_bytes(token) for token in ids if not (skip_special and token in self.special_ids)])

    def text_of(self, data: bytes) -> str:
        """The text that the bytes of all its tokens make up."""
        if self.strip_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to a text (a part of a character, sometimes); empty for padding ids."""
        if token >= self.vocab_size:
            return b""
        if token < 0:
            raise TokenizerError(f"token id {token} is negative")
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = spell(self._vocabulary, token)
            if known.isascii() and token not in self.special_ids:
                self.ascii[token] = known.decode("ascii")
        return known

    def token_text(self, token: int) -> str:
        """Return the token as the vocabulary writes it (`Ġthe`, `▁the`, `<0x0A>`). Raises TokenizerError for an unknown id."""
        text = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if text is None:
            raise TokenizerError(f"there is no token {token}; ids are 0 to {self.vocab_size - 1}")
        return str(text)

    def id_of(self, text: str) -> int | None:
        """Return the id of the token that the vocabulary writes as `text`, or None."""
        token = self._backend.token_to_id(text)
        return None if token is None else int(token)

    def differs(self, other: "Tokenizer") -> str:
        """Describe how the tokens of two models differ; empty if every id stands for the same token."""
        mine, theirs = self._backend.get_vocab(), other._backend.get_vocab()
        if mine == theirs:
            return "" if self._vocabulary.spelling == other._vocabulary.spelling else "they spell bytes differently"
        token = min((id for text, id in {**theirs, **mine}.items() if mine.get(text) != theirs.get(text)))
        texts = [tokenizer._backend.id_to_token(token) for tokenizer in (self, other)]
        return f"token {token} is {texts[0]!r} in one and {texts[1]!r} in the other"

    def control_id(self, text: str) -> int | None:
        """Return the id of a control token, or None."""
        token = self.id_of(text)
        return token if token in self.special_ids else None

    @property
    def control_texts(self) -> list[str]:
        """The control tokens as text."""
        return [self.token_text(token) for token in sorted(self.special_ids)]

    @property
    def structure_texts(self) -> list[str]:
        """The control tokens, and other added tokens that belong to chat formats, such as `</tool_response>`."""
        others = [self.token_text(token) for token in sorted(self._vocabulary.literal_ids - self.special_ids)]
        return [*self.control_texts, *filter(is_structure, others)]

    @property
    def bos_token(self) -> str:
        """The text of BOS, empty if there is none."""
        return "" if self.bos_id is None else self.token_text(self.bos_id)

    @property
    def eos_token(self) -> str:
        """The text of EOS, empty if there is none."""
        return "" if self.eos_id is None else self.token_text(self.eos_id)

    def _encoder(self, parse_special: bool) -> Any:
        if parse_special:
            return self._backend
        if self._plain is None:
            self._plain = self._vocabulary.plain()
        return self._plain

    def _unmarking_encoder(self) -> Any:
        if self._unmarking is None:
            self._unmarking = self._vocabulary.unmarking()
        return self._unmarking

    def _check(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is not Unicode: a lone surrogate at character {error.start}") from None
        missing = self._vocabulary.missing_bytes
        if missing and not missing.isdisjoint(data):
            char = next(char for char in text if not missing.isdisjoint(char.encode()))
            raise TokenizerError(f"the model's vocabulary cannot spell {char!r} (U+{ord(char):04X}); remove it from the text")


def frequent_tokens(tokenizer: Tokenizer, vocab_size: int, count: int, more: Iterable[int] = ()) -> list[int]:
    """Return the ids of about `count` tokens, ascending.

    These are the first of the vocabulary (byte-pair merges are ordered by frequency), the tokens of common markup, the end
    tokens, and `more`. A draft restricted to them computes a small part of its head.

    Source: FR-Spec, Zhao et al., arXiv 2502.14856.
    """
    chosen = set(range(min(count, vocab_size))) | set(tokenizer.eos_ids) | set(more)
    for text in MARKUP:
        chosen.update(tokenizer.encode(text, add_special=False))
    return sorted(token for token in chosen if token < vocab_size)


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
