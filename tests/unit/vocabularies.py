"""Small vocabularies the tests make themselves, as the metadata a GGUF file would hold, and where the real data lies."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ROOT = Path(__file__).parents[2]
MODELS = Path(os.environ.get("HEADRACE_TEST_MODELS", Path.home() / ".cache/headrace-test-models"))
DATA = Path(os.environ.get("HEADRACE_TEST_DATA", ROOT.parent / "shared" / "data"))

CORPUS = [
    "The water in the headrace turns the wheel, and the wheel turns the stones.",
    "it's what they'll say: we've seen 1234 wheels, I'm sure! (normal) <b>bold</b>",
    "水渠里的水推动水轮，水轮推动磨盘。今天天气很好，我们去看水车。",
    "停止。请继续，不要停止！模型说：你好，世界。🚀🦙 Äpfel naïve café",
] * 3
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "  two  spaces ",
    "\n\n\ttabs\r\n",
    "水",
    "🦙👩‍👩‍👧‍👦🇩🇪",
    "e\u0301 ff\ufb01 \u200b\xa0",
    "0123456789 ²½ ٣",
    "''''```''`'S 'RE I'Ve",
    "\x00\x7f\x80",
]


def data_file(name: str) -> Path:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {DATA} (HEADRACE_TEST_DATA)")
    return path


def model_file(name: str) -> Path:
    path = MODELS / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {MODELS} (HEADRACE_TEST_MODELS)")
    return path


@cache
def trained_byte_level() -> Backend:
    """A byte-level BPE of 400 tokens, trained here: the oracle of the GGUF form below."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=specials, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary: 400 trained tokens, one user-defined, one padding."""
    state = backend_model(trained_byte_level())
    tokens = [*sorted(state["vocab"], key=state["vocab"].__getitem__), "<think>", "[PAD0]"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 5) + [USER_DEFINED, UNUSED]
    return _with(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
            "tokenizer.ggml.eos_token_id": 0,
        },
        changes,
    )


def sentence_piece(**changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: bytes, then pieces with falling scores, then two user-defined ones."""
    words = [
        "▁",
        "▁t",
        "▁the",
        "he",
        "▁wheel",
        "▁w",
        "ee",
        "el",
        "eel",
        "水",
        "水轮",
        "推",
        "动",
        "推动",
        "。",
        "▁水",
        "t",
        "h",
        "e",
    ]
    words += ["w", "l", "in", "i", "n", "▁in", "▁▁", "s", "a", "r", "o", "heel", "轮"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<start_of_turn>", "\n\n"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words) + [CONTROL, USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [0.0, 0.0]
    return _with(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.scores": np.array(scores, np.float32),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        },
        changes,
    )


def word_piece(**changes: Any) -> dict[str, Any]:
    """Metadata of a WordPiece vocabulary, spelled as GGUF does: ▁ before a word, nothing before a continuation."""
    words = ["▁the", "▁water", "▁wheel", "s", "▁turn", "ing", "▁.", "▁,", "▁水", "▁轮", "▁cafe", "▁a", "b", "▁'", "▁s"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[unused0]", *words]
    return _with(
        {
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([3, 3, 3, 3] + [1] * (len(tokens) - 4), np.int32),
            "tokenizer.ggml.unknown_token_id": 1,
            "tokenizer.ggml.cls_token_id": 2,
            "tokenizer.ggml.seperator_token_id": 3,
        },
        changes,
    )


KINDS = {"bytes": byte_level, "spm": sentence_piece, "wordpiece": word_piece}


def backend_model(backend: Backend) -> dict[str, Any]:
    """The vocabulary and merges inside a `tokenizers` tokenizer."""
    return json.loads(backend.to_str())["model"]


def _with(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Change keys (`merges=…` is tokenizer.ggml.merges); None removes one."""
    for name, value in changes.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if value is None:
            metadata.pop(key, None)
        else:
            metadata[key] = value
    return metadata
