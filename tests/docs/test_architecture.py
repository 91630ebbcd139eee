"""The architecture page: its lists are up to date and name what the code has; its picture shows each package at its level."""

import re

from headrace.data import plan, types
from tests import architecture
from tests.pages import DOCS, generated, page_of, stale, written
from tests.unit.test_imports import FLOORS, SOURCES

PAGE = page_of("packages").read_text("utf-8")
PACKAGE = DOCS.parent / "src/headrace"


def test_the_page_equals_the_generated_text() -> None:
    for part in ("packages", "types", "interfaces"):
        assert written(part) == generated(part), stale(part)


def test_the_page_shows_every_package_at_its_level() -> None:
    assert len(PAGE.splitlines()) <= 250
    entries = {path.name for path in PACKAGE.iterdir() if path.name[0] not in "._" and path.suffix in ("", ".py")}
    assert {"llm.py", "kv", "drafting"} <= entries
    assert sorted(entries - set(architecture.DATA["package"])) == []
    picture = PAGE.split("```")[1].splitlines()
    rows = {name: row for row, line in enumerate(picture) for name in re.split(r" {5,}", line)[0].split()}
    tops = {name.partition(".")[0] for name in FLOORS if name} - {"__main__"}
    levels = {top: min(FLOORS[name] for name in FLOORS if name in (top, f"{top}.eager")) for top in tops}
    shown = sorted(levels, key=lambda name: rows[name], reverse=True)
    assert [levels[name] for name in shown] == sorted(levels.values())
    assert len({(rows[name], levels[name]) for name in levels}) == len(set(levels.values()))


def has_method(kind: str, method: str) -> bool:
    return any(f"class {kind}" in source and f"def {method}(" in source for source in SOURCES.values())


def test_the_methods_and_types_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([A-Z][A-Za-z]+)\.(\w+)", PAGE))
    assert len(named) > 12
    assert [f"{kind}.{method}" for kind, method in sorted(named) if not has_method(kind, method)] == []
    names = {name for one in architecture.DATA["type"] for name in one["names"]}
    assert len(names) > 20
    assert [name for name in names if not hasattr(plan, name) and not hasattr(types, name)] == []
    interfaces = [(one["name"], method) for one in architecture.DATA["interface"] for method in one["methods"]]
    assert len(interfaces) > 15
    assert [f"{kind}.{method}" for kind, method in interfaces if not has_method(kind, method)] == []
