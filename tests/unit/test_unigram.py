"""Unigram vocabularies (T5, XLM-R) of GGUF files and folders equal those of `tokenizers`; broken ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.text.content_marks import MARK
from headrace.text.tokenizer import Tokenizer as Ours
from headrace.text.tokenizer import TokenizerError
from tests.unit.vocabularies import CONTROL, NORMAL, TEXTS, UNKNOWN, USER_DEFINED

WORDS = ["▁", "▁the", "▁wheel", "▁wheels", "water", "▁wa", "ter", "s", "水", "水轮", "轮", "。", "ﬁ", *"abcdefhilnortw"]
PIECES = ["<s>", "<pad>", "</s>", "<unk>", *WORDS, "<mask>"]
SCORES = [0.0] * 4 + [-2.0 - 0.37 * number for number in range(len(WORDS))] + [0.0]
TYPES = [CONTROL] * 3 + [UNKNOWN] + [NORMAL] * len(WORDS) + [CONTROL]


def xlm_r(**changes: Any) -> dict[str, Any]:
    """Metadata of the vocabulary, as llama.cpp's converter writes XLM-R's."""
    metadata = {
        "model": "t5",
        "pre": "default",
        "tokens": PIECES,
        "scores": np.array(SCORES, np.float32),
        "token_type": np.array(TYPES, np.int32),
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "seperator_token_id": 2,
        "padding_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items() if value is not None}


def oracle(trims: bool = True, prefix: bool = True) -> Tokenizer:
    """The same as XLM-R's tokenizer.json has it."""
    backend = Tokenizer(models.Unigram(list(zip(PIECES, np.float32(SCORES).tolist(), strict=True)), 3))
    if trims:
        backend.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<mask>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


SPELLED = "a</s>b<mask>"
OURS, THEIRS = Ours.from_gguf(xlm_r()), oracle()


@given(st.one_of(st.sampled_from(TEXTS), st.text(st.sampled_from("the wheels water水轮。 abxﬁ")), st.text()))
def test_texts_are_cut_as_by_tokenizers(text: str) -> None:
    assert OURS.encode(text) == THEIRS.encode(text).ids


def test_spaces_follow_the_flags_of_the_file() -> None:
    for flags in ({"add_space_prefix": False}, {"remove_extra_whitespaces": False}):
        ours = Ours.from_gguf(xlm_r(**flags))
        theirs = oracle(trims="remove_extra_whitespaces" not in flags, prefix="add_space_prefix" not in flags)
        for text in ("the wheels", "the  wheels", "water"):
            assert ours.encode(text) == theirs.encode(text).ids
        assert any(ours.encode(text) != OURS.encode(text) for text in ("the  wheels", "water"))  # control: a flag counts


def test_pairs_have_two_end_tokens_between_them() -> None:
    first, second = (OURS.encode(text, add_special=False) for text in ("the wheel", "water"))
    assert OURS.join_pair(first, second) == THEIRS.encode("the wheel", "water").ids
    assert OURS.join_pair(first, second).count(2) == 3


@pytest.mark.parametrize("container", ["gguf", "folder"])
def test_control_tokens_are_never_pieces_of_a_text(container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scores in the file are the best ones, and a text that spells them has other pieces all the same."""
    THEIRS.decoder = decoders.Metaspace()
    THEIRS.save(str(tmp_path / "tokenizer.json"))

    def read() -> Ours:
        return Ours.from_gguf(xlm_r()) if container == "gguf" else Ours.from_folder(tmp_path)

    def control_ids(tokenizer: Ours) -> set[int]:
        marked = tokenizer.encode(f"a</{MARK}s>b<mas{MARK}k>", add_special=False, marked=True)
        return {0, 1, 2, PIECES.index("<mask>")} & {*tokenizer.encode(SPELLED, add_special=False, parse_special=False), *marked}

    assert not control_ids(read())
    assert 2 in read().encode(SPELLED, add_special=False)
    for module in ("gguf_vocab", "hf_vocab"):
        monkeypatch.setattr(f"headrace.text.{module}.without_names", lambda split, names: split)
    assert control_ids(read())  # control


def test_t5_has_no_begin_token() -> None:
    tokenizer = Ours.from_gguf(xlm_r(bos_token_id=2))
    assert tokenizer.encode("water")[-1] == 2 != tokenizer.encode("water")[0]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no scores": ({"scores": None}, "scores must be finite numbers"),
    "NaN": ({"scores": np.array([np.nan] * len(PIECES), np.float32)}, "scores must be finite numbers"),
    "too few": ({"scores": np.array(SCORES[1:], np.float32)}, "entries for"),
    "no unknown": (
        {"unknown_token_id": None, "tokens": [text.replace("<unk>", "<none>") for text in PIECES], "token_type": None},
        "unknown_token_id is missing",
    ),
    "a damaged table": ({"precompiled_charsmap": np.arange(7, dtype=np.uint8)}, "cannot be built"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_vocabulary_is_refused_in_one_line(what: str) -> None:
    changes, says = BROKEN[what]
    with pytest.raises(TokenizerError, match=says) as error:
        Ours.from_gguf(xlm_r(**changes))
    assert "\n" not in str(error.value)


SLIPS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no prefix": lambda patch: patch.setattr(
        "headrace.text.gguf_vocab.unigram_split", lambda prefix: pre_tokenizers.Metaspace(prepend_scheme="never")
    ),
    "spaces kept": lambda patch: patch.setattr(
        "headrace.text.gguf_vocab.unigram_normalizer", lambda table, trims: normalizers.Sequence([])
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_wrong_step_is_seen(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[slip](monkeypatch)
    wrong = Ours.from_gguf(xlm_r())
    texts = ("the wheel", "  the   wheel ", "water")
    assert any(wrong.encode(text) != THEIRS.encode(text).ids for text in texts)


def test_user_defined_tokens_are_matched_first() -> None:
    types = [*TYPES[:-1], USER_DEFINED]
    tokenizer = Ours.from_gguf(xlm_r(token_type=np.array(types, np.int32)))
    ids = tokenizer.encode("a<mask>b", add_special=False, parse_special=False)
    assert ids.count(PIECES.index("<mask>")) == 1
    assert json.dumps(tokenizer.decode(ids))  # every id has a text
