"""Hypothesis draws the same whatever is loaded and wherever it lies."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.cache import LRUCache
from hypothesis.internal.conjecture import providers

from tests import examples


def drawn() -> list[tuple[int, str]]:
    found = []

    @settings(max_examples=300)
    @given(st.integers(), st.text())
    def draw(number: int, text: str) -> None:
        found.append((number, text))

    draw()
    return found


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of constants, as one more local module."""
    path.write_text(f"NUMBERS = {[7**n for n in range(6, 40)]}\nTEXTS = {[f'mill {n}' for n in range(100)]}\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, path.stem, module)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "CONSTANTS_CACHE", LRUCache(1024))


def test_loaded_modules_change_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    load(tmp_path / "one_more.py", monkeypatch)
    assert drawn() == before


def test_constants_of_loaded_modules_change_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_get_local_constants", examples.THEIRS)
    before = drawn()
    load(tmp_path / "one_more.py", monkeypatch)
    assert drawn() != before


def test_the_constants_of_the_package_are_drawn_from() -> None:
    assert "<|im_end|>" in examples.constants().strings
