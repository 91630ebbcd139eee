"""The vocabulary of a Marian folder: `source.spm` splits texts into pieces, `vocab.json` maps pieces to ids.

A text for a multilingual model begins with a token for the target language, such as `>>fra<<`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from headrace.text import sentencepiece
from headrace.text.vocabulary import TokenizerError, Vocabulary, clear_errors

SOURCE, IDS = "source.spm", "vocab.json"
MAX_BYTES = 64 << 20
LANGUAGE = re.compile(r">>[^\s<>]{1,32}<<")
END, PADDING, UNKNOWN = "</s>", "<pad>", "<unk>"


@dataclass(frozen=True, slots=True)
class Encoded:
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Backend:
    """The part of the `tokenizers.Tokenizer` interface that Headrace uses, with ids of its own.

    Looks pieces up by text, since the ids of vocab.json are not those of source.spm. Control tokens are never part of a text.
    """

    splitter: tokenizers.Tokenizer
    ids: Mapping[str, int]
    texts: Mapping[int, str]
    control: frozenset[int]

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = False) -> list[Encoded]:
        return [Encoded(self._encode(text)) for text in texts]

    def _encode(self, text: str) -> list[int]:
        tag = LANGUAGE.match(text)
        language = [] if tag is None or tag[0] not in self.ids else [self.ids[tag[0]]]
        rest = text[tag.end() :] if tag is not None and language else text
        if not rest.strip():
            return language
        (encoded,) = self.splitter.encode_batch([rest], add_special_tokens=False)
        unknown = self.ids[UNKNOWN]
        ids = (self.ids.get(piece, unknown) for piece in encoded.tokens)
        return language + [unknown if token in self.control else token for token in ids]

    def id_to_token(self, token: int) -> str | None:
        return self.texts.get(token)

    def token_to_id(self, text: str) -> int | None:
        return self.ids.get(text)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)


def is_marian(folder: Path) -> bool:
    return (folder / SOURCE).is_file() and (folder / IDS).is_file()


def read_marian(folder: Path) -> Vocabulary:
    """Read the vocabulary of a Marian folder. Raises TokenizerError."""
    ids = _ids(folder / IDS)
    for name in (END, PADDING, UNKNOWN):
        if name not in ids:
            raise TokenizerError(f"{folder / IDS} has no {name}; use the folder as the model was published")
    special = frozenset(ids[name] for name in (END, PADDING, UNKNOWN))
    languages = frozenset(token for text, token in ids.items() if LANGUAGE.fullmatch(text))
    backend = Backend(
        sentencepiece.unigram_tokenizer(sentencepiece.read(folder / SOURCE)),
        ids,
        {token: text for text, token in ids.items()},
        special,
    )
    return Vocabulary(
        backend=backend,
        plain=lambda: backend,
        unmarking=lambda: backend,
        size=len(ids),
        spelling="spm",
        literal_ids=special | languages,
        special_ids=special | languages,
        silent_ids=frozenset(),
        prefix=(),
        suffix=(ids[END],),
        strip_space=True,
        bos_id=None,
        eos_id=ids[END],
        eos_ids=frozenset((ids[END],)),
        templates={},
    )


def _ids(path: Path) -> dict[str, int]:
    """Read the ids by piece. Raises TokenizerError unless they are 0 … n − 1, each once."""
    with clear_errors(f"{path} cannot be read"):
        if path.stat().st_size > MAX_BYTES:
            raise TokenizerError(f"{path} is larger than {MAX_BYTES >> 20} MiB; the file is damaged")
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not all(type(token) is int for token in values.values()):
        raise TokenizerError(f"{path} must say the id of each piece")
    if sorted(values.values()) != list(range(len(values))):
        raise TokenizerError(f"{path} must have the ids 0 to {len(values) - 1}, each once")
    return values
