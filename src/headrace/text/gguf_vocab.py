"""The vocabulary of a GGUF file's metadata (keys `tokenizer.*`), built with the `tokenizers` library.

The metadata is not trusted: every value is checked before use, and an error is one TokenizerError that names the key.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from headrace.text.pretokenizers import Split, normalizer, pre_tokenizer, split_named
from headrace.text.sentencepiece import unigram_normalizer, unigram_split, without_names
from headrace.text.vocabulary import (
    BYTE_TOKEN,
    CHAR_OF_BYTE,
    END_OF_TURN,
    SPACE,
    TokenizerError,
    Vocabulary,
    clear_errors,
    drop_marks,
)

log = logging.getLogger(__name__)

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKENS = 1 << 22
# Most characters of a SentencePiece piece: every cut of it is a possible merge.
MAX_PIECE = 1024
KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Typed, checked access to the `tokenizer.ggml.*` keys."""

    values: Mapping[str, Any]

    def text(self, key: str) -> str | None:
        value = self.values.get(KEY + key)
        if value is not None and not isinstance(value, str):
            raise TokenizerError(f"{KEY}{key} must be text, not {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(KEY + key, default)
        if not isinstance(value, (bool, np.bool_)):
            raise TokenizerError(f"{KEY}{key} must be true or false, not {value!r:.40}")
        return bool(value)

    def token_id(self, key: str, size: int) -> int | None:
        value = self.values.get(KEY + key)
        if value is None:
            return None
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise TokenizerError(f"{KEY}{key} must be a token id, not {value!r:.40}")
        if not 0 <= value < size:
            raise TokenizerError(f"{KEY}{key} is {value}, outside the vocabulary of {size} tokens")
        return int(value)

    def strings(self, key: str) -> list[str]:
        value = self.values.get(KEY + key)
        if value is None:
            raise TokenizerError(f"{KEY}{key} is missing; the file carries no usable tokenizer")
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise TokenizerError(f"{KEY}{key} must be a list of strings, not {type(value).__name__}")
        if len(value) > MAX_TOKENS:
            raise TokenizerError(f"{KEY}{key} has {len(value)} entries and {MAX_TOKENS} is the most")
        with clear_errors(f"{KEY}{key} cannot be read"):
            strings = value.tolist() if hasattr(value, "tolist") else list(value)
        if not {str}.issuperset(map(type, strings)):
            raise TokenizerError(f"{KEY}{key} must hold strings only")
        return strings

    def numbers(self, key: str, count: int) -> np.ndarray | None:
        value = self.values.get(KEY + key)
        if value is None:
            return None
        with clear_errors(f"{KEY}{key} cannot be read"):
            numbers = np.asarray(value)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
            raise TokenizerError(f"{KEY}{key} must be a list of numbers")
        if len(numbers) != count:
            raise TokenizerError(f"{KEY}{key} has {len(numbers)} entries for {count} tokens")
        return numbers


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a vocabulary: text by id, id by text, and the types of all ids whose type is not NORMAL."""

    texts: list[str]
    ids: dict[str, int]
    types: dict[int, int]
    bos: int | None
    eos: int | None
    unknown: int | None

    @classmethod
    def read(cls, metadata: _Metadata, kind: str) -> "_Tokens":
        texts = metadata.strings("tokens")
        ids = dict(zip(texts, range(len(texts)), strict=True))
        if len(ids) != len(texts):
            twice = next(text for token, text in enumerate(texts) if ids[text] != token)
            raise TokenizerError(f"{KEY}tokens holds {twice!r:.40} twice; the file is damaged")
        size = len(texts)
        named = {key: metadata.token_id(f"{key}_token_id", size) for key in ("bos", "eos", "unknown", "cls", "seperator")}
        defaults = {"llama": ("<s>", "</s>", "<unk>"), "t5": ("<s>", "</s>", "<unk>"), "bert": ("[CLS]", "[SEP]", "[UNK]")}.get(
            kind, (None, None, None)
        )
        default_ids = [ids.get(text) if text else None for text in defaults]
        if kind == "bert":
            named["bos"], named["eos"] = named["cls"], named["seperator"]
        picked = [named[key] if named[key] is not None else default_ids[i] for i, key in enumerate(("bos", "eos", "unknown"))]
        types = _types(metadata, texts, picked)
        return cls(texts, ids, types, *picked)

    def of_type(self, *types: int) -> list[int]:
        return [token for token, type_ in self.types.items() if type_ in types]

    def added(self, *types: int) -> list[AddedToken]:
        """Return the tokens of these types, which are matched in a text before anything else."""
        return [
            AddedToken(self.texts[token], special=self.types[token] != USER_DEFINED, normalized=False)
            for token in self.of_type(*types)
            if self.texts[token]
        ]


def _types(metadata: _Metadata, texts: list[str], named: list[int | None]) -> dict[int, int]:
    numbers = metadata.numbers("token_type", len(texts))
    if numbers is not None:
        if numbers.dtype.kind == "f" or not ((numbers >= 0) & (numbers <= BYTE)).all():
            raise TokenizerError(f"{KEY}token_type must hold integers from 0 to {BYTE}")
        odd = np.flatnonzero((numbers != NORMAL) & (numbers != 0))
        return dict(zip(odd.tolist(), numbers[odd].tolist(), strict=True))
    types = {token: BYTE for token, text in enumerate(texts) if BYTE_TOKEN.fullmatch(text)}
    return types | {token: CONTROL for token in named if token is not None}


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a tokenizer that differ between kinds of vocabulary. add_bos, add_end: defaults if the file has no flag."""

    model: models.Model
    spelling: str
    normalizer: normalizers.Normalizer | None = None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
    add_bos: bool = False
    add_end: bool = False
    strip_space: bool = False
    missing_bytes: frozenset[int] = frozenset()
    between: int = 0  # end tokens between the texts of a pair

    def build(self, added: list[AddedToken], unmarking: bool = False) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer(self.model)
        normalizer = drop_marks(self.normalizer) if unmarking else self.normalizer
        if normalizer is not None:
            backend.normalizer = normalizer
        if self.pre_tokenizer is not None:
            backend.pre_tokenizer = self.pre_tokenizer
        backend.add_tokens(added)
        return backend


def _assemble(parts: _Parts, tokens: _Tokens, metadata: _Metadata, templates: Mapping[str, str]) -> Vocabulary:
    """Build a vocabulary: control tokens, end tokens, and the tokens added before and after a text."""
    size = len(tokens.texts)
    backend = parts.build(tokens.added(UNKNOWN, CONTROL, USER_DEFINED))
    literal = tokens.of_type(UNKNOWN, CONTROL, USER_DEFINED)
    begin = metadata.flag("add_bos_token", parts.add_bos)
    end = metadata.flag("add_eos_token", False) or metadata.flag("add_sep_token", parts.add_end)
    for wanted, token, name in ((begin, tokens.bos, "bos"), (end, tokens.eos, "eos")):
        if wanted and token is None:
            raise TokenizerError(f"{KEY}add_{name}_token asks for a token that {KEY}{name}_token_id does not name")
    ends = [tokens.eos, *(metadata.token_id(f"{key}_token_id", size) for key in ("eot", "eom"))]
    ends += [token for token in literal if tokens.texts[token] in END_OF_TURN]
    return Vocabulary(
        backend=backend,
        plain=lambda: parts.build(tokens.added(USER_DEFINED)),
        unmarking=lambda: parts.build(tokens.added(UNKNOWN, CONTROL, USER_DEFINED), unmarking=True),
        size=size,
        spelling=parts.spelling,
        literal_ids=frozenset(literal),
        special_ids=frozenset(tokens.of_type(UNKNOWN, CONTROL)),
        silent_ids=frozenset(tokens.of_type(UNUSED)),
        prefix=(tokens.bos,) if begin and tokens.bos is not None else (),
        suffix=(tokens.eos,) if end and tokens.eos is not None else (),
        strip_space=parts.strip_space,
        bos_id=tokens.bos,
        eos_id=tokens.eos,
        eos_ids=frozenset(token for token in ends if token is not None),
        templates=templates,
        missing_bytes=parts.missing_bytes,
        between=() if tokens.eos is None else (tokens.eos,) * parts.between,
    )


def _byte_level(tokens: _Tokens, metadata: _Metadata) -> _Parts:
    """Byte-level BPE (GPT-2 and most later models). Every byte has a token, so any text can be encoded."""
    pairs = cast(list[tuple[str, str]], [tuple(merge.split(" ")) for merge in metadata.strings("merges")])
    if not {2}.issuperset(map(len, pairs)):
        bad = next(pair for pair in pairs if len(pair) != 2)
        raise TokenizerError(f"{KEY}merges must hold pairs of tokens, not {' '.join(bad)!r:.40}")
    split = _split(metadata)
    return _Parts(
        model=models.BPE(tokens.ids, pairs, ignore_merges=split.ignore_merges),
        spelling="bytes",
        normalizer=normalizer(split),
        pre_tokenizer=pre_tokenizer(split),
        add_bos=split.add_bos and tokens.bos is not None,
        missing_bytes=frozenset(byte for byte, char in CHAR_OF_BYTE.items() if char not in tokens.ids),
    )


def _split(metadata: _Metadata) -> Split:
    name = metadata.text("pre")
    if name is None:
        log.warning("%spre is missing: the text is split the default way, which may not be the model's", KEY)
    return split_named(name or "default")


def _sentence_piece(tokens: _Tokens, metadata: _Metadata) -> _Parts:
    """SentencePiece BPE (Llama 2, Mistral, Gemma): merges the best-scored piece first; rare characters become bytes."""
    scores = metadata.numbers("scores", len(tokens.texts))
    if scores is None:
        raise TokenizerError(f"{KEY}scores is missing; a SentencePiece vocabulary needs them")
    if not np.isfinite(scores).all():
        raise TokenizerError(f"{KEY}scores must be finite numbers")
    if metadata.values.get(KEY + "precompiled_charsmap") is not None:
        raise TokenizerError(f"{KEY}precompiled_charsmap is not read; SentencePiece vocabularies with one are not supported")
    unknown = None if tokens.unknown is None else tokens.texts[tokens.unknown]
    if unknown is None and len(tokens.of_type(BYTE)) < 256:
        raise TokenizerError(f"{KEY}unknown_token_id is missing and the vocabulary has no tokens for bytes")
    prefix = metadata.flag("add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    return _Parts(
        model=models.BPE(tokens.ids, _merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True),
        spelling="spm",
        normalizer=normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)]),
        add_bos=True,
        strip_space=prefix,
    )


