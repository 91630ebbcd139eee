"""The page of papers: up to date, with figures that stand in the log, and no paper of the seeds' methods missing."""

import re
from typing import Any

import pytest

from tests.pages import DOCS, generated, stale, written
from tests.papers import papers, text

LOG = (DOCS / "log" / "2026-11.md").read_text("utf-8")
METHODS = (
    "SDN BranchyNet PABEE CALM speculative lookahead blockwise Medusa PagedAttention FlashAttention Flash-Decoding GQA CLA "
    "GPTQ AWQ LLM.int8 SmoothQuant SparseGPT Wanda DistilBERT step-by-step mask-predict FrugalGPT contrastive "
    "contrastive-search"
).split()


def section(heading: str) -> str:
    """Text of a section of the log; empty if there is none."""
    return LOG.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def faults(row: dict[str, Any]) -> list[str]:
    """Quotes that the log lacks, and numbers of our figure that no quote holds."""
    quotes = {row["section"]: row["quotes"]} | {other: more for other, *more in row.get("also", [])}
    found = [f"{quote!r} is not in {of!r}" for of, all_of in quotes.items() for quote in all_of if quote not in section(of)]
    quoted = " ".join(quote for all_of in quotes.values() for quote in all_of)
    numbers = [number for number in re.findall(r"\d+\.\d+", row["ours"]) if number not in quoted]
    return found + [f"{number} is in no quote" for number in numbers]


def test_the_page_is_written_from_the_data() -> None:
    assert written("papers") == generated("papers"), stale("papers")


def test_no_method_is_missing() -> None:
    assert [row["id"] for row in papers()] == METHODS


@pytest.mark.parametrize("row", papers(), ids=lambda row: row["id"])
def test_each_figure_is_in_the_log(row: dict[str, Any]) -> None:
    assert faults(row) == []
    assert row["claim"]
    assert row["why"]
    assert bool(row["ours"]) == bool(row["quotes"])
    assert section(row["section"]), "the log says what was measured, or what was tried"
    assert (DOCS / f"en/understand/methods/{row['page']}.md").is_file()


TRAINS = re.compile(r"train-|distil|heal|benchmarks\.(refine|exit)|exits|heads")


def lacks_seeds(row: dict[str, Any]) -> bool:
    """True for a figure of something trained that does not say of how many seeds (or splits) it is."""
    return bool(row["ours"]) and bool(TRAINS.search(row["command"])) and not re.search(r"seed|split", row["ours"])


def test_figures_of_trainings_say_how_many_seeds() -> None:
    assert [row["id"] for row in papers() if lacks_seeds(row)] == []
    row = next(row for row in papers() if row["id"] == "GQA")
    assert lacks_seeds(row | {"ours": row["ours"].replace("; one seed", "")}), "control"


CPU = re.compile(r"Zen \d|Xeon")
NO_CPU = ("CPU not recorded", "no machine counts")


def machine_faults(row: dict[str, Any]) -> list[str]:
    """A machine that is missing, or a CPU that the row's sections of the log do not name."""
    if not row["ours"]:
        return []
    named = CPU.findall(row["machine"])
    logged = section(row["section"]) + "".join(section(other[0]) for other in row.get("also", []))
    found = [f"{cpu} is not in the log" for cpu in named if cpu not in logged]
    return found if named or any(words in row["machine"] for words in NO_CPU) else ["no machine"]


def test_each_row_names_its_machine() -> None:
    assert {row["id"]: faults for row in papers() if (faults := machine_faults(row))} == {}
    row = next(row for row in papers() if row["id"] == "GPTQ")
    assert machine_faults(row | {"machine": "two cores"}) == ["no machine"]
    assert machine_faults(row | {"machine": "two Zen 4 cores"}) == ["Zen 4 is not in the log"]
    assert row["machine"] in text(), "the page has it"


SPREAD = re.compile(r"±|\d to \d|quartiles|\b(one|two|three) (seed|split|run|trace)s?\b")


def test_each_figure_has_an_interval_or_says_of_how_many_runs_it_is() -> None:
    assert [row["id"] for row in papers() if row["ours"] and not SPREAD.search(row["ours"])] == []
    row = next(row for row in papers() if row["id"] == "lookahead")
    assert not SPREAD.search(row["ours"].replace("; one run", "")), "control"


def test_a_changed_figure_is_found() -> None:
    """The controls: another number in a figure, in a quote, and another section."""
    row = next(row for row in papers() if row["id"] == "GPTQ")
    assert faults(row | {"ours": row["ours"].replace("3.13", "3.25")}) == ["3.25 is in no quote"]
    assert faults(row | {"quotes": [*row["quotes"], "**3.25** times"]})
    assert len(faults(row | {"section": "2026-11-20: batching policies"})) == len(row["quotes"])
