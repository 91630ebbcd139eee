"""Coloured output of tokens, by origin or by exit layer.

Origins: accepted from a draft, correction of a rejected draft, bonus after an accepted draft, or decoded without a draft.
"""

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
    "heads": "magenta",
    "lookahead": "yellow",
    "jacobi": "yellow",
}
CORRECTED, EARLY = "red", "green"


class TokenPrinter:
    """Prints the text of tokens, each in a colour."""

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        self._tokenizer = tokenizer
        self._console = console or Console(highlight=False)
        # Bytes of an incomplete character.
        self._held = b""

    def _print(self, token: int, style: str) -> None:
        if token in self._tokenizer.special_ids:
            return
        text, self._held = _complete_text(self._held + self._tokenizer.token_bytes(token))
        self._console.print(Text(text, style=style), end="")


class OriginPrinter(TokenPrinter):
    """Prints tokens in the colours of their origins."""

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        super().__init__(tokenizer, console)
        self._seen: dict[str, int] = {}
        self._drafted: dict[str, int] = {}

    def write(self, delta: Any) -> None:
        """Print the tokens of one delta: accepted ones in their drafter's colour, a correction in red."""
        after = "bonus" if delta.accepted == delta.drafted else "corrected"
        if delta.drafter:
            self._drafted[delta.drafter] = self._drafted.get(delta.drafter, 0) + delta.drafted
        for position, token in enumerate(delta.token_ids):
            accepted = position < delta.accepted
            origin = delta.drafter if accepted else after if delta.drafter else "plain"
            self._seen[origin] = self._seen.get(origin, 0) + 1
            self._print(token, COLOURS.get(origin, CORRECTED if origin == "corrected" else ""))

    def close(self) -> None:
        """Print the legend: token counts by origin."""
        self._console.print()
        for origin in self._drafted:
            self._seen.setdefault(origin, 0)
        for origin, count in sorted(self._seen.items()):
            style = COLOURS.get(origin, CORRECTED if origin == "corrected" else "")
            drafted = f" accepted of {self._drafted[origin]} drafted" if origin in self._drafted else ""
            self._console.print(Text(f"{origin}: {counted(count, 'tokens')}{drafted}", style=style))
        if not self._drafted:
            self._console.print("no drafts: speculation is off, found nothing to propose, or would have been slower")


class ExitPrinter(TokenPrinter):
    """Prints tokens of early exits in green, those of the full model without colour."""

    def __init__(self, tokenizer: Any, layers: int, console: Console | None = None) -> None:
        super().__init__(tokenizer, console)
        self._layers = layers
        self._exits: list[Any] = []

    def write(self, delta: Any) -> None:
        """Print the tokens of one delta."""
        self._exits += delta.exits
        for token, exited in zip(delta.token_ids, delta.exits, strict=True):
            self._print(token, EARLY if exited.layers < self._layers else "")

    def close(self) -> None:
        """Print the legend: token counts by exit layer, and the result of an audit."""
        self._console.print()
        for layers, line in legend(self._exits, self._layers):
            self._console.print(Text(line, EARLY if layers is not None and layers < self._layers else ""))


def legend(exits: Sequence[Any], layers: int) -> Iterator[tuple[int | None, str]]:
    """Yield lines that summarize exits (`Exited`) of a model with `layers` layers, with their layer, None for all."""
    depths = [exited.layers for exited in exits]
    for depth in sorted(set(depths)):
        who = f"after {depth} of {layers} layers" if depth else "by the smaller model"
        yield depth, f"{who}: {counted(depths.count(depth), 'tokens')}"
    if depths:
        early = sum(depth < layers for depth in depths)
        yield None, f"{sum(depths) / len(depths):.1f} layers on average, {early / len(depths):.0%} exited early"
    first = "the exit" if 0 not in depths else "the smaller model"
    audited = [exited for exited in exits if len(exited.votes) == 2]
    for what, group in (("all", audited), ("early", [exited for exited in audited if exited.layers < layers])):
        if group:
            same = sum(exited.votes[0] == exited.votes[1] for exited in group)
            yield None, f"audit: {first} agrees with the full model at {same / len(group):.0%} of {what} tokens"


def print_exit_legend(exits: Sequence[Any], layers: int) -> None:
    """Print the legend of many answers on stderr, or a note if no token could exit early."""
    for _, line in legend(exits, layers):
        say(line)
    if not exits:
        say("no token could exit early or come from a smaller model; set an exit_threshold or a cascade_threshold")


def _complete_text(data: bytes) -> tuple[str, bytes]:
    """Return the text of complete characters, and the bytes of an incomplete last one."""
    for held in range(min(4, len(data)) + 1):
        try:
            return data[: len(data) - held].decode("utf-8"), data[len(data) - held :]
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", "replace"), b""
