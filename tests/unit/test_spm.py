"""SentencePiece files: read as they were trained, and hostile until checked."""

import json
import random
from pathlib import Path

import pytest

from headrace.text import sentencepiece as spm
from headrace.text.tokenizer import Tokenizer, TokenizerError
from headrace.text.vocabulary import clear_errors
from tests.tiny_sources import WORDS, field, pieces, spm_bytes, write_tiny_marian


def cut(data: bytes, text: str) -> list[str]:
    found: list[str] = spm.unigram_tokenizer(spm.parse(data)).encode(text, add_special_tokens=False).tokens
    return found


def test_texts_are_cut_by_the_likeliest_pieces() -> None:
    """Scores are log-probabilities: the sum decides, not the longest piece."""
    known = [
        ("<unk>", 0.0, 2),
        ("▁", -3.0, 1),
        ("a", -4.0, 1),
        ("b", -4.0, 1),
        ("ab", -5.0, 1),
        ("▁ab", -9.0, 1),
        ("bb", -20.0, 1),
    ]
    assert cut(spm_bytes(known), "ab") == ["▁", "ab"]
    assert cut(spm_bytes([*known, ("▁a", -1.0, 1)]), "ab") == ["▁a", "b"]
    assert cut(spm_bytes(known), "abb") == ["▁", "ab", "b"]
    assert cut(spm_bytes(known), "a日本b") == ["▁", "a", "日本", "b"], "what is unknown is one piece"


def test_spaces_follow_the_settings_of_the_file() -> None:
    assert cut(spm_bytes(pieces()), "  a   dog ") == ["▁a", "▁dog"]
    assert cut(spm_bytes(pieces(), dummy_prefix=0), "a dog") == ["a", "▁dog"]
    assert cut(spm_bytes(pieces(), extra_spaces=0), "a  dog") == ["▁a", "▁", "▁dog"]


def test_control_tokens_are_not_pieces_and_user_tokens_have_priority() -> None:
    letters = [(letter, -6.0, 1) for letter in "</s>ab"]
    known = [("<unk>", 0.0, 2), ("</s>", 0.0, 3), ("▁", -1.0, 1), *dict.fromkeys(letters)]
    assert cut(spm_bytes(known), "a</s>b") == ["▁", "a", "<", "/", "s", ">", "b"]
    assert cut(spm_bytes([*known, ("s>b", -1000.0, 4)]), "a</s>b") == ["▁", "a", "<", "/", "s>b"]


def test_ids_equal_those_of_the_vocabulary_and_texts_round_trip(tmp_path: Path) -> None:
    folder = write_tiny_marian(tmp_path / "marian")
    ids, known = json.loads((folder / "vocab.json").read_text()), Tokenizer.from_folder(folder)
    assert known.encode("a dog runs") == [ids["▁a"], ids["▁dog"], ids["▁runs"], ids["</s>"]]
    assert known.encode(">>fra<< a", add_special=False) == [ids[">>fra<<"], ids["▁a"]]
    assert known.encode("日 </s>", add_special=False)[:2] == [ids["▁"], ids["<unk>"]]
    assert ids["</s>"] not in known.encode("</s>", add_special=False)
    assert known.encode("") == known.encode("  ") == [ids["</s>"]]
    text = " ".join(WORDS)
    assert known.decode(known.encode(text)) == text
    assert known.eos_ids == {ids["</s>"]}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("vocab.json", b"{", "cannot be read"),
        ("vocab.json", b'["a"]', "must say the id"),
        ("vocab.json", b'{"</s>": 0, "<pad>": 1, "<unk>": 1}', "each once"),
        ("vocab.json", b'{"</s>": 0, "<pad>": 1}', "has no <unk>"),
        ("source.spm", b"\xff" * 20, "is not a readable SentencePiece file"),
        ("source.spm", spm_bytes(pieces(), model_type=2), "is not a unigram model"),
        ("source.spm", spm_bytes(pieces()[1:]), "one piece of the type UNKNOWN"),
        ("source.spm", spm_bytes([*pieces(), ("x" * 300, 0.0, 1)]), "300 characters"),
        ("source.spm", spm_bytes([*pieces(), ("x", float("nan"), 1)]), "is not finite"),
        ("source.spm", field(1, field(1, b"\xff")), "not UTF-8"),
        ("source.spm", field(1, 7), "a number in place of"),
        ("source.spm", spm_bytes(pieces(), charsmap=b"\xff\xff\xff\x7f"), "cannot be used"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    folder = write_tiny_marian(tmp_path / "marian")
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=said) as refusal:
        Tokenizer.from_folder(folder)
    assert "\n" not in str(refusal.value)


def test_no_bytes_bring_it_down() -> None:
    """Cut short, changed and spliced: read, or refused as what it is."""
    whole, rng, refused = spm_bytes(pieces(), charsmap=b"", dummy_prefix=1), random.Random(4), 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        kept = bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        try:
            backend = spm.unigram_tokenizer(spm.parse(kept))
            with clear_errors("this text cannot be encoded"):
                backend.encode("a dog runs 日 on  the grass")
        except TokenizerError:
            refused += 1
    assert 100 < refused < 400
