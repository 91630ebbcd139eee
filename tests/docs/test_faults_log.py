"""The tests that docs/log/faults.md and docs/log/compression.md name exist."""

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests.docs.markdown import DOCS, ROOT

NAMED = re.compile(r"(?<![\w/])(test_\w+|\w+_test\.cpp)?(?:::(test_\w+)(…)?)?(?: \((\d+)\))?")


@cache
def files_with_tests() -> dict[str, set[str]]:
    """Test functions by the name of their file, without its folder and suffix."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("*test*"):
        if path.suffix in (".py", ".cpp"):
            name = path.stem if path.suffix == ".py" else path.name
            found[name].update(re.findall(r"def (test_\w+)", path.read_text("utf-8")))
    return found


def absent(text: str) -> Iterator[str]:
    """Tests in the last columns of tables that do not exist. `::test_x` without a file belongs to the file before it; a name
    that ends in … is the beginning of one; `(4)` is the least number of tests in the file."""
    for row in text.splitlines():
        file = ""
        for match in NAMED.finditer(row) if row.startswith("|") else ():
            file, name, rest, count = match[1] or file, match[2], match[3], match[4]
            if not (match[1] or name):
                continue
            names = files_with_tests().get(file)
            if names is None:
                yield f"{file}: no such file"
            elif name and not any(one.startswith(name) if rest else one == name for one in names):
                yield f"{file}::{name}: no such test"
            elif count and len(names) < int(count):
                yield f"{file}: fewer than {count} tests"


@pytest.mark.parametrize("page", ["faults", "compression"])
def test_the_tests_of_the_log_exist(page: str) -> None:
    assert list(absent((DOCS / f"log/{page}.md").read_text("utf-8"))) == []


def test_absent_tests_are_noticed() -> None:
    row = "| x | test_nowhere, test_links::test_no_such, ::test_neither…, test_links (99), no_test.cpp |"
    assert len(list(absent(row))) == 5
    assert list(absent("| x | test_links::test_links_lead…, test_words (2), threads_test.cpp |")) == []
