"""SentencePiece files (`source.spm`, `spiece.model`): pieces, scores and the normalizer's table of a unigram model.

The file is a protobuf message (sentencepiece_model.proto) and not trusted: every length is checked before use, and an error is
one TokenizerError.

Source: Kudo, "Subword Regularization", arXiv 1804.10959.
"""

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from headrace.text.content_marks import any_of
from headrace.text.vocabulary import SPACE, TokenizerError, clear_errors

MAX_BYTES = 64 << 20
MAX_PIECES = 1 << 20
# Most characters of a piece: the tokenizer tries all pieces that begin at a position.
MAX_PIECE = 256
# Fields of ModelProto, and of NormalizerSpec.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
CHARSMAP, DUMMY_PREFIX, EXTRA_SPACES = 2, 3, 4
# Value of TrainerSpec.model_type.
UNIGRAM = 1
# Values of SentencePiece.type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class Pieces:
    """Contents of a SentencePiece file.

    pieces: text, score and type of each. charsmap: table of character replacements, may be empty.
    dummy_prefix: a space is added before a text. trims: spaces at the ends are removed, and repeated ones merged.
    """

    pieces: list[tuple[str, float, int]]
    charsmap: bytes
    dummy_prefix: bool
    trims: bool


def read(path: Path) -> Pieces:
    """Read a SentencePiece file. Raises TokenizerError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TokenizerError(f"{path} is larger than {MAX_BYTES >> 20} MiB; the file is damaged")
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read ({error.strerror or error})") from None
    try:
        return parse(data)
    except TokenizerError as error:
        raise TokenizerError(f"{path} is not a readable SentencePiece file: {error}") from None


def parse(data: bytes) -> Pieces:
    """Parse the bytes of a SentencePiece file. Raises TokenizerError."""
    pieces: list[tuple[str, float, int]] = []
    charsmap, dummy_prefix, trims = b"", True, True
    for field, value in _fields(data):
        if field == PIECES:
            if len(pieces) == MAX_PIECES:
                raise TokenizerError(f"it has more than {MAX_PIECES} pieces")
            pieces.append(_piece(_message(value)))
        elif field == TRAINER:
            trainer = dict(_fields(_message(value)))
            if trainer.get(3, UNIGRAM) != UNIGRAM:
                raise TokenizerError("it is not a unigram model")
        elif field == NORMALIZER:
            normalizer = dict(_fields(_message(value)))
            charsmap = bytes(_message(normalizer.get(CHARSMAP, b"")))
            dummy_prefix, trims = bool(normalizer.get(DUMMY_PREFIX, 1)), bool(normalizer.get(EXTRA_SPACES, 1))
    if sum(kind == UNKNOWN for _, _, kind in pieces) != 1:
        raise TokenizerError("it must have one piece of the type UNKNOWN")
    return Pieces(pieces, charsmap, dummy_prefix, trims)


def unigram_tokenizer(model: Pieces) -> tokenizers.Tokenizer:
    """Build the tokenizer that splits texts into these pieces, without control tokens. Raises TokenizerError."""
    top = max((score for _, score, kind in model.pieces if kind == NORMAL), default=0.0)
    vocabulary: dict[str, float] = {}
    unknown = next(text for text, _, kind in model.pieces if kind == UNKNOWN)
    for text, score, kind in model.pieces:
        if kind in (NORMAL, USER_DEFINED, UNKNOWN) and text not in vocabulary:
            vocabulary[text] = len(text) * top - 0.1 if kind == USER_DEFINED else score
    with clear_errors("the pieces cannot be used"):
        backend = tokenizers.Tokenizer(models.Unigram(list(vocabulary.items()), list(vocabulary).index(unknown)))
        backend.normalizer = unigram_normalizer(model.charsmap, model.trims)
        backend.pre_tokenizer = unigram_split(model.dummy_prefix)
    return backend


def unigram_normalizer(charsmap: bytes, trims: bool) -> normalizers.Normalizer:
    """The normalizer of a unigram model, with the settings of `Pieces`."""
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if trims:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    return normalizers.Sequence(steps)


def without_names(split: pre_tokenizers.PreTokenizer | None, names: Iterable[str]) -> pre_tokenizers.PreTokenizer | None:
    """The pre-tokenizer with the names of control tokens cut after their first character.

    A Unigram model has these names among its pieces, and would write the tokens where a text spells them.
    """
    spelled = sorted({name.replace(" ", SPACE) for name in names if len(name) > 1})
    if not spelled:
        return split
    cut = pre_tokenizers.Split(Regex(f"(?={any_of(spelled)})."), "isolated")
    return cut if split is None else pre_tokenizers.Sequence([split, cut])


def unigram_split(dummy_prefix: bool) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of a unigram model."""
    return pre_tokenizers.Metaspace(SPACE, prepend_scheme="always" if dummy_prefix else "never")


def _piece(data: bytes) -> tuple[str, float, int]:
    fields = dict(_fields(data))
    raw, score, kind = fields.get(1, b""), fields.get(2, 0.0), fields.get(3, NORMAL)
    try:
        text = _message(raw).decode()
    except UnicodeDecodeError:
        raise TokenizerError("a piece is not UTF-8") from None
    if not 0 < len(text) <= MAX_PIECE:
        raise TokenizerError(f"a piece has {len(text)} characters, and 1 to {MAX_PIECE} are allowed")
    if not isinstance(score, float) or not math.isfinite(score):
        raise TokenizerError(f"piece {text!r:.40} has a score that is not finite")
    if not isinstance(kind, int) or not NORMAL <= kind <= BYTE:
        raise TokenizerError(f"piece {text!r:.40} is of an unknown type")
    return text, score, kind


def _message(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TokenizerError("a number in place of a text or a message")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield number and value of each field of a message: an int, a float for 4 bytes, otherwise bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, size = key & 7, 0
        if kind == 0:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise TokenizerError(f"a field has the unknown wire type {kind}")
        if size > len(data) - at:
            raise TokenizerError("a field ends beyond the file")
        value = data[at : at + size]
        yield key >> 3, struct.unpack("<f", value)[0] if kind == 5 else value
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise TokenizerError("a number ends beyond the file")
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise TokenizerError("a number has more than ten bytes")
