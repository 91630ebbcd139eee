"""Six public vocabularies and the ids given with them for 47 or 51 texts: all must be equal.

The last text is the empty one, whose line of ids the files leave out.
"""

import pytest
import transformers
from tokenizers import normalizers

from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from tests.unit.vocabularies import data_file

TEXTS = {"bert-bge": 47, "falcon": 47, "gpt-2": 47, "llama-spm": 47, "qwen2": 47, "qwen35": 51}
SEPARATOR = "\n__ggml_vocab_test__\n"
# Qwen 3.5 composes letters before it splits (NFC); the ids given with these three are those of the letters as they stand.
NOT_COMPOSED = ("e\u0301", "re\u0301sume\u0301", "a\u0300" * 200)


def vectors(name: str) -> tuple[Tokenizer, list[tuple[str, list[int]]]]:
    """A vocabulary, and each text with its ids."""
    path = data_file(f"tokenizer_vectors/ggml-vocab-{name}.gguf")
    with GGUFFile(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split(SEPARATOR)
    wanted = [[int(token) for token in line.split()] for line in path.with_name(path.name + ".out").read_text().splitlines()]
    return tokenizer, list(zip(texts, [*wanted, []], strict=True))


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_all_of_them(name: str) -> None:
    tokenizer, pairs = vectors(name)
    assert len(pairs) == TEXTS[name]
    for text, want in pairs:
        if text in NOT_COMPOSED:
            continue
        assert tokenizer.encode(text, add_special=False) == want, text
        assert tokenizer.encode(text, add_special=False, parse_special=False) == want, text
        if name != "bert-bge":  # WordPiece drops case, accents and spaces
            assert tokenizer.decode(want) == text


def test_letters_are_composed_like_the_tokenizer_of_the_model() -> None:
    tokenizer, pairs = vectors("qwen35")
    with GGUFFile(data_file("tokenizer_vectors/ggml-vocab-qwen35.gguf")) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"].tolist()
        merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"].tolist()]
    oracle = transformers.Qwen3_5Tokenizer(vocab=dict(zip(tokens, range(len(tokens)), strict=True)), merges=merges)
    for text, want in pairs:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == oracle.encode(text, add_special_tokens=False), text
        assert (ids != want) == (text in NOT_COMPOSED)
    oracle.backend_tokenizer.normalizer = normalizers.Sequence([])  # nothing else makes the difference
    assert [oracle.encode(text, add_special_tokens=False) for text, _ in pairs] == [want for _, want in pairs]