def _merges(tokens: _Tokens, scores: np.ndarray) -> list[tuple[str, str]]:
    """Return every pair of pieces that forms another piece, best-scored piece first; ties go to the lower id."""
    pieces = {text: token for text, token in tokens.ids.items() if token not in tokens.types}
    order = np.argsort(-scores.astype(np.float64), kind="stable").tolist()
    merges = []
    for token in order:
        piece = tokens.texts[token]
        if token in tokens.types or len(piece) < 2:
            continue
        if len(piece) > MAX_PIECE:
            raise TokenizerError(f"{KEY}tokens holds a piece of {len(piece)} characters and {MAX_PIECE} is the most")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _word_piece(tokens: _Tokens, metadata: _Metadata) -> _Parts:
    """WordPiece (BERT). GGUF writes ▁word for `word` and plain `ing` for `##ing`."""
    if tokens.unknown is None:
        raise TokenizerError(f"{KEY}unknown_token_id is missing; a WordPiece vocabulary needs it")
    respelled = [_respell(text, token in tokens.types) for token, text in enumerate(tokens.texts)]
    ids = dict(zip(respelled, range(len(respelled)), strict=True))
    if len(ids) != len(respelled):
        raise TokenizerError(f"{KEY}tokens holds a word twice; the file is damaged")
    # The file has no flag for lower-casing.
    cased = any("A" <= text[1:2] <= "Z" for text in tokens.texts if text.startswith(SPACE))
    return _Parts(
        model=models.WordPiece(ids, unk_token=tokens.texts[tokens.unknown], max_input_chars_per_word=100),
        spelling="wordpiece",
        normalizer=normalizers.BertNormalizer(lowercase=not cased),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        add_bos=True,
        add_end=True,
        strip_space=True,
        between=1,
    )


