"""Input texts of commands: arguments, files, pipes."""

import sys
import threading
from pathlib import Path

import typer

from headrace.cli.output import say

# Seconds of silence on stdin before a note says that the command waits for it.
WAIT = 2.0


def join_prompt(prompt: str | None, files: list[Path]) -> str:
    """Join argument, files and piped text with blank lines. Raises ValueError if the result is empty."""
    if prompt is not None and prompt != prompt.encode(errors="replace").decode():
        raise ValueError(f"the prompt is not {sys.getfilesystemencoding().upper()} text; convert it")
    parts = [prompt or "", *(read_text(path) for path in files), _piped()]
    text = "\n\n".join(part for part in parts if part)
    if not text.strip():
        raise ValueError("the prompt is empty; give it as an argument, with --file, or pipe it in (headrace chat talks)")
    return text


def texts_of(texts: list[str] | None, file: Path | None, blank: bool = False) -> list[str]:
    """Return the arguments, or the lines of a file or of stdin. blank: keep blank lines.

    Raises typer.BadParameter, ValueError.
    """
    if texts and file:
        raise typer.BadParameter("give texts or --file, not both")
    try:
        given = texts or [line.rstrip("\n") for line in (file.open("r", encoding="utf-8") if file else sys.stdin)]
    except UnicodeDecodeError as error:
        raise ValueError(not_text(str(file or "standard input"), error)) from None
    if not given:
        raise ValueError("there is no text; give some as arguments, with --file, or pipe them in")
    if not blank and not all(given):
        raise ValueError("a text is empty; remove its line")
    return given


def not_text(source: str, error: UnicodeDecodeError) -> str:
    """Return the message for bytes that are not text in the expected encoding."""
    encoding = error.encoding.upper()
    return f"{source} is not {encoding} text (byte {error.start}); convert it, for example: iconv -f latin1 -t {encoding}"


def layers_of(text: str | None, option: str) -> tuple[int, ...]:
    """Parse layer numbers such as 10,20,25; empty for None. Raises typer.BadParameter."""
    try:
        return () if text is None else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers, as in 10,20,25, not {text!r}") from None


def read_text(path: Path) -> str:
    """Read a text file without its last newline. Raises ValueError if it is not UTF-8."""
    try:
        return path.read_text("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(not_text(str(path), error)) from None


def _piped() -> str:
    """Read the piped text without its last newline; empty if stdin is a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    waiting = threading.Timer(WAIT, say, ["headrace: reading standard input until it ends (</dev/null gives none)"])
    waiting.daemon = True
    waiting.start()
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(not_text("standard input", error)) from None
    finally:
        waiting.cancel()
