"""The lists of faults, complaints and attacks: up to date, with tests that exist."""

import re

from benchmarks.attacks import attacks
from tests import security
from tests.pages import generated, stale, written
from tests.unit.test_docs import is_test


def test_the_pages_equal_the_generated_text() -> None:
    for part in ("faults", "complaints", "attacks"):
        assert written(part) == generated(part), stale(part)


def test_every_entry_has_texts_and_tests_that_exist() -> None:
    data = security.DATA
    groups = {group["id"] for group in data["group"]}
    assert {one["group"] for one in data["class"]} == groups
    entries = [*data["class"], *data["complaint"], *security.ATTACKS]
    assert len(data["class"]) > 40
    assert len(data["complaint"]) > 15
    assert [one for one in entries if not one["tests"] or not all(is_test(name) for name in one["tests"])] == []
    for one in (*data["class"], *data["complaint"]):
        assert one["title"].strip(), one
        assert one["text"].strip(), one


def test_every_attack_has_its_row() -> None:
    assert len(security.ATTACKS) > 30
    for one in security.ATTACKS:
        assert all(one[name].strip() for name in ("attack", "request", "before", "now")), one
    named = {name for one in security.ATTACKS for name in re.findall(r"`([^`]+)`", one["attack"])}
    assert set(attacks()) - named == set()
