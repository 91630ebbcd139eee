"""What is said of exactness where a model is opened: never more than its back end holds."""

import re

from headrace.cli.options import HelperOptions
from headrace.drafting.methods import METHODS
from headrace.llm import LLM
from headrace.startup.backend import BACKENDS


def test_only_the_native_core_claims_bitwise_results() -> None:
    assert {offer.name: offer.row_invariant for offer in BACKENDS} == {"native": True, "torch": False}


def test_the_docstring_names_every_method_and_both_classes() -> None:
    doc = re.sub(r"\s+", " ", LLM.__doc__ or "")
    (listed,) = re.findall(r"`speculate` \(([^)]*)\)", doc)
    assert set(listed.split(", ")) == {*METHODS, "None"}
    assert "bitwise on the native core, near-tie-exact in torch" in doc


def test_the_help_claims_no_more() -> None:
    (option,) = HelperOptions.__dataclass_fields__["speculate"].type.__metadata__
    text = option.help
    assert "in torch near ties" in text
    assert "--verification rejection" in text
