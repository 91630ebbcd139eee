"""Parts of docs/decoding.md that are written by commands, each between two marks of its name."""

from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "decoding.md"


def marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: begin -->", f"<!-- {part}: end -->"


def written(part: str) -> str:
    """The part as it stands in the page."""
    begin, end = marks(part)
    return PAGE.read_text("utf-8").partition(begin)[2].partition(end)[0].strip()


def write(part: str, text: str) -> None:
    """Put `text` in its place."""
    begin, end = marks(part)
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", "utf-8")
