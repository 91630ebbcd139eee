"""What the documents say exists: their links, the tests they name, the environment variables the code reads, models and
number formats, files to touch, prompts; and figures that stand in two places are the same."""

import ast
import hashlib
import re
from functools import cache
from pathlib import Path

import pytest
from benchmarks.attacks import attacks

from headrace.data import plan, types
from headrace.models.families import FAMILIES
from headrace.weights.kinds import KINDS, NOT_GGUF
from tests import parameters
from tests.pages import written
from tests.places import data_path
from tests.unit.test_imports import FLOORS, LONGER, MAX_FUNCTION, MAX_LINES, SOURCES

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


def test_every_case_of_the_first_quarter_names_its_test() -> None:
    page = (ROOT / "docs/first-quarter.md").read_text("utf-8")
    tables = page.partition("## Why one may")[0]
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| ")]
    cases = [row for row in rows if row[0] != "case"]
    assert len(cases) > 40
    assert [row[0] for row in cases if len(row) != 4 or "::test_" not in row[3]] == []


def is_test(name: str) -> bool:
    """Whether `path` or `path::function` is a test file, or a function in it."""
    path, _, function = name.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    return not function or function in functions(file)


@cache
def functions(file: Path) -> set[str]:
    """The names of those of a file. It is parsed once, for all that pages say of it."""
    return {node.name for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_every_statement_of_the_seeds_is_answered_once() -> None:
    numbers = [int(number) for number in re.findall(r"^\*\*W(\d+)", (ROOT / "docs/seeds.md").read_text("utf-8"), re.MULTILINE)]
    assert sorted(numbers) == list(range(1, 59))


def test_every_environment_variable_is_documented() -> None:
    sources = [
        path
        for folder in ("src", "csrc", "tests", "tools")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp")
    ]
    pattern = re.compile(r"""(?:getenv\(|environ(?:\.get\(|\[))"(\w+)"(?!\] = )""")
    read = {name for path in sources for name in pattern.findall(path.read_text("utf-8"))}
    assert {"HEADRACE_HOME", "HEADRACE_LOG", "HEADRACE_ISA", "SOAK_SECONDS"} <= read
    page = (ROOT / "docs/environment.md").read_text("utf-8")
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def test_the_plan_of_the_house_is_the_houses() -> None:
    """Every room of src/headrace is in the layout, and what the data are said to hold is a field of theirs."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    assert len(page.splitlines()) <= 250, "a map is read in one sitting"
    layout = page[page.index("## Layout") :]
    rooms = {path.name for path in (ROOT / "src/headrace").iterdir() if path.name[0] not in "._" and path.suffix in ("", ".py")}
    assert {"llm.py", "kv", "drafting"} <= rooms
    assert [name for name in sorted(rooms) if not re.search(rf"\b{re.escape(name)}\b", layout)] == []
    data = page[page.index("## Data") : page.index("## Interfaces")]
    wrong = []
    for name, text in re.findall(r"^([A-Z]\w+) +(.*(?:\n {8,}.*)*)", data[: data.rindex("```")], re.MULTILINE):
        kind = getattr(plan, name, None) or getattr(types, name)
        kinds = dict(re.findall(r"\b([A-Z]\w+)\(([^)]*)\)", text))  # of wants and answers, with their fields
        wrong += [
            f"{one}: {field}" for one in kinds for field in kinds[one].split(", ") if not hasattr(getattr(plan, one), field)
        ]
        fields = set(dir(kind)) | set(getattr(kind, "__annotations__", ())) | set(kinds)
        said = re.split(r" {3,}", text.replace("\n            ", " "))[0]
        said = re.sub(r"\([^)]*\)|\[\w\]", "", said).partition(":")[0]
        named = [re.match(r" *(\w*)", part)[1] for part in re.split(r" · |, (?=\w+ ·)", said)]  # type: ignore[index]
        wrong += [f"{name}: {one}" for one in named if one and one not in fields]
    assert wrong == []


def test_the_floors_and_ways_of_the_house_are_the_houses() -> None:
    """Rooms stand on the page where the plan of imports has them; a method on a way is one of a class of that name."""
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    block = page[page.index("Imports go down the floors") :].split("```")[1]
    floors = re.split(r"(?:^|\s)(\d) ", block)[1:]
    told = {
        room: int(number) for number, rooms in zip(floors[::2], floors[1::2], strict=True) for room in re.findall(r"\w+", rooms)
    }
    tops = {name.partition(".")[0] for name in FLOORS if name} - {"__main__"}
    stands = {top: min(floor for name, floor in FLOORS.items() if name in (top, f"{top}.layout")) for top in tops}
    assert [top for top in sorted(tops) if told.get(top) != stands[top]] == []
    ways = page[page.index("## The ways") : page.index("## Processes")]
    named = set(re.findall(r"`([A-Z][A-Za-z]+)\.(\w+)", ways))
    missing = [
        f"{a}.{b}" for a, b in sorted(named) if not any(f"class {a}" in s and f"def {b}(" in s for s in SOURCES.values())
    ]
    assert len(named) > 12
    assert missing == []


def test_the_table_of_parameters_is_what_is_declared() -> None:
    assert parameters.table() == written(parameters.PART), "docs/decoding.md is stale: python -m tests.parameters"
    assert "| `top_k` | 0 (off) or more | 0 | Only the K likeliest tokens |" in parameters.table().splitlines()


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


# What the READMEs call each architecture.
CALLED = {
    "bert": "BERT", "gemma3_text": "Gemma 3", "gpt2": "GPT-2", "llama": "Llama 2", "marian": "Marian",
    "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "t5": "T5",
}  # fmt: skip
ENGINES = "LRV"  # llama.cpp, ONNX Runtime GenAI, OpenVINO GenAI: the columns of the log's tables, in this order
CELLS = ("pp512", "pp2048", "b1", "b4", "b8", "b16", "b32", "b1 at 4k")
Cells = dict[str, tuple[str, str, str]]  # cell -> tokens/s, times the best, the engines that ran


@pytest.mark.parametrize("name", READMES)
def test_a_readme_lists_the_models_and_formats_that_there_are(name: str) -> None:
    (said,) = re.findall(r"^\* (?:Models|模型).*(?:\n  .*)*", (ROOT / name).read_text("utf-8"), re.MULTILINE)
    assert set(CALLED) == set(FAMILIES)
    assert [called for called in CALLED.values() if called not in said] == []
    kinds = [kind for kind in KINDS if kind not in NOT_GGUF]
    formats: list[str] = []
    for first, last in re.findall(r"\b(I?[FBQ]+\d\w*|MXFP4)(?:\s*(?:to|至)\s*(Q\w+))?", said.replace("\n  ", "")):
        formats += kinds[kinds.index(first) : kinds.index(last or first) + 1]
    assert formats == kinds


def logged(page: str) -> list[Cells]:
    """The tables of our speed beside three engines in the log's newest section of that kind: SmolLM2's and the 1.5B's."""
    section = page[page.index("## 2026-11-22: the native core beside its peers") :]
    tables: list[Cells] = []
    for table in section.split("\n\n"):
        if re.match(r"\| (SmolLM2|Qwen).*\| llama.cpp \| ORT \| OpenVINO \|", table):
            tables.append({})
            for line in table.splitlines()[2:]:
                cell, ours, *theirs, times = [part.strip() for part in line.split("|")[1:7]]
                ran = "".join(letter for letter, figure in zip(ENGINES, theirs, strict=True) if figure)
                tables[-1].setdefault(cell.split(" (")[0], (ours, times.split()[0].strip("*"), ran))
    return tables[:2]


def printed(page: str) -> list[Cells]:
    """The same of a README's table."""
    rows = re.findall(r"^\| [^|`]+ \| ([\d.]+) \| ([\d.]+) ([LRV ]+) \| ([\d.]+) \| ([\d.]+) ([LRV ]+) \|$", page, re.MULTILINE)
    cells: list[Cells] = [{}, {}]
    for cell, row in zip(CELLS, rows, strict=True):
        for at in (0, 1):
            ours, times, ran = row[3 * at : 3 * at + 3]
            cells[at][cell] = (ours, times, ran.replace(" ", ""))
    return cells


def test_the_speeds_of_the_readmes_are_those_of_the_log() -> None:
    log = (ROOT / "docs/performance-log.md").read_text("utf-8")
    measured = logged(log)
    assert [set(table) for table in measured] == [set(CELLS)] * 2
    for name in READMES:
        page = (ROOT / name).read_text("utf-8")
        assert printed(page) == measured
        assert printed(page.replace("1.25 L R |", "1.25 L R V |")) != measured  # an engine that did not run in that cell
    grid = log[log.index("Is auto ever slower?") :].split("\n\n")[1]
    medians = [float(cell.split()[0]) for line in grid.splitlines()[2:] for cell in line.split("|")[2:5]]
    assert (len(medians), min(medians), max(medians)) == (30, 0.98, 3.09)
    assert "our grid of 30 cells" in " ".join((ROOT / READMES[0]).read_text("utf-8").split())
    assert all("0.98" in (page := (ROOT / name).read_text("utf-8")) and "3.09" in page for name in READMES)


def test_both_readmes_say_what_is_not_built() -> None:
    sections = [
        re.split(r"^## (?:Not yet|尚未实现)$", (ROOT / name).read_text("utf-8"), flags=re.MULTILINE)[1] for name in READMES
    ]
    points = [re.findall(r"^\* ", section.split("\n## ")[0], re.MULTILINE) for section in sections]
    assert len(points[0]) == len(points[1]) > 4


def test_the_files_that_contributing_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+/[\w.]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    assert {"models/registry.py", "models/families/__init__.py", "models/hf.py", "tests/models/zoo.py"} <= named
    assert [name for name in named if not any((ROOT / base / name).exists() for base in ("", "src/headrace"))] == []


def prompts_elsewhere() -> dict[str, str]:
    """Prompt files that are not in the repository, and their SHA-256, as the log names them."""
    log = (ROOT / "docs/performance-log.md").read_text("utf-8")
    return dict(re.findall(r"^\| `([\w]+\.jsonl)` \|.*\| `([0-9a-f]{64})` \|$", log, re.MULTILINE))


def test_the_prompts_of_measurements_are_here_or_named_by_their_hash() -> None:
    here = {path.name for path in (ROOT / "benchmarks/prompts").iterdir()}
    for name in ("docs/performance-log.md", "docs/speculation.md"):
        page = (ROOT / name).read_text("utf-8")
        used = {Path(path).name for path in re.findall(r"(?:-i |`)([\w/.]+\.jsonl)\b", page)}
        assert "code.jsonl" in used
        assert used - here - set(prompts_elsewhere()) - {"IN.jsonl", "OUT.jsonl", "prompts.jsonl"} == set()


@pytest.mark.parametrize("name", sorted(prompts_elsewhere()))
def test_the_hash_is_that_of_the_file(name: str) -> None:
    assert hashlib.sha256(data_path(f"prompts/{name}").read_bytes()).hexdigest() == prompts_elsewhere()[name]


def test_every_attack_has_its_row_and_every_row_a_test() -> None:
    """A row: the attack, its request, before, now, and tests, which `test_the_tests_that_pages_name_exist` looks for."""
    page = (ROOT / "docs/attacks.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    assert [row for row in rows if len(row) != 5 or not all(cell.strip("| ") for cell in row)] == []
    assert [row[0] for row in rows if not re.search(r"`tests/[\w/]+\.py(::test_\w+)?`", row[4])] == []
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    assert set(attacks()) - named == set()
