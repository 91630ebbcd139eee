"""The parts of a tokenizer, independent of the file format, and the bytes that its tokens stand for."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers

from headrace.text.content_marks import LITERAL, MARK, SIGN

# SentencePiece's visible space.
SPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Texts of tokens that end a turn, since some files name only one of several.
END_OF_TURN = frozenset(
    (
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
        "<|end_of_turn|>", "<end_of_utterance>", "<EOT>", "<｜end▁of▁sentence｜>", "<|observation|>",
    )
)  # fmt: skip

# WordPiece joins words with a space except before these (the cleanup of the `tokenizers` decoder).
NO_SPACE_BEFORE = frozenset((".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"))


class TokenizerError(ValueError):
    """A tokenizer that cannot be built, or a text that cannot be encoded. The message is one line."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The parts of a tokenizer.

    backend: a tokenizers.Tokenizer, or an equal interface, that matches control tokens in text.
    plain: makes a backend that encodes control tokens as plain text.
    unmarking: makes a backend for text with marks (`text.content_marks`).
    size: number of ids, 0 … size − 1.
    spelling: how tokens spell text: "bytes" (byte-level BPE), "spm" (▁ and <0xXX>) or "wordpiece".
    literal_ids: tokens spelled as their own text, control tokens and user-defined ones.
    special_ids: control tokens. silent_ids: unused ids, which stand for no text.
    prefix, suffix: ids added before a text (BOS, [CLS]) and after it ([SEP]).
    strip_space: encoding adds a space before a text, so decoding drops it.
    eos_id: the end token that the model's files name. eos_ids: all tokens that end a generation.
    templates: chat templates by name; the usual one is "default".
    missing_bytes: bytes that an incomplete byte-level vocabulary cannot spell.
    between: ids between the two texts of a pair ([SEP]); empty if the tokenizer knows no pairs.
    """

    backend: Any
    plain: Callable[[], Any]
    unmarking: Callable[[], Any]
    size: int
    spelling: str
    literal_ids: frozenset[int]
    special_ids: frozenset[int]
    silent_ids: frozenset[int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    strip_space: bool
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    templates: Mapping[str, str]
    missing_bytes: frozenset[int] = frozenset()
    between: tuple[int, ...] = ()


def drop_marks(normalizer: normalizers.Normalizer | None) -> normalizers.Normalizer:
    """Return a normalizer that removes marks first. Control tokens are matched before any normalizer runs."""
    # Removes only characters after the SIGN: some pre-tokenizers check whether a piece begins at character 0.
    steps = [normalizers.Replace(MARK, ""), normalizers.Replace(Regex(f"(?<={SIGN}){LITERAL[1]}"), "")]
    return normalizers.Sequence(steps if normalizer is None else [*steps, normalizer])


def _byte_alphabet() -> dict[int, int]:
    """Return the byte of each code point of GPT-2's alphabet: printable Latin-1 for itself, 256 and up for the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = (byte for byte in range(256) if byte not in frozenset(printable))
    return {code: code for code in printable} | {256 + i: byte for i, byte in enumerate(moved)}


BYTE_OF_CODE = _byte_alphabet()
CHAR_OF_BYTE = {byte: chr(code) for code, byte in BYTE_OF_CODE.items()}


def spell(vocabulary: Vocabulary, token: int) -> bytes:
    """Return the bytes that a token stands for; empty for an unused id."""
    text = None if token in vocabulary.silent_ids else vocabulary.backend.id_to_token(token)
    if text is None:
        return b""
    literal = token in vocabulary.literal_ids
    if vocabulary.spelling == "wordpiece":
        return _word_piece(text)
    if vocabulary.spelling == "bytes":
        return text.encode() if literal else _byte_level(text)
    byte = None if literal else BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(BYTE_OF_CODE).encode("latin-1")
    except UnicodeEncodeError:
        # A token outside the byte alphabet stands for itself.
        return text.encode()


def _word_piece(text: str) -> bytes:
    if text.startswith("##"):
        return text[2:].encode()
    return text.encode() if text in NO_SPACE_BEFORE else b" " + text.encode()


@contextmanager
def clear_errors(what: str) -> Iterator[None]:
    """Turn any error of the `tokenizers` library into a one-line TokenizerError; its panics are BaseExceptions."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise TokenizerError(f"{what}: {reason or type(error).__name__}") from None
