"""Speculation by name: who drafts, how deep, and what is refused."""

import re

import pytest

from headrace.drafting.base import DraftSource
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.lookahead import Lookahead
from headrace.drafting.methods import METHODS, speculation

DRAFT, SELF, BLOCKS = DraftSource("draft", 1, 1), DraftSource("self", 1), DraftSource("blocks", 1, mask=3)
HEADS, FEATURE = DraftSource("heads", 1, kind="heads", count=3), DraftSource("heads", 1, 1, "feature", 5)


@pytest.mark.parametrize(
    ("method", "given", "names"),
    [
        ("auto", {}, ["ngram"]),
        ("auto", {"source": DRAFT}, ["ngram", "draft"]),
        ("auto", {"source": HEADS}, ["ngram", "heads"]),
        ("auto", {"source": FEATURE}, ["ngram", "heads"]),
        ("heads", {"source": HEADS}, ["heads"]),
        ("heads", {"source": FEATURE}, ["heads"]),
        ("draft", {"source": DRAFT}, ["draft"]),
        ("self", {"source": SELF}, ["self"]),
        ("blocks", {"source": BLOCKS}, ["blocks"]),
        ("ngram", {}, ["ngram"]),
        ("suffix", {}, ["suffix"]),
        ("lookahead", {}, ["lookahead"]),
        ("jacobi", {}, ["jacobi"]),
    ],
)
def test_a_method_name_selects_its_drafters(method: str, given: dict, names: list[str]) -> None:
    made = speculation(method, True, 1000, 4, **given)
    assert made is not None
    assert [drafter.name for drafter in made.drafters] == names
    assert (made.gamma, made.max_model_len) == (4, 1000)


def test_drafters_use_their_kv_group() -> None:
    """A draft model has its own K/V, a part of the target uses the target's; a feature layer keeps nothing of a chain."""
    kept = {}
    for method, given in (("draft", {"source": DRAFT}), ("self", {"source": SELF}), ("heads", {"source": FEATURE})):
        made = speculation(method, True, 1000, **given)
        assert made is not None
        (drafter,) = made.drafters
        assert isinstance(drafter, DraftModel)
        kept[method] = drafter.group, drafter.keeps
    assert kept == {"draft": (1, True), "self": (None, True), "heads": (1, False)}


@pytest.mark.parametrize(("most", "length"), [(None, 5), (1, 2), (3, 4), (4, 5), (16, 5)])
def test_lookahead_depth_is_bounded_by_the_draft_depth(most: int | None, length: int) -> None:
    made = speculation("lookahead", True, 1000, most)
    assert made is not None
    (drafter,) = made.drafters
    assert isinstance(drafter, Lookahead)
    assert drafter.length == length


@pytest.mark.parametrize("method", [None, "off", "none"])
def test_off_is_off(method: str | None) -> None:
    assert speculation(method, True, 1000) is None


def test_auto_drafts_only_if_exact_or_given_a_source() -> None:
    assert speculation("auto", False, 1000) is None
    assert speculation("auto", False, 1000, source=DRAFT) is not None
    assert speculation("auto", False, 1000, source=HEADS) is not None
    assert speculation("ngram", False, 1000) is not None


@pytest.mark.parametrize(
    ("method", "more", "message"),
    [
        ("off", {"source": DRAFT}, "a draft model was given and speculation is off; leave one of the two out"),
        (None, {"source": HEADS}, "trained heads were given and speculation is off; leave one of the two out"),
        ("guess", {}, f"unknown speculation 'guess'; use {', '.join(METHODS)} or off"),
        ("ngram", {"draft_tokens": 0}, "draft_tokens must be between 1 and 16, not 0"),
        ("ngram", {"draft_tokens": 17}, "draft_tokens must be between 1 and 16, not 17"),
        ("draft", {}, "speculation by a draft model needs one; name it with draft (--draft)"),
        ("heads", {}, "speculation by heads needs trained ones; name their folder with draft (--draft)"),
        ("suffix", {"source": DRAFT}, "a draft model was given and suffix does not use that; choose auto or draft"),
        (
            "draft",
            {"source": HEADS},
            "trained heads were given and draft does not use that; choose auto or heads",
        ),
    ],
)
def test_conflicting_settings_are_refused(method: str | None, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        speculation(method, True, 1000, **more)
