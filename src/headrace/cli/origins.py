"""Where each token came from, in colours: drafted and accepted, put in a rejected draft's place, a bonus after a draft that
was right to its end, or decoded plainly."""

from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.weights.progress import counted

COLOURS = {
    "ngram": "green",
    "suffix": "cyan",
    "draft": "blue",
    "self": "magenta",
    "exit": "magenta",
    "lookahead": "yellow",
    "jacobi": "yellow",
}
CORRECTED = "red"


class Origins:
    """Writes tokens as they come, each in the colour of whoever proposed it."""

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        self._tokenizer = tokenizer
        self._console = console or Console(highlight=False)
        self._held = b""  # bytes of a character that is not complete
        self._seen: dict[str, int] = {}
        self._drafted: dict[str, int] = {}

    def write(self, delta: Any) -> None:
        """The tokens of one delta: accepted ones in their drafter's colour, one in a wrong one's place in red."""
        after = "bonus" if delta.accepted == delta.drafted else "corrected"
        if delta.drafter:
            self._drafted[delta.drafter] = self._drafted.get(delta.drafter, 0) + delta.drafted
        for place, token in enumerate(delta.token_ids):
            accepted = place < delta.accepted
            origin = delta.drafter if accepted else after if delta.drafter else "plain"
            self._seen[origin] = self._seen.get(origin, 0) + 1
            if token in self._tokenizer.special_ids:
                continue
            text, self._held = _whole(self._held + self._tokenizer.token_bytes(token))
            style = COLOURS.get(origin, CORRECTED if origin == "corrected" else "")
            self._console.print(Text(text, style=style), end="")

    def close(self) -> None:
        """The legend: what the colours mean, and how many tokens each has."""
        self._console.print()
        for origin in self._drafted:
            self._seen.setdefault(origin, 0)
        for origin, count in sorted(self._seen.items()):
            style = COLOURS.get(origin, CORRECTED if origin == "corrected" else "")
            drafted = f" accepted of {self._drafted[origin]} drafted" if origin in self._drafted else ""
            self._console.print(Text(f"{origin}: {counted(count, 'tokens')}{drafted}", style=style))
        if not self._drafted:
            self._console.print("nothing was drafted: speculation is off, found nothing to propose, or would not have paid")


def _whole(data: bytes) -> tuple[str, bytes]:
    """The characters that are complete, and the bytes of one that is not."""
    for held in range(min(4, len(data)) + 1):
        try:
            return data[: len(data) - held].decode("utf-8"), data[len(data) - held :]
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", "replace"), b""