def _unigram(tokens: _Tokens, metadata: _Metadata) -> _Parts:
    """SentencePiece Unigram (T5, XLM-R): the most probable sequence of pieces. XLM-R puts two end tokens into a pair."""
    scores = metadata.numbers("scores", len(tokens.texts))
    if scores is None or not np.isfinite(scores).all():
        raise TokenizerError(f"{KEY}scores must be finite numbers; a Unigram vocabulary needs them")
    if tokens.unknown is None:
        raise TokenizerError(f"{KEY}unknown_token_id is missing; a Unigram vocabulary needs it")
    charsmap = metadata.values.get(KEY + "precompiled_charsmap")
    prefix = metadata.flag("add_space_prefix", True)
    trims = metadata.flag("remove_extra_whitespaces", True)
    return _Parts(
        model=_all_ids(tokens, scores),
        spelling="spm",
        normalizer=unigram_normalizer(b"" if charsmap is None else bytes(charsmap), trims),
        pre_tokenizer=without_names(
            unigram_split(prefix), (tokens.texts[token] for token in tokens.of_type(CONTROL, UNKNOWN, UNUSED))
        ),
        add_bos=tokens.bos is not None and tokens.bos != tokens.eos,
        add_end=True,
        strip_space=prefix,
        between=2,
    )


