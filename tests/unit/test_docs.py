"""What the documents say exists: their links, the tests they name, the environment variables the code reads, models and
number formats, files to touch, prompts; and figures that stand in two places are the same."""

import ast
import hashlib
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks import speed_chart
from headrace.models.families import FAMILIES
from headrace.weights.kinds import KINDS, NOT_GGUF
from tests.places import data_path
from tests.unit.test_imports import MAX_FUNCTION, MAX_LINES

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


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
    return not function or function in functions(file)


@cache
def functions(file: Path) -> set[str]:
    """The names of those of a file. It is parsed once, for all that pages say of it."""
    return {node.name for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_both_readmes_show_the_same_code() -> None:
    blocks = [re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL) for name in READMES]
    assert blocks[0] == blocks[1] != []


def test_the_pages_name_the_limits_of_files_and_functions() -> None:
    for name in ("docs/en/understand/architecture.md", "CONTRIBUTING.md"):
        page = " ".join((ROOT / name).read_text("utf-8").split())
        limits = re.search(r"at most (\d+) lines\)?, functions at most (\d+)", page)
        assert limits, name
        assert [int(number) for number in limits.groups()] == [MAX_LINES, MAX_FUNCTION]


# What the READMEs call each architecture.
CALLED = {
    "bert": "BERT", "gemma3_text": "Gemma 3", "gpt2": "GPT-2", "llama": "Llama 2", "marian": "Marian",
    "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "t5": "T5",
}  # fmt: skip
CELLS = ("pp512", "pp2048", "b1", "b4", "b8", "b16", "b32", "b1 at 4k")
MACHINES = ("Zen 5", "AVX2", "Zen 4", "AMX")
# Sections of the log with ratios to the best peer: its machine, and a part of the text in which each table of a model stands.
TWO_ZEN_5, HELD = "## 2026-11-23: beside peers on two Zen 5 cores", "**Held to AVX2** (`tools/hold_peers.py`"
TABLES = (
    ("Zen 5", "SmolLM2", "## 2026-11-22: the native core beside its peers", "| SmolLM2-135M"),
    ("Zen 5", "1.5B", "## 2026-11-22: the native core beside its peers", "| Qwen2.5-Coder-1.5B"),
    ("Zen 5", "SmolLM2", TWO_ZEN_5, "| cell |"),
    ("Zen 5", "1.5B", f"{TWO_ZEN_5}\nQwen2.5-Coder-1.5B Q4_K_M, other", "| cell |"),
    ("AVX2", "SmolLM2", HELD, "| cell |"),
    ("AVX2", "1.5B", f"{HELD}\nQwen2.5-Coder-1.5B, three rounds", "| cell |"),
    ("AVX2", "1.5B", f"{HELD}\nLater that day, b16", "| cell |"),
    ("AMX", "SmolLM2", "## 2026-11-23: beside peers on a CPU with AMX", "| cell |"),
    ("AMX", "1.5B", "## 2026-11-23: Qwen2.5-Coder-1.5B beside peers on a CPU with AMX", "| cell |"),
)
# Ratios that stand in a sentence of the log.
SENTENCES = (
    ("Zen 5", "1.5B", "b1", 1.37, "nine rounds beside both: **1.37** times"),
    ("AVX2", "1.5B", "b1", 1.01, "38.5, 1.01 times ONNX Runtime"),
    ("AVX2", "1.5B", "b1", 1.04, "37.0, **1.04** (0.98..1.08)"),
    ("AVX2", "1.5B", "b16", 1.85, "131 tokens/s, **1.85** times"),
)
Ratios = dict[tuple[str, str, str], list[float]]  # (machine, model, cell): of all runs


@pytest.mark.parametrize("name", READMES)
def test_a_readme_lists_the_supported_models_and_formats(name: str) -> None:
    rows = dict(re.findall(r"^\| \[?(Models|模型|GGUF)[^|]*\| (.*) \|$", (ROOT / name).read_text("utf-8"), re.MULTILINE))
    models, files = rows.get("Models") or rows["模型"], rows["GGUF"]
    assert [called for called in CALLED.values() if called not in models] == []
    kinds = [kind for kind in KINDS if kind not in NOT_GGUF]
    formats: list[str] = []
    for first, last in re.findall(r"\b(I?[FBQ]+\d\w*|MXFP4)(?:\s*(?:to|至)\s*(Q\w+))?", files):
        formats += kinds[kinds.index(first) : kinds.index(last or first) + 1]
    assert formats == kinds


