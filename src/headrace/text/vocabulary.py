"""What a tokenizer is made of, whatever file it came from: one plain record, and how its tokens spell bytes."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers

from headrace.text.marks import LITERAL, MARK, SIGN

SPACE = "▁"  # SentencePiece's visible space
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Texts of tokens that end a turn, for files that name only one of theirs.
END_OF_TURN = frozenset(
    (
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
        "<|end_of_turn|>", "<end_of_utterance>", "<EOT>", "<｜end▁of▁sentence｜>",
    )
)  # fmt: skip

# WordPiece joins words with a space except before these (the cleanup of the `tokenizers` decoder).
NO_SPACE_BEFORE = frozenset((".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"))


class TokenizerError(ValueError):
    """A tokenizer that cannot be built or a text it cannot encode; one line that says what is wrong."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's parts. `backend` finds control tokens in text, `plain` (made on demand) reads them as plain text.
    `unmarking` (made on demand) is `backend` for text with marks (`text.marks`)."""

    backend: Any  # a tokenizers.Tokenizer, or what does the same
    plain: Callable[[], Any]
    unmarking: Callable[[], Any]
    size: int  # ids are 0..size-1
    spelling: str  # how tokens spell text: bytes (byte-level BPE) | spm (▁ and <0xXX>) | wordpiece
    literal_ids: frozenset[int]  # tokens whose spelling is their text: control tokens and user-defined ones
    special_ids: frozenset[int]  # control tokens, left out of text unless asked for
    silent_ids: frozenset[int]  # ids that stand for nothing
    prefix: tuple[int, ...]  # added before a text (BOS, [CLS])
    suffix: tuple[int, ...]  # added after a text ([SEP])
    strip_space: bool  # encoding puts a space before a text, so decoding drops one there
    bos_id: int | None
    eos_id: int | None  # the one the model's files name
    eos_ids: frozenset[int]  # every token that ends a generation
    templates: Mapping[str, str]  # chat templates by name; the usual one is "default"
    missing_bytes: frozenset[int] = frozenset()  # byte-level vocabularies that cannot spell everything


def drop_marks(normalizer: normalizers.Normalizer | None) -> normalizers.Normalizer:
    """A normalizer that removes marks first. Control tokens are found before any normalizer runs."""
    # only characters after the SIGN go: some pre-tokenizers look whether a piece begins at character 0
    steps = [normalizers.Replace(MARK, ""), normalizers.Replace(Regex(f"(?<={SIGN}){LITERAL[1]}"), "")]
    return normalizers.Sequence(steps if normalizer is None else [*steps, normalizer])


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest moves to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = (byte for byte in range(256) if byte not in frozenset(printable))
    return {code: code for code in printable} | {256 + i: byte for i, byte in enumerate(moved)}


BYTE_OF_CODE = _byte_alphabet()
CHAR_OF_BYTE = {byte: chr(code) for code, byte in BYTE_OF_CODE.items()}


def spell(vocabulary: Vocabulary, token: int) -> bytes:
    """The bytes a token adds to a text; empty for one that stands for nothing."""
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
    except UnicodeEncodeError:  # a token outside the byte alphabet stands for itself
        return text.encode()


def _word_piece(text: str) -> bytes:
    if text.startswith("##"):
        return text[2:].encode()
    return text.encode() if text in NO_SPACE_BEFORE else b" " + text.encode()


@contextmanager
def clear_errors(what: str) -> Iterator[None]:
    """Whatever the `tokenizers` library raises becomes one line; its panics are BaseExceptions of their own."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:300]
        raise TokenizerError(f"{what}: {reason or type(error).__name__}") from None