def _all_ids(tokens: _Tokens, scores: np.ndarray) -> models.Unigram:
    """The pieces by id."""
    return models.Unigram(list(zip(tokens.texts, scores.astype(float).tolist(), strict=True)), tokens.unknown)


def _respell(text: str, odd: bool) -> str:
    if text.startswith(SPACE):
        return text[1:]
    # Such as [PAD] or [unused12].
    bracketed = text.startswith("[") and text.endswith("]")
    return text if odd or bracketed else "##" + text


_KINDS: Mapping[str, Callable[[_Tokens, _Metadata], _Parts]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "bert": _word_piece,
    "t5": _unigram,
}


def _templates(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: key `tokenizer.chat_template` is "default", `tokenizer.chat_template.NAME` NAME."""
    templates = {}
    for key in values:
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}."):
            if not isinstance(template := values[key], str):
                raise TokenizerError(f"{key} must be text, not {type(template).__name__}")
            templates[key[len(TEMPLATE) + 1 :] or "default"] = template
    return templates


def read_gguf(values: Mapping[str, Any]) -> Vocabulary:
    """Read the vocabulary of a GGUF file's metadata. Raises TokenizerError."""
    metadata = _Metadata(values)
    kind = metadata.text("model")
    if kind is None:
        raise TokenizerError(f"{KEY}model is missing; the file carries no tokenizer")
    if kind not in _KINDS:
        raise TokenizerError(f"unknown tokenizer model {kind!r:.40} ({KEY}model); known: {', '.join(_KINDS)}")
    templates = _templates(values)
    tokens = _Tokens.read(metadata, kind)
    with clear_errors("the tokenizer in this file cannot be built"):
        vocabulary = _assemble(_KINDS[kind](tokens, metadata), tokens, metadata, templates)
    if vocabulary.backend.get_vocab_size(with_added_tokens=True) != vocabulary.size:
        raise TokenizerError("the tokenizer in this file cannot be built: its tokens and its model do not fit")
    return vocabulary
