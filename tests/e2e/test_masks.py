"""Masks against maskbench: nothing that fits is refused, nothing else is accepted. A part of it here, all of it when slow."""

import json
from pathlib import Path

import pytest

from benchmarks.masks import MaskResult, main, measure_masks
from headrace.decoding.json_schema.prepare import Prepared
from headrace.text.tokenizer import Tokenizer
from tests.places import data_path
from tests.tiny_files import write_tiny_gguf
from tests.unit.vocabularies import byte_level

CASES = [
    {
        "id": "own",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}}, "required": ["b"]},
        "tests": [
            {"valid": True, "data": {"b": "x", "a": 1}},
            {"valid": False, "data": {"a": 1}},
            {"valid": False, "data": []},
        ],
    },
    {
        "id": "late",
        "schema": {"type": "array", "uniqueItems": True},
        "tests": [{"valid": True, "data": [1, 2]}, {"valid": False, "data": [1, 1]}],
    },
    {"id": "not served", "schema": {"type": "string", "pattern": "^[a"}, "tests": [{"valid": True, "data": "a"}]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level())


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in CASES))
    return path


def check(result: MaskResult) -> None:
    assert result.wrong == []
    assert (result.refused, result.accepted) == (0, 0)


def test_our_own_cases(own: Path, tokenizer: Tokenizer) -> None:
    result = measure_masks(own, tokenizer)
    check(result)
    assert (result.schemas, result.served, result.alone, result.valid, result.invalid) == (3, 2, 1, 2, 3)


def test_a_mask_that_forgets_a_keyword_is_caught(own: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: schemas are prepared without `required`."""

    def forgetful(schema: dict[str, object], *, closed: bool) -> Prepared:
        return Prepared({key: value for key, value in schema.items() if key != "required"})

    monkeypatch.setattr("headrace.decoding.grammar.prepare", forgetful)
    assert measure_masks(own, tokenizer).wrong == ["own"]


def test_the_command(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    assert main([str(own), "--model", str(model)]) == 0
    assert "2 of 3 (66.7%)" in capsys.readouterr().out


def test_the_first_of_maskbench(tokenizer: Tokenizer) -> None:
    result = measure_masks(data_path("maskbench/maskbench_dev.jsonl"), tokenizer, 60)
    check(result)
    assert result.served >= 0.95 * result.schemas


def test_properties_are_ordered_at_every_depth(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A schema orders `b` before `a` at one place and `a` before `b` at another; names it does not know come last."""
    inner = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "in": inner, "a": {"type": "string"}}}
    data = {"z": 0, "a": "x", "in": {"y": 1, "b": 1, "a": 2}, "b": "x"}
    tests = [{"valid": True, "data": data}, {"valid": False, "data": {**data, "b": 1}}]
    path = tmp_path / "orders.jsonl"
    path.write_text(json.dumps({"id": "orders", "schema": schema, "tests": tests}) + "\n")
    check(measure_masks(path, tokenizer))


@pytest.mark.slow
def test_all_of_maskbench(tokenizer: Tokenizer) -> None:
    result = measure_masks(data_path("maskbench/maskbench_dev.jsonl"), tokenizer)
    check(result)
    assert result.served >= 0.95 * result.schemas
    assert result.alone >= 0.9 * result.schemas
