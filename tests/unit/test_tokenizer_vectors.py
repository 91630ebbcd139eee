"""Four public vocabularies and the ids their models' own tokenizers give 47 texts: all 47 must be equal, each.

The last text is the empty one, whose line of ids the files leave out.
"""

import pytest

from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from tests.unit.vocabularies import data_file

VOCABULARIES = ["bert-bge", "gpt-2", "llama-spm", "qwen2"]
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_47_of_47(name: str) -> None:
    path = data_file(f"tokenizer_vectors/ggml-vocab-{name}.gguf")
    with GGUFFile(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split(SEPARATOR)
    wanted = [[int(token) for token in line.split()] for line in path.with_name(path.name + ".out").read_text().splitlines()]
    wanted.append([])
    assert len(texts) == len(wanted) == 47
    for text, want in zip(texts, wanted, strict=True):
        assert tokenizer.encode(text, add_special=False) == want, text
        assert tokenizer.encode(text, add_special=False, parse_special=False) == want, text
        if name != "bert-bge":  # WordPiece drops case, accents and spaces
            assert tokenizer.decode(want) == text
