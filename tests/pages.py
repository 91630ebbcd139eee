"""Parts of pages that commands write, each between two marks with its name."""

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "en/understand/decoding.md"


def marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: begin -->", f"<!-- {part}: end -->"


def written(part: str, page: Path = PAGE) -> str:
    """The text of a part of a page."""
    begin, end = marks(part)
    return page.read_text("utf-8").partition(begin)[2].partition(end)[0].strip()


def write(part: str, text: str, page: Path = PAGE) -> None:
    """Replace a part of a page by `text`."""
    begin, end = marks(part)
    before, _, rest = page.read_text("utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", "utf-8")
