"""Size test: counts may fall freely; they rise only with a reason in `sizes.json`, recorded in the same commit."""

import json

import pytest

from tests.house import sizes

HOW = 'python -m tests.house.sizes --raise "REASON"'


def test_no_count_is_above_its_record() -> None:
    counts = sizes.count_all()
    assert sizes.risen(counts, sizes.load()["counts"]) == [], f"make it smaller, or record why not: {HOW}"
    assert sum(value for name, value in counts.items() if name.startswith("tokens of ")) == counts["tokens"]


def test_every_raise_has_a_reason() -> None:
    raised = sizes.load()["raised"]
    assert all(len(entry["reason"].split()) >= 3 and entry["counts"] for entry in raised)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1  # nobody\n", {"tokens": 3, "phrases in Python": 1}),
        ('"""Is told."""\n', {"tokens": 1, "phrases in Python": 1}),
        ("class A:\n    def b(self): ...\n", {"classes": 1, "functions": 1, "tokens": 10}),
        ("x = 'nobody'\n", {"tokens": 3}),
    ],
)
def test_a_source_is_counted(text: str, expected: dict[str, int]) -> None:
    assert +sizes.count_source(text) == expected


def test_an_addition_is_noticed() -> None:
    """Control: one more function with a hard phrase raises four counts, and a new package has no allowance."""
    before = {"tokens": 10, "functions": 1, "phrases in Python": 0}
    added = sizes.count_source('def f():\n    """Is told."""\n')
    after = {name: value + added[name] for name, value in before.items()}
    assert [line.split(":")[0] for line in sizes.risen(after, before)] == ["tokens", "functions", "phrases in Python"]
    assert sizes.risen({"tokens of cloud": 1}, before) == ["tokens of cloud: 1, recorded 0"]


def test_lower_never_raises_and_raise_keeps_the_reason(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "sizes.json"
    monkeypatch.setattr(sizes, "RECORD", record)
    monkeypatch.setattr(sizes, "count_all", lambda: {"files": 5, "tokens": 3})
    record.write_text(json.dumps({"counts": {"files": 4, "tokens": 7, "classes": 2}, "raised": []}))
    assert sizes.main(["--lower"]) == 0
    assert sizes.load() == {"counts": {"files": 4, "tokens": 3}, "raised": []}
    assert sizes.main(["--raise", "a file for each protocol"]) == 0
    assert sizes.load()["counts"] == {"files": 5, "tokens": 3}
    assert sizes.load()["raised"] == [{"reason": "a file for each protocol", "counts": ["files: 5, recorded 4"]}]
    assert sizes.main(["--raise", " "]) == 2
