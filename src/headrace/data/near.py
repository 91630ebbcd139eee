"""Names that somebody may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def near(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Of the known names those that `name` may be a slip of, and else those that it is a part of; the nearest first."""
    lower = {one.lower(): one for one in known}
    known = list(lower.values())
    if found := get_close_matches(name.lower(), lower, n=most):
        return [lower[one] for one in found]
    return [one for one in known if len(name) > 2 and name.lower() in one.lower()][:most]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A question after near names; `otherwise` where there are none."""
    found = near(name, known)
    return f"did you mean {' or '.join(found)}?" if found else otherwise
