"""Byte-level BPE vocabularies that are words by rank without merges (tiktoken, whisper.cpp)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.text.gguf_vocab import CONTROL, KEY, NORMAL, read_gguf
from headrace.text.vocabulary import CHAR_OF_BYTE, TokenizerError, Vocabulary

MAX_WORD = 256  # bytes


def read_ranked(words: Sequence[bytes], controls: Sequence[str], end: str) -> Vocabulary:
    """The vocabulary of words, in the order of their merges, and of the control tokens after them, split as GPT-2 splits text.

    end: the control token that ends a text. Raises TokenizerError if a byte has no word, or two words are equal.
    """
    known = set(words)
    if missing := [byte for byte in range(256) if bytes([byte]) not in known]:
        raise TokenizerError(f"the vocabulary has no word for byte {missing[0]}; the file is damaged, download it again")
    texts = ["".join(CHAR_OF_BYTE[byte] for byte in word) for word in words]
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*texts, *controls],
        "token_type": np.array([NORMAL] * len(words) + [CONTROL] * len(controls), np.int32),
        "merges": [" ".join("".join(CHAR_OF_BYTE[byte] for byte in part) for part in pair) for pair in merges(words)],
        "eos_token_id": len(words) + list(controls).index(end),
    }
    return read_gguf({KEY + key: value for key, value in metadata.items()})


def merges(words: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The merges of a vocabulary, from its words by rank: each word is what the words before it merge to, and one more merge.

    Words that cannot be reached so have no merge. Raises TokenizerError for a word of more than 256 bytes.
    """
    ranks = {word: rank for rank, word in enumerate(words)}
    found = []
    for rank, word in enumerate(words):
        if len(word) > MAX_WORD:
            raise TokenizerError(f"the vocabulary has a word of {len(word)} bytes, and {MAX_WORD} is the most")
        # Words before this one that make it up. If there are several pairs, the order of the merges decides.
        cuts = [at for at in range(1, len(word)) if ranks.get(word[:at], rank) < rank and ranks.get(word[at:], rank) < rank]
        parts = [word[: cuts[0]], word[cuts[0] :]] if len(cuts) == 1 else _split(word, ranks, rank) if cuts else []
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def _split(word: bytes, ranks: Mapping[bytes, int], below: int) -> list[bytes]:
    """The parts of a word after all merges into words of ranks below a bound, lowest rank first."""
    parts = [word[at : at + 1] for at in range(len(word))]
    while len(parts) > 2:
        rank, at = min((ranks.get(parts[at] + parts[at + 1], below), at) for at in range(len(parts) - 1))
        if rank >= below:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
