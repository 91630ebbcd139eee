"""What the documents say exists: their links, the tests they name, the environment variables the code reads."""

import ast
import re
from pathlib import Path

import pytest

from headrace import types
from tests.unit.test_imports import LONGER, MAX_FUNCTION, MAX_LINES

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_tests_that_pages_name_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"tests/[\w/]+\.py(?:::\w+)?", page.read_text("utf-8"))}
    assert len(named) > 15
    assert [name for name in sorted(named) if not is_test(name)] == []
    assert not is_test("tests/unit/test_docs.py::test_of_nothing")


def is_test(name: str) -> bool:
    """Whether `path` or `path::function` is a test file, or a function in it."""
    path, _, function = name.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    names = {node.name for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}
    return not function or function in names


def test_every_statement_of_the_seeds_is_answered_once() -> None:
    numbers = [int(number) for number in re.findall(r"^\*\*W(\d+)", (ROOT / "docs/seeds.md").read_text("utf-8"), re.MULTILINE)]
    assert sorted(numbers) == list(range(1, 59))


def test_every_environment_variable_is_documented() -> None:
    sources = [path for folder in ("src", "csrc") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp")]
    pattern = re.compile(r"""(?:getenv\(|environ(?:\.get\(|\[))"(\w+)"(?!\] = )""")
    read = {name for path in sources for name in pattern.findall(path.read_text("utf-8"))}
    assert {"HEADRACE_HOME", "HEADRACE_LOG", "HEADRACE_ISA"} <= read
    page = (ROOT / "docs/environment.md").read_text("utf-8")
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def test_the_plan_of_the_house_is_the_houses() -> None:
    """Every room of src/headrace is in the layout, and what the data are said to hold is a field of theirs."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    layout = page[page.index("## Layout") :]
    rooms = {path.name for path in (ROOT / "src/headrace").iterdir() if path.name[0] not in "._" and path.suffix in ("", ".py")}
    assert {"llm.py", "kv", "drafting"} <= rooms
    assert [name for name in sorted(rooms) if not re.search(rf"\b{re.escape(name)}\b", layout)] == []
    data = page[page.index("## Data") : page.index("## Interfaces")]
    wrong = []
    for name, text in re.findall(r"^([A-Z]\w+) +(.*(?:\n {8,}.*)*)", data[: data.rindex("```")], re.MULTILINE):
        fields = set(dir(getattr(types, name))) | set(getattr(types, name).__annotations__)
        said = re.split(r" {3,}", text.replace("\n            ", " "))[0]
        said = re.sub(r"\([^)]*\)|\[\w\]", "", said).partition(":")[0]
        named = [re.match(r" *(\w*)", part)[1] for part in re.split(r" · |, (?=\w+ ·)", said)]  # type: ignore[index]
        wrong += [f"{name}: {one}" for one in named if one and one not in fields]
    assert wrong == []


def test_both_readmes_show_the_same_code() -> None:
    blocks = [re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL) for name in READMES]
    assert blocks[0] == blocks[1] != []


def test_the_lengths_that_pages_name_are_those_that_are_checked() -> None:
    for name in ("docs/architecture.md", "CONTRIBUTING.md"):
        page = " ".join((ROOT / name).read_text("utf-8").split())
        said = re.search(r"at most (\d+)[ (;a-z]+C\+\+, `engine.py` and `scheduler.py` (\d+)\), functions at most (\d+)", page)
        assert said, name
        assert [int(number) for number in said.groups()] == [MAX_LINES[".py"], MAX_LINES[".cpp"], MAX_FUNCTION]
    assert {Path(name).name: most for name, most in LONGER.items()} == {"engine.py": 500, "scheduler.py": 500}
