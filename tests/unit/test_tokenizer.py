"""Tokenizers from GGUF metadata: the three kinds, on vocabularies made here, and metadata that is wrong."""

import contextlib
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.text.tokenizer import Tokenizer, TokenizerError
from tests.unit.vocabularies import CONTROL, KINDS, NORMAL, TEXTS, byte_level, sentence_piece, trained_byte_level, word_piece


def make(kind: str, **changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(KINDS[kind](**changes))


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_equals_the_tokenizer_it_was_written_from(text: str) -> None:
    tokenizer, oracle = make("bytes"), trained_byte_level()
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text).ids
    assert tokenizer.decode(ids) == text == oracle.decode(ids)


@settings(max_examples=200)
@given(st.text(max_size=60))
@example("\n\n0")
def test_byte_level_and_sentence_piece_round_trip_any_text(text: str) -> None:
    for kind in ("bytes", "spm"):
        tokenizer = make(kind)
        back = tokenizer.decode(tokenizer.encode(text, parse_special=False))
        assert back == (_spaced_after_user_defined(text) if kind == "spm" else text)


def _spaced_after_user_defined(text: str) -> str:
    """SentencePiece of GGUF files, as llama.cpp reads it: every stretch of text gets its space, so also the one that
    follows a user-defined token (here the two line ends); only the space before the first is dropped again."""
    first, *others = text.split("\n\n")
    return "\n\n".join([first, *((" " + other if other else "") for other in others)])


def best_pair_first(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece BPE as its authors define it: merge the adjacent pair of the best score, the leftmost of equals."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = {t: s for t, s, kind in zip(tokens, metadata["tokenizer.ggml.scores"], types, strict=True) if kind == 1}
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(-scores[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        ids += [tokens.index(part)] if part in scores else [tokens.index(f"<0x{byte:02X}>") for byte in part.encode()]
    return ids


@settings(max_examples=300)
@given(st.text(alphabet="thewlins aro水轮推动。é", max_size=25))
def test_sentence_piece_equals_its_definition(text: str) -> None:
    assert make("spm").encode(text, add_special=False) == best_pair_first(sentence_piece(), text)


def test_sentence_piece_details() -> None:
    tokenizer = make("spm")
    text = tokenizer.token_text
    assert [text(token) for token in tokenizer.encode("the wheel")] == ["<s>", "▁the", "▁wheel"]
    assert [text(token) for token in tokenizer.encode("水é", add_special=False)] == ["▁水", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("  the")) == "  the"
    assert tokenizer.token_bytes(tokenizer.id_of("▁the") or -1) == b" the"
    assert tokenizer.token_bytes(tokenizer.id_of("<0x0A>") or -1) == b"\n"
    # a user-defined token is found in the text whatever surrounds it; a byte's name is only text
    assert tokenizer.id_of("\n\n") in tokenizer.encode("the\n\nwheel", parse_special=False)
    assert tokenizer.id_of("<0x0A>") not in tokenizer.encode("<0x0A>")
    assert "▁" not in [text(token) for token in make("spm", add_space_prefix=False).encode("the")]
    assert make("spm", add_space_prefix=False).decode([tokenizer.id_of("▁the") or -1]) == " the"


def test_word_piece_details() -> None:
    tokenizer = make("wordpiece")
    text = tokenizer.token_text
    ids = tokenizer.encode("The WHEELS, turning. Café 水轮 xyz")
    want = ["[CLS]", "the", "wheel", "##s", ",", "turn", "##ing", ".", "cafe", "水", "轮", "[UNK]", "[SEP]"]
    assert [text(token) for token in ids] == want
    assert tokenizer.decode(ids) == "the wheels, turning. cafe 水 轮"
    assert tokenizer.decode(ids, skip_special=False) == "[CLS] the wheels, turning. cafe 水 轮 [UNK] [SEP]"
    cased = make("wordpiece", tokens=[*word_piece()["tokenizer.ggml.tokens"], "▁The"], token_type=None)
    assert cased.token_text(cased.encode("The", add_special=False)[0]) == "The"


def test_control_tokens() -> None:
    tokenizer = make("bytes")
    start, end, think = (tokenizer.id_of(text) for text in ("<|im_start|>", "<|im_end|>", "<think>"))
    assert tokenizer.eos_ids == {0, end}
    assert tokenizer.special_ids == {0, start, end}
    text = "<|im_start|>a<think><|im_end|>"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-2], ids[-1]) == (start, think, end)
    plain = tokenizer.encode(text, parse_special=False)
    assert not {start, end} & set(plain)
    assert think in plain  # user-defined tokens are text
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special=False) == text == tokenizer.decode(plain)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""  # unused
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""  # a model's padding rows
    assert tokenizer.id_of("no such token") is None


@pytest.mark.parametrize("text", ["<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|observation|>"])
def test_a_control_token_of_a_template_ends_a_turn(text: str) -> None:
    """Qwen, Phi, Gemma, Granite, GLM-4 after a call; the file names another token. Control: the same as a plain token."""
    metadata = byte_level()
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), metadata["tokenizer.ggml.token_type"]
    tokens[1], tokens[2] = "<|start|>", text
    for kind, ends in ((CONTROL, {0, 2}), (NORMAL, {0})):
        types[2] = kind
        made = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
        assert made.eos_ids == ends


