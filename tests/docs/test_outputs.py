"""The output of commands in the tutorials and the READMEs is what the commands print."""

import tomllib
from pathlib import Path

import pytest

from headrace.weights import catalog
from tests.docs.markdown import ROOT, Page, bad, read
from tests.docs.session import Session, matches, missing_tool, steps
from tests.places import link_model

HERE = Path(__file__).parent
NOT_RUN = [
    (begin, one["reason"])
    for one in tomllib.loads((HERE / "not_run.toml").read_text("utf-8"))["command"]
    for begin in one["begins"]
]
PAGES = [read(path) for path in [*sorted((ROOT / "docs").glob("*/learn/*.md")), ROOT / "README.md", ROOT / "README.zh-CN.md"]]
# Pages that `make test` runs. The others take minutes, or repeat these in Chinese; `make test-slow` runs them.
SHORT = ("en/learn/01", "en/learn/02", "en/learn/06", "README.md")
SESSIONS = [
    pytest.param(page, id=page.name, marks=[] if any(name in page.name for name in SHORT) else [pytest.mark.slow])
    for page in PAGES
    if any(step.command for step in steps(page))
]


@pytest.fixture
def home(page: Page, tmp_path: Path) -> Path:
    """A home of Headrace with the default model and those of the catalog that the commands of the page name."""
    typed = " ".join(step.command for step in steps(page) if is_run(step.command))
    folder = tmp_path / "home"
    for name in catalog.load():
        if name == catalog.DEFAULT or name in typed.split():
            link_model(folder / "models", name)
    return folder


def is_run(command: str) -> bool:
    return not any(command.startswith(begin) for begin, _ in NOT_RUN)


def differences(page: Page, folder: Path, home: Path) -> list[str]:
    """Commands of a page that print something else than the page shows."""
    found = []
    with Session(folder, home) as session:
        for step in steps(page):
            if step.file:
                session.write(step.file, step.expected)
            elif is_run(step.command):
                if tool := missing_tool(step.command):
                    pytest.skip(f"{tool} is not installed")
                printed = session.run(step.command, step.expected)
                if not matches(step.expected, printed):
                    found.append("\n".join([f"{page.name}: $ {step.command}", *printed]))
    return found


@pytest.mark.weights
@pytest.mark.parametrize("page", SESSIONS)
def test_commands_print_the_output_on_the_page(page: Page, tmp_path: Path, home: Path) -> None:
    (tmp_path / "work").mkdir()
    assert differences(page, tmp_path / "work", home) == []


def test_a_page_with_other_output_is_rejected(tmp_path: Path) -> None:
    found = differences(bad("output.md", "docs/en/learn/bad.md"), tmp_path, tmp_path)
    assert [one.partition(": ")[2].partition("\n")[0] for one in found] == ["$ echo 6,718", "$ python -c 'print(1)'"]