def test_the_page_of_models_lists_every_architecture() -> None:
    rows = table_after((ROOT / "docs/en/reference/models.md").read_text("utf-8"), "## Architectures", "| `model_type`")[1:]
    listed = [name for names, *_ in rows for name in re.findall(r"`([\w-]+)`", names)]
    assert sorted(listed) == sorted(FAMILIES)
    assert {tested for *_, tested in rows} == {"real weights", "oracle + llama.cpp", "oracle"}


def table_after(page: str, places: str, head: str) -> list[list[str]]:
    """The cells of the first table whose head begins so, after some places that follow one another."""
    for place in places.split("\n"):
        page = page[page.index(place) :]
    rows = page[page.index(f"\n{head}") :].strip().split("\n\n")[0].splitlines()
    return [[part.strip(" *") for part in row.strip("|").split("|")] for row in rows if not row.startswith("|---")]


def numbers(text: str) -> list[float]:
    """Of "1.12 to 1.16", "1.01–1.32", "**0.63**" or "2.54** (2.45..2.87)" those that come before a bracket or a colon."""
    return [float(number) for number in re.findall(r"\d+\.\d+", re.split(r"[(:]", text)[0])]


def logged(log: str) -> tuple[Ratios, dict[tuple[str, str], str]]:
    """Our speed over the best peer's in all runs that the log has, and tokens/s of the newest run on Zen 5."""
    ratios: Ratios = {}
    speeds: dict[tuple[str, str], str] = {}
    for machine, model, places, head in TABLES:
        names, *rows = table_after(log, places, head)
        column = next(at for at, name in enumerate(names) if name in ("ratio", "times the best"))
        for row in rows:
            cell = row[0].split(" (")[0]
            ratios.setdefault((machine, model, cell), []).extend(numbers(row[column]))
            if places.startswith(TWO_ZEN_5):
                speeds[model, cell] = row[1]
    for cell, *both in table_after(log, "## 2026-11-24: peers on two Zen 4 cores", "| cell |")[1:]:
        for model, found in zip(("SmolLM2", "1.5B"), both, strict=True):
            ratios.setdefault(("Zen 4", model, cell), []).extend(numbers(found))
    for machine, model, cell, ratio, sentence in SENTENCES:
        assert sentence in log
        ratios.setdefault((machine, model, cell), []).append(ratio)
    return ratios, speeds


def printed(page: str) -> tuple[dict[tuple[str, str, str], str], dict[tuple[str, str], str]]:
    """The same of a README's two tables, as they are written."""
    ratios, speeds = {}, {}
    for model, head in (("SmolLM2", "| SmolLM2-135M"), ("1.5B", "| Qwen2.5-Coder-1.5B")):
        for cell, row in zip(CELLS, table_after(page, "", head)[1:], strict=True):
            speeds[model, cell] = row[1]
            ratios |= {(machine, model, cell): text for machine, text in zip(MACHINES, row[2:], strict=True)}
    return ratios, speeds


def summary(ratios: Ratios, machine: str, model: str, cell: str) -> str:
    """ "2.06", "1.24–1.29", or "–" if no run has the cell."""
    found = [f"{ratio:.2f}" for ratio in sorted(ratios.get((machine, model, cell), []))]
    return "–".join(dict.fromkeys((found[0], found[-1]))) if found else "–"


def test_the_speeds_of_the_pages_equal_those_of_the_log() -> None:
    """Each range is that of all runs on a machine. The READMEs have a part of the cells."""
    log = (ROOT / "docs/log/2026-11.md").read_text("utf-8")
    ratios, speeds = logged(log)
    expected = {
        (machine, model, cell): summary(ratios, machine, model, cell)
        for machine in MACHINES
        for model in ("SmolLM2", "1.5B")
        for cell in CELLS
    }
    page = (ROOT / "docs/en/understand/speed.md").read_text("utf-8")
    assert printed(page) == (expected, speeds)
    assert printed(page.replace("1.01–1.32", "1.32")) != (expected, speeds)  # the best of three runs
    grid = log[log.index("Is auto ever slower?") :].split("\n\n")[1]
    medians = [float(cell.split()[0]) for line in grid.splitlines()[2:] for cell in line.split("|")[2:5]]
    assert (len(medians), min(medians), max(medians)) == (30, 0.98, 3.09)
    assert "our grid of 30 cells" in " ".join(page.split())
    assert "0.98" in page
    assert "3.09" in page


