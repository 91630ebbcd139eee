"""Streaming text: whatever the cuts, the pieces joined are the whole; nothing given out is ever taken back."""

import codecs
import unicodedata
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.tokenizer import IncrementalDetokenizer, Tokenizer
from headrace.weights.gguf import GGUFFile
from tests.unit.vocabularies import KINDS, TEXTS, data_file

CHINESE = "水渠里的水推动水轮🦙，磨盘转动。👩‍👩‍👧‍👦 naïve"


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_gguf(KINDS[kind]())


def stream(kind: str, ids: list[int], cuts: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    """Pieces for ids cut at these places, the flush last; half-way the state is exchanged for its copy."""
    detokenizer = IncrementalDetokenizer(tokenizer(kind), prompt or [], skip)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = []
    for start, end in pairwise(edges):
        detokenizer = detokenizer.copy()
        pieces.append(detokenizer.append(ids[start:end]))
    return [*pieces, detokenizer.flush()]


IDS = st.lists(st.integers(0, 450), max_size=40)
CUTS = st.lists(st.integers(0, 1000), max_size=12)


@settings(max_examples=500)
@given(st.sampled_from(sorted(KINDS)), IDS, CUTS, st.booleans())
def test_the_pieces_joined_are_the_decoded_whole(kind: str, ids: list[int], cuts: list[int], skip: bool) -> None:
    assert "".join(stream(kind, ids, cuts, skip=skip)) == tokenizer(kind).decode(ids, skip_special=skip)


@settings(max_examples=500)
@given(st.sampled_from(sorted(KINDS)), IDS, IDS, st.booleans())
def test_one_token_at_a_time_is_the_same(kind: str, prompt: list[int], ids: list[int], skip: bool) -> None:
    """What is plain ASCII takes a short way, control tokens and what is pending must not."""
    whole, single = (IncrementalDetokenizer(tokenizer(kind), prompt, skip) for _ in range(2))
    assert [single.push(token) for token in ids] == [whole.append([token]) for token in ids]
    assert single.flush() == whole.flush()


@settings(max_examples=300)
@given(st.sampled_from(["bytes", "spm"]), st.text(max_size=30), CUTS)
def test_real_text_round_trips(kind: str, text: str, cuts: list[int]) -> None:
    ids = tokenizer(kind).encode(text, add_special=False, parse_special=False)
    pieces = stream(kind, ids, cuts)
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@settings(max_examples=500)
@given(st.sampled_from(sorted(KINDS)), IDS, IDS, CUTS, st.booleans())
def test_after_a_prompt_the_pieces_equal_the_added_text(
    kind: str, prompt: list[int], ids: list[int], cuts: list[int], skip: bool
) -> None:
    tok = tokenizer(kind)
    spelled = b"".join(tok.token_bytes(t) for t in prompt if not (skip and t in tok.special_ids))
    if tok.strip_space and spelled.startswith(b" "):
        spelled = spelled[1:]
    whole = "".join(stream(kind, ids, cuts, prompt, skip))
    before = len(codecs.getincrementaldecoder("utf-8")("replace").decode(spelled))  # without a character still open
    assert whole == tok.decode([*prompt, *ids], skip_special=skip)[before:]


def test_a_character_cut_by_tokens_is_held_back() -> None:
    tok = tokenizer("bytes")
    detokenizer = IncrementalDetokenizer(tok)
    byte_ids = [tok.encode(chr(i))[0] for i in range(128)]
    assert detokenizer.append([byte_ids[ord("a")]]) == "a"
    llama = [next(t for t in range(3, tok.vocab_size) if tok.token_bytes(t) == bytes([byte])) for byte in "🦙".encode()]
    assert [detokenizer.append([token]) for token in llama] == ["", "", "", "🦙"]
    assert detokenizer.append(llama[:3]) == ""
    assert detokenizer.append([byte_ids[ord("b")]]) == "\ufffdb"  # it will not be completed: said at once
    assert detokenizer.append(llama[:2]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_prompt_that_ends_inside_a_character_is_completed() -> None:
    tok = tokenizer("spm")
    ids = [tok.id_of(f"<0x{byte:02X}>") or -1 for byte in "轮".encode()]
    detokenizer = IncrementalDetokenizer(tok, [1, *ids[:2]])
    assert detokenizer.append(ids[2:]) == "轮"


def test_leading_spaces() -> None:
    tok = tokenizer("spm")
    the, wheel = tok.id_of("▁the") or -1, tok.id_of("▁wheel") or -1
    assert stream("spm", [the, wheel], [1]) == ["the", " wheel", ""]
    assert stream("spm", [1, the, wheel], [1, 2]) == ["", "the", " wheel", ""]  # after BOS, which shows no text
    assert stream("spm", [1, the], [1], skip=False) == ["<s>", " the", ""]
    assert stream("spm", [wheel], [], prompt=[1, the]) == [" wheel", ""]
    assert stream("spm", [the], [], prompt=[1]) == ["the", ""]
    assert stream("wordpiece", [5, 6], [1], prompt=[]) == ["the", " water", ""]
    assert stream("bytes", tokenizer("bytes").encode(" a"), [])[0] == " a"


def test_forks_do_not_share_state() -> None:
    tok = tokenizer("spm")
    first, *rest = (tok.id_of(f"<0x{byte:02X}>") or -1 for byte in "轮".encode())
    parent = IncrementalDetokenizer(tok)
    parent.append([first])
    child = parent.copy()
    assert child.append(rest) == "轮"
    assert parent.flush() == "\ufffd"
    assert child.flush() == ""


def test_decoding_token_by_token_is_not_enough() -> None:
    """The control: the naive way breaks the very texts used here."""
    for kind, text in (("bytes", CHINESE), ("spm", CHINESE), ("spm", "the wheel")):
        tok = tokenizer(kind)
        ids = tok.encode(text, add_special=False)
        assert "".join(tok.decode([token]) for token in ids) != text
        assert "".join(stream(kind, ids, list(range(len(ids))))) == text


@pytest.mark.parametrize("name", ["qwen2", "llama-spm", "gpt-2"])
def test_real_vocabularies(name: str) -> None:
    with GGUFFile(data_file(f"tokenizer_vectors/ggml-vocab-{name}.gguf")) as file:
        tok = Tokenizer.from_gguf(file.metadata)
    for text in [*TEXTS, CHINESE]:
        text = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        ids = tok.encode(text)
        detokenizer = IncrementalDetokenizer(tok)
        pieces = [detokenizer.append([token]) for token in ids]
        assert "".join(pieces) + detokenizer.flush() == text
        assert not any("\ufffd" in piece for piece in pieces)