def test_special_tokens_are_added_around_a_text() -> None:
    assert make("bytes").encode("a") == make("bytes").encode("a", add_special=False)
    assert make("bytes", add_bos_token=True, bos_token_id=1).encode("a")[0] == 1
    assert make("bytes", add_eos_token=True).encode("a")[-1] == 0
    assert make("bytes", pre="llama-bpe", bos_token_id=1).encode("a")[0] == 1
    assert make("spm").encode("")[0] == 1
    assert make("spm", add_bos_token=False).encode("") == []
    assert (make("spm").bos_token, make("spm").eos_token, make("bytes").bos_token) == ("<s>", "</s>", "")


def test_missing_special_ids_are_read_from_the_vocabulary() -> None:
    tokenizer = make("spm", token_type=None, bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode("水é", add_special=False) == make("spm").encode("水é", add_special=False)


def test_a_missing_pre_tokenizer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert make("bytes", pre=None).decode([40]) is not None
    assert "tokenizer.ggml.pre is missing" in caplog.text


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("bytes", {"model": None}, "model is missing"),
    ("bytes", {"model": 7}, "model must be text"),
    ("bytes", {"model": "rwkv"}, "unknown tokenizer model 'rwkv'"),
    ("bytes", {"pre": "martian"}, "unknown pre-tokenizer 'martian'"),
    ("bytes", {"tokens": None}, "tokens is missing"),
    ("bytes", {"tokens": "abc"}, "tokens must be a list"),
    ("bytes", {"tokens": [1, 2]}, "tokens must hold strings"),
    ("bytes", {"tokens": ["a", "b", "a"], "merges": [], "token_type": None, "eos_token_id": None}, "'a' twice"),
    ("bytes", {"token_type": np.ones(3, np.int32)}, "token_type has 3 entries"),
    ("bytes", {"token_type": np.full(402, 99)}, "token_type must hold"),
    ("bytes", {"token_type": "x"}, "token_type must be a list of numbers"),
    ("bytes", {"merges": None}, "merges is missing"),
    ("bytes", {"merges": ["abc"]}, "merges must hold pairs"),
    ("bytes", {"merges": ["a b c"]}, "merges must hold pairs"),
    ("bytes", {"merges": ["zz qq"]}, "out of vocabulary"),
    ("bytes", {"merges": 5}, "merges must be a list"),
    ("bytes", {"eos_token_id": 402}, "eos_token_id is 402, outside"),
    ("bytes", {"eos_token_id": -1}, "eos_token_id is -1, outside"),
    ("bytes", {"eos_token_id": 1.5}, "eos_token_id must be a token id"),
    ("bytes", {"eot_token_id": 2**40}, "eot_token_id"),
    ("bytes", {"add_bos_token": "yes"}, "add_bos_token must be true or false"),
    ("bytes", {"add_bos_token": True}, "add_bos_token asks for a token"),
    ("bytes", {"chat_template": 3}, "chat_template must be text"),
    ("spm", {"scores": None}, "scores is missing"),
    ("spm", {"scores": np.zeros(3, np.float32)}, "scores has 3 entries"),
    ("spm", {"scores": np.full(293, np.nan, np.float32)}, "scores must be finite"),
    ("spm", {"precompiled_charsmap": np.zeros(4, np.uint8)}, "precompiled_charsmap"),
    ("spm", {"unknown_token_id": 9999}, "outside the vocabulary"),
    ("wordpiece", {"unknown_token_id": 100}, "outside the vocabulary"),
    ("wordpiece", {"tokens": ["▁a", "b"], "token_type": None, "unknown_token_id": None, "cls_token_id": None,
                   "seperator_token_id": None}, "unknown_token_id is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), HOSTILE, ids=[entry[2] for entry in HOSTILE])
def test_wrong_metadata_is_a_one_line_error(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        make(kind, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_a_piece_that_would_take_for_ever_to_cut_is_refused() -> None:
    metadata = sentence_piece()
    metadata["tokenizer.ggml.tokens"][-3] = "ab" * 100_000
    with pytest.raises(TokenizerError, match="200000 characters"):
        Tokenizer.from_gguf(metadata)


def test_text_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        make("bytes").encode("ab\ud800")
    tokens = [text for text in byte_level()["tokenizer.ggml.tokens"] if text != "z"]
    incomplete = Tokenizer.from_gguf(byte_level(tokens=tokens, merges=[], token_type=None))
    assert incomplete.decode(incomplete.encode("abc")) == "abc"
    with pytest.raises(TokenizerError, match=r"cannot spell \'z\' \(U\+007A\)"):
        incomplete.encode("zebra")
    with pytest.raises(TokenizerError, match="negative"):
        incomplete.token_bytes(-1)
    with pytest.raises(TokenizerError, match="no token 99999"):
        incomplete.token_text(99999)


def test_importing_the_text_package_does_not_import_torch() -> None:
    modules = "tokenizer, chat"
    code = f"import sys; from headrace.text import {modules}; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=600)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(), st.text(max_size=5), st.binary(max_size=4),
    st.lists(st.text(max_size=3), max_size=6), st.lists(st.integers(-5, 500), max_size=6),
    st.lists(st.floats(), max_size=4).map(np.array), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip
KEYS = ["tokens", "token_type", "scores", "merges", "pre", "bos_token_id", "eos_token_id", "unknown_token_id", "eot_token_id",
        "cls_token_id", "add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "chat_template"]  # fmt: skip


@settings(max_examples=300)
@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4))
def test_any_metadata_is_read_or_refused(kind: str, changes: dict[str, Any]) -> None:
    with contextlib.suppress(TokenizerError):
        tokenizer = make(kind, **changes)
        tokenizer.decode(range(tokenizer.vocab_size), skip_special=False)
        tokenizer.decode(tokenizer.encode("a <s>", parse_special=False))
