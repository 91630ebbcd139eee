"""Width of text on a terminal: CJK characters and most emoji take two cells, combining marks none."""

from rich.cells import cell_len, chop_cells, set_cell_size

ELLIPSIS = "…"


def width(text: str) -> int:
    """Terminal cells of a one-line text."""
    return cell_len(text)


def crop(text: str, cells: int) -> str:
    """Cut a one-line text to at most `cells` cells; a cut text ends in …"""
    if cell_len(text) <= cells:
        return text
    if cells <= 0:
        return ""
    return set_cell_size(text, cells - 1).rstrip(" ") + ELLIPSIS


def wrapped(text: str, cells: int) -> list[str]:
    """Break a one-line text into lines of at most `cells` (≥ 2) cells, between words, or inside longer words."""
    lines = [""]
    for word in text.split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if width(joined) <= cells:
            lines[-1] = joined
            continue
        pieces = chop_cells(word, cells)
        lines = [*(lines if lines[-1] else lines[:-1]), *pieces]
    return lines
