"""Runs the commands of a page, in its order and in one shell, and compares their output with the page.

A block with a line that begins with `$ ` is a session. A block after a line that ends with a colon and names a file is that
file. In expected output `…` stands for any text, also of several lines. Times and speeds are compared by their unit alone.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.docs.markdown import ROOT, Page

BLOCK = re.compile(r"(?:^|\n)([^\n]*)\n\n?```(\w*)\n(.*?)\n?```", re.DOTALL)
FILE = re.compile(r"`([\w.-]+\.(?:py|toml|jsonl|json|txt|yaml))`[^`]*[:：]$")
# Figures that change from run to run, with their units.
MEASURED = re.compile(
    r"\d[\d,]*(?:\\\.\d+)?(?=(?:\\ | )?(?:tokens/s|prompts/s|s|ms|us|min|seconds|minutes|MB/s|GB/s|GiB/s|%|times|x)(?![\w/]))"
)
END, PORT, PATIENCE = "end-of-command", 8000, 120.0


@dataclass
class Step:
    """A command of a page with its output there, or a file that the page shows."""

    command: str = ""
    expected: list[str] = field(default_factory=list)
    file: str = ""


def steps(page: Page) -> Iterator[Step]:
    """Files and commands of a page in their order."""
    for before, language, text in BLOCK.findall(page.text):
        if text.startswith("$ ") or "\n$ " in text:
            yield from commands(text.splitlines())
        elif language != "" and (name := FILE.search(before)):
            yield Step(file=name[1], expected=text.splitlines())


def commands(lines: list[str]) -> Iterator[Step]:
    """The commands of a session. A command goes on after a backslash, in an open quote and until the end of a here-document."""
    step, open_until = None, ""
    for line in lines:
        if step is not None and open_until:
            step.command += f"\n{line}"
            open_until = "" if closes(step.command, open_until, line) else open_until
        elif line.startswith("$ "):
            if step is not None:
                yield step
            step = Step(line.removeprefix("$ "))
            here = re.search(r"<<-?\s*'?(\w+)'?", line)
            open_until = here[1] if here else ("\\" if line.endswith("\\") else "'" if odd_quotes(line) else "")
        elif step is not None:
            step.expected.append(line)
    if step is not None:
        yield step


def closes(command: str, until: str, line: str) -> bool:
    if until == "\\":
        return not line.endswith("\\")
    return not odd_quotes(command) if until == "'" else line == until


def odd_quotes(text: str) -> bool:
    """Whether a single or double quote is still open."""
    open_quote = ""
    for character in text:
        if character == open_quote:
            open_quote = ""
        elif character in "'\"" and not open_quote:
            open_quote = character
    return bool(open_quote)


def matches(expected: list[str], printed: list[str]) -> bool:
    """Whether output is what a page shows."""
    pattern = "\n".join(line_pattern(re.sub(r"~/\w+/", "", line)) for line in trimmed(expected))
    return re.fullmatch(pattern, "\n".join(trimmed(printed))) is not None


def line_pattern(line: str) -> str:
    return MEASURED.sub(r"[\\d.,]+", re.escape(line)).replace("…", r"[\s\S]*?")


def trimmed(lines: list[str]) -> list[str]:
    """Lines without blanks at their ends, and without empty lines at the beginning and the end."""
    return "\n".join(line.rstrip() for line in lines).strip("\n").split("\n")


class Session:
    """A shell in an empty folder, with the models of `home`. Servers that a page starts end with it."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        known = {"HEADRACE_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "NO_COLOR": "1", "PATH": paths}
        self.environment = {**os.environ, **known, "PYTHONPATH": str(ROOT / "src"), "XDG_CONFIG_HOME": str(home / "config")}
        self.servers: list[subprocess.Popen[bytes]] = []
        for name in ("docs", "LICENSE"):
            (folder / name).symlink_to(ROOT / name)

    def __enter__(self) -> Self:
        self.shell = subprocess.Popen(
            ["bash"], cwd=self.folder, env=self.environment, text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shell.kill()
        self.shell.wait()
        self.stop()

    def stop(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
            server.wait(PATIENCE)
        self.servers.clear()

    def write(self, name: str, lines: list[str]) -> None:
        (self.folder / name).write_text("\n".join(lines).replace(str(PORT), str(self.port)) + "\n", "utf-8")

    def run(self, command: str, expected: list[str]) -> list[str]:
        """The lines that a command prints; of a server, which stays running, the lines up to the expected ones."""
        command = command.replace(str(PORT), str(self.port))
        if command.startswith("headrace serve"):
            return self.serve(command, expected)
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(f"{{ {command}\n}} </dev/null\n{{ s=$?; printf '\\n%s\\n' {END}; (exit $s); }}\n")
        self.shell.stdin.flush()
        lines = []
        for line in self.shell.stdout:
            if line.rstrip() == END:
                break
            lines.append(self.plain(line))
        if lines and not lines[-1]:
            lines.pop()
        return lines

    def serve(self, command: str, expected: list[str]) -> list[str]:
        self.stop()
        log = self.folder / "server.log"
        with log.open("wb") as out:
            full = f"exec {command} --port {self.port}"
            server = subprocess.Popen(full, shell=True, cwd=self.folder, env=self.environment, stdout=out, stderr=out)
        self.servers.append(server)
        ends, lines = time.monotonic() + PATIENCE, list[str]()
        while not matches(expected, lines) and server.poll() is None and time.monotonic() < ends:
            time.sleep(0.05)
            lines = [self.plain(line) for line in log.read_text("utf-8").splitlines()]
        return lines

    def plain(self, line: str) -> str:
        """A line as a page shows it: its port, no path of this machine."""
        return line.rstrip("\n").replace(str(self.port), str(PORT)).replace(f"{self.folder}/", "")


def missing_tool(command: str) -> str:
    """A program of a command that this machine lacks."""
    words = re.findall(r"(?:^|[|;&]\s*|\$\()([a-z][\w-]*)", command)
    return next((word for word in words if word in ("jq", "curl") and shutil.which(word) is None), "")