@pytest.mark.parametrize("language", speed_chart.WORDS)
def test_the_chart_of_speeds_is_that_of_the_page(language: str) -> None:
    page = speed_chart.PAGE.read_text("utf-8")
    ratios = speed_chart.read_ratios(page)
    assert ratios["SmolLM2-135M", "prompt of 512", "Emerald Rapids, AMX"] == (0.63, 0.63)
    assert len(ratios) == 24
    drawn = speed_chart.chart_path(language).read_text("utf-8")
    assert speed_chart.draw_chart(ratios, language) == drawn, "stale: python -m benchmarks.speed_chart"
    assert speed_chart.draw_chart(speed_chart.read_ratios(page.replace("0.63", "1.63")), language) != drawn


@pytest.mark.parametrize("name", READMES)
def test_a_readme_is_short(name: str) -> None:
    assert len((ROOT / name).read_text("utf-8").splitlines()) <= 115


def test_both_readmes_list_missing_features() -> None:
    sections = [
        re.split(r"^## (?:Not yet|尚未实现)$", (ROOT / name).read_text("utf-8"), flags=re.MULTILINE)[1] for name in READMES
    ]
    points = [re.findall(r"^\* ", section.split("\n## ")[0], re.MULTILINE) for section in sections]
    assert len(points[0]) == len(points[1]) > 3


def test_the_files_that_contributing_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+/[\w.]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    assert {"models/registry.py", "models/families/__init__.py", "models/hf.py", "tests/models/zoo.py"} <= named
    assert [name for name in named if not any((ROOT / base / name).exists() for base in ("", "src/headrace"))] == []


def prompts_elsewhere() -> dict[str, str]:
    """Prompt files that are not in the repository, and their SHA-256, as the log names them."""
    log = (ROOT / "docs/log/2026-11.md").read_text("utf-8")
    return dict(re.findall(r"^\| `([\w]+\.jsonl)` \|.*\| `([0-9a-f]{64})` \|$", log, re.MULTILINE))


def test_the_prompts_of_measurements_are_here_or_named_by_their_hash() -> None:
    here = {path.name for path in (ROOT / "benchmarks/prompts").iterdir()}
    understand = ROOT / "docs/en/understand"
    pages = [ROOT / "docs/log/2026-11.md", understand / "speculation.md", *(understand / "methods").glob("*.md")]
    given = {"IN.jsonl", "OUT.jsonl", "prompts.jsonl", "questions.jsonl", "reviews.jsonl"}  # files of the reader's own
    used = {page.stem: set(re.findall(r"(?:-i |`)(?:[\w/]+/)?(\w+\.jsonl)\b", page.read_text("utf-8"))) for page in pages}
    assert all("code.jsonl" in used[name] for name in ("2026-11", "speculation", "speculative-decoding"))
    missing = {name: files - here - set(prompts_elsewhere()) - given for name, files in used.items()}
    assert {name: files for name, files in missing.items() if files} == {}


@pytest.mark.parametrize("name", sorted(prompts_elsewhere()))
def test_the_hash_is_that_of_the_file(name: str) -> None:
    assert hashlib.sha256(data_path(f"prompts/{name}").read_bytes()).hexdigest() == prompts_elsewhere()[name]


@pytest.mark.parametrize("month", sorted((ROOT / "docs/log").glob("2*.md")), ids=lambda page: page.stem)
def test_a_month_of_the_log_defines_its_terms(month: Path) -> None:
    head = month.read_text("utf-8").split("\n\n")[2].splitlines()
    assert len(head) == 6
    assert [word for word in ("ratio", "interval", "cell", "target") if not any(f"**{word}**" in line for line in head)] == []
