"""How wide a text is on a terminal: CJK characters and most emoji take two cells, combining marks none."""

from rich.cells import cell_len, set_cell_size

ELLIPSIS = "…"


def width(text: str) -> int:
    """Terminal cells of a one-line text."""
    return cell_len(text)


def crop(text: str, cells: int) -> str:
    """At most `cells` cells of a one-line text; where something was cut it ends in …"""
    if cell_len(text) <= cells:
        return text
    if cells <= 0:
        return ""
    return set_cell_size(text, cells - 1).rstrip(" ") + ELLIPSIS
