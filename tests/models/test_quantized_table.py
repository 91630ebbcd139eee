"""The table of quantized folders in docs/en/reference/formats.md equals the output of `inspect`."""

import json
import re
from pathlib import Path

from headrace.weights.describe import describe
from tests.models.test_quantized import BOUNDED, FORMATS, KEPT
from tests.quantized import DATA

PAGE = Path(__file__).parents[2] / "docs/en/reference/formats.md"
ROW = re.compile(r"^\| `([\w.-]+)` \| ([^|]+?) \| ([^|]+) \|$", re.MULTILINE)
Row = tuple[str, str]  # quant_method, and what inspect says of the scheme


def printed(page: str) -> dict[Row, set[str]]:
    """The rows of a page: what each scheme's matrices are packed as, or "bfloat16"."""
    section = page.split("## What runs as what")[1].split("\n## ")[0]
    return {(method, said): set(re.findall(r"\w+", held)) for method, said, held in ROW.findall(section)}


def inspected(folder: Path) -> tuple[Row, set[str]]:
    """What `headrace inspect` says of a folder, of its matrices without the table of tokens."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    told = describe(folder)
    kinds = set(re.findall(r"packed as (\w+)", told["core"])) or {"bfloat16"}
    return (method, told["quantised"]), kinds


def test_the_page_equals_the_output_of_inspect(tmp_path: Path) -> None:
    """Row by row, no more and no less. The control: a page with one word changed says something else."""
    found: dict[Row, set[str]] = {}
    made = [make().write(tmp_path / str(number)) for number, (make, _, _) in enumerate(FORMATS.values())]
    for folder in (*made, *(DATA / name for name in (*KEPT, *BOUNDED))):
        row, kinds = inspected(folder)
        found.setdefault(row, set()).update(kinds)
    page = PAGE.read_text("utf-8")
    assert printed(page) == found
    assert printed(page.replace("| MXFP4 | `MXFP4` |", "| MXFP4 | bfloat16 |")) != found
