"""Messages typed in a chat: one line, or several."""

import contextlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

from headrace.cli.inputs import not_text
from headrace.weights.store import StoreError, home

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
# Lines of the stored history.
HISTORY = 1000


class TypedMessage(NamedTuple):
    """One typed message. command: it begins with a slash, outside quotes."""

    text: str
    command: bool


class MessageReader:
    """Reads messages from a terminal, with editing and a history in `$HEADRACE_HOME/chat_history`, or from stdin.

    A message is one line. A backslash at the end continues it in the next line; three quotes at the beginning continue it up to
    three closing quotes.
    """

    def __init__(self, commands: list[str]) -> None:
        self.terminal = sys.stdin is not None and sys.stdin.isatty()
        self._edits = self.terminal and sys.stdout.isatty()
        if self._edits:
            _set_up_editing(commands)

    def read(self) -> TypedMessage | None:
        """Return the next message, None at the end of the input. Raises KeyboardInterrupt."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.startswith(QUOTES):
            return TypedMessage(self._quoted(line.removeprefix(QUOTES)), command=False)
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            following = self._line(MORE)
            if following is None:
                break
            parts.append(following)
        return TypedMessage("\n".join(parts), command=line.startswith("/"))

    def _quoted(self, first: str) -> str:
        parts: list[str] = []
        line: str | None = first
        while line is not None and not line.endswith(QUOTES):
            parts.append(line)
            line = self._line(MORE)
        if line is not None:
            parts.append(line.removesuffix(QUOTES))
        return "\n".join(parts).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self._edits:
            with contextlib.suppress(EOFError):
                return input(prompt)
            print()
            return None
        if self.terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline() if sys.stdin is not None else ""
        except UnicodeDecodeError as error:
            raise ValueError(not_text("standard input", error)) from None
        return line.removesuffix("\n") if line else None

    def close(self) -> None:
        """Save the history."""
        if self._edits:
            with contextlib.suppress(OSError, ImportError, StoreError):
                _keep_history()


def _set_up_editing(commands: list[str]) -> None:
    """Set up readline, if Python has it: history, and completion of commands by tab."""
    try:
        import readline
    except ImportError:
        return

    def complete(text: str, state: int) -> str | None:
        line = readline.get_line_buffer()
        completions = [name for name in commands if line.startswith("/") and name.startswith(text)]
        return completions[state] if state < len(completions) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(HISTORY)
    with contextlib.suppress(OSError, StoreError):
        readline.read_history_file(_history())


def _keep_history() -> None:
    import readline

    path = _history()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Only the user may read the history.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    readline.write_history_file(path)


def _history() -> Path:
    return home() / "chat_history"
