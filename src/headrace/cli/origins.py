"""Tokens in colours. Where each came from: drafted and accepted, put in a rejected draft's place, a bonus after a draft that
was right to its end, or decoded plainly. Or after how many layers it was written (none: by a smaller model)."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.cli.output import say
from headrace.data.progress import counted

COLOURS = {
    "ngram": "green",
    "suffix": "cyan",
    "draft": "blue",
    "self": "magenta",
    "exit": "magenta",
    "lookahead": "yellow",
    "jacobi": "yellow",
}
CORRECTED, EARLY = "red", "green"


class Coloured:
    """Writes tokens as they come, each in a colour."""

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        self._tokenizer = tokenizer
        self._console = console or Console(highlight=False)
        self._held = b""  # bytes of a character that is not complete

    def _print(self, token: int, style: str) -> None:
        if token in self._tokenizer.special_ids:
            return
        text, self._held = _whole(self._held + self._tokenizer.token_bytes(token))
        self._console.print(Text(text, style=style), end="")


class Origins(Coloured):
    """Each in the colour of whoever proposed it."""

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        super().__init__(tokenizer, console)
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
            self._print(token, COLOURS.get(origin, CORRECTED if origin == "corrected" else ""))

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


class Depths(Coloured):
    """Those that left early in green, the whole model's plain."""

    def __init__(self, tokenizer: Any, layers: int, console: Console | None = None) -> None:
        super().__init__(tokenizer, console)
        self._layers = layers
        self._exits: list[Any] = []

    def write(self, delta: Any) -> None:
        """The tokens of one delta."""
        self._exits += delta.exits
        for token, exited in zip(delta.token_ids, delta.exits, strict=True):
            self._print(token, EARLY if exited.layers < self._layers else "")

    def close(self) -> None:
        """The legend: how many tokens were written after how many layers, and what an audit found."""
        self._console.print()
        for layers, line in legend(self._exits, self._layers):
            self._console.print(Text(line, EARLY if layers is not None and layers < self._layers else ""))


def legend(exits: Sequence[Any], layers: int) -> Iterator[tuple[int | None, str]]:
    """Of tokens that may have left a model of so many layers (`Exited`): lines that sum them up, and of which depth each is
    (None: of all)."""
    depths = [exited.layers for exited in exits]
    for depth in sorted(set(depths)):
        who = f"after {depth} of {layers} layers" if depth else "by the smaller model"
        yield depth, f"{who}: {counted(depths.count(depth), 'tokens')}"
    if depths:
        early = sum(depth < layers for depth in depths)
        yield None, f"{sum(depths) / len(depths):.1f} layers on average, {early / len(depths):.0%} left early"
    first = "the exit" if 0 not in depths else "the smaller model"
    audited = [exited for exited in exits if len(exited.votes) == 2]
    for what, some in (("all", audited), ("those that left", [one for one in audited if one.layers < layers])):
        if some:
            same = sum(one.votes[0] == one.votes[1] for one in some)
            yield None, f"audit: {first} says what the whole model does at {same / len(some):.0%} of {what}"


def say_exits(exits: Sequence[Any], layers: int) -> None:
    """Those lines on stderr, of many answers; or that no token of them could leave."""
    for _, line in legend(exits, layers):
        say(line)
    if not exits:
        say("no token could leave early, or be a smaller model's; set an exit_threshold or a cascade_threshold")


def _whole(data: bytes) -> tuple[str, bytes]:
    """The characters that are complete, and the bytes of one that is not."""
    for held in range(min(4, len(data)) + 1):
        try:
            return data[: len(data) - held].decode("utf-8"), data[len(data) - held :]
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", "replace"), b""
