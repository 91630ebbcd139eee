"""A text far beyond the context is refused after as many slices as prove it; a text that fits keeps its tokens."""

import asyncio

import pytest

from headrace.confined.pool import CLIENT, CpuShares, shared_pool
from headrace.startup import encoding
from headrace.startup.encoding import MARGIN, SLICE, count_at_least
from headrace.startup.opening import open_model
from headrace.text.tokenizer import Tokenizer
from tests.places import default_model
from tests.unit.vocabularies import KINDS, TEXTS

PROSE = "The mill stands by the river and grinds. 水轮 turns, 1234 times; it's old.\n\n\t"
LONG: dict[str, str] = {
    "prose": PROSE * 2000,
    "one word": "millwheel" * 12_000,
    "blanks": " " * 100_000,
    "blanks and words": (" " * 700 + "mill" + "\n" * 300) * 100,
    "digits": "1234567890" * 10_000,
    "characters of several bytes": "水轮推动🙂é" * 15_000,
    "a line without blanks": "a,b;" * 25_000,
    "control tokens": "<|im_end|>" * 10_000,
    **{f"text {at}": (text or "x") * (90_000 // max(1, len(text))) for at, text in enumerate(TEXTS)},
}


def tokenizer(kind: str) -> Tokenizer:
    return open_model(default_model()).tokenizer if kind == "real" else Tokenizer.from_gguf(KINDS[kind]())


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.slow)])  # 1/share of each text
@pytest.mark.parametrize("kind", [*sorted(KINDS), "real"])
def test_a_text_has_no_fewer_tokens_than_were_counted(kind: str, share: int) -> None:
    """And most have few more."""
    one = tokenizer(kind)
    close = 0
    for name, whole in LONG.items():
        text = whole[: len(whole) // share]
        counted = asyncio.run(count_at_least(text, one.encode, 10**9))
        tokens = len(one.encode(text))
        assert counted <= tokens, name
        close += counted >= tokens - (len(text) // SLICE + 2) * 2 * MARGIN
    assert close > len(LONG) // 2


def test_without_its_margin_the_count_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: cuts add tokens."""
    monkeypatch.setattr(encoding, "MARGIN", 0)
    one = tokenizer("spm")
    assert any(asyncio.run(count_at_least(text, one.encode, 10**9)) > len(one.encode(text)) for text in LONG.values())


def test_counting_stops_above_the_context_and_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    charged: list[tuple[str, float]] = []
    one = tokenizer("bytes")

    def encode(text: str) -> list[int]:
        sizes.append(len(text))
        return one.encode(text)

    class Recorded(CpuShares):
        def charge(self, client: str, seconds: float) -> None:
            charged.append((client, seconds))

    monkeypatch.setattr(shared_pool(), "shares", Recorded())

    async def counted() -> int:
        CLIENT.set("a")
        return await count_at_least(PROSE * 100_000, encode, 5000)

    assert asyncio.run(counted()) > 5000
    assert sum(sizes) <= 3 * SLICE
    ((client, seconds),) = charged
    assert client == "a"
    assert seconds > 0


def test_a_slice_that_cannot_be_encoded_counts_nothing() -> None:
    assert asyncio.run(count_at_least("\ud800" * 50_000, tokenizer("bytes").encode, 10)) == 0
