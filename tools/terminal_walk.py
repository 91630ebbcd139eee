"""The walk through the command line in docs/log/terminal-walk.md, recorded on a terminal: tools/terminal_walk.py FILE.gguf

FILE.gguf: SmolLM2-135M-Instruct of the catalog, which is also asked by its path and under another name.
"""

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OUT = Path(__file__).parents[1] / "docs/log/terminal-walk.md"
COLUMNS, SECONDS = 100, 300
ERASE = "\r\x1b[2K"  # before the line that says what a command is at
TYPED = ("What is a headrace?", "/set", "/set temprature 1", "/set temperature 0", "/stats", "/exit")
ABOUT = f"""# A walk through the command line

Recorded on a terminal of {COLUMNS} columns by `python tools/terminal_walk.py FILE.gguf`. In brackets under a command: what the
line on stderr said before it went.
"""
ASK = "'Name three rivers.' -m 40 --seed 1"
STAGE = re.compile(r"starting|loading [^\s,]+|packing(?= )|reading the prompt")
# (what it shows, the command, what is typed into it)
WALK: list[tuple[str, str, tuple[str, ...]]] = [
    ("A model where a command is expected, a name mistyped, an option mistyped:", "headrace smollm2-135m hi", ()),
    ("", "headrace run smolm2-135m hi", ()),
    ("", "headrace run smollm2-135m hi --temprature 0.2", ()),
    ("What is wrong is said before anything is loaded:", "headrace run smollm2-135m hi --regex '('", ()),
    ("", "headrace generate smollm2-135m -i prompts.jsonl -o nowhere/answers.jsonl", ()),
    ("", "headrace run adapter hi", ()),
    ("The common options, with examples:", "headrace embed --help", ()),
    ("The same question by name, by path and of a file with another name:", f"headrace run smollm2-135m {ASK}", ()),
    ("", f"headrace run ./SmolLM2-135M-Instruct.Q4_1.gguf {ASK}", ()),
    ("", f"headrace run ./renamed.gguf {ASK}", ()),
    ("", "headrace show ./renamed.gguf", ()),
    ("A name, with settings and a system prompt:", "headrace add mill ./renamed.gguf -t 0.3 --system 'You are a miller.'", ()),
    ("", "headrace list", ()),
    ("A conversation:", "headrace chat mill --seed 1 -m 60", TYPED),
    ("", "headrace rm mill --yes", ()),
]


class Screen:
    """What one command wrote, as it stands in the end, and what its line said meanwhile."""

    def __init__(self, written: str) -> None:
        plain = re.sub(r"\x1b\[(?!2K)[0-9;?]*[a-zA-Z]", "", written.replace("\r\n", "\n"))
        self.stages = list(dict.fromkeys(STAGE.findall(" ".join(part.split("\n")[0] for part in plain.split(ERASE)[1:]))))
        self.lines = [line.rpartition(ERASE)[2].rstrip() for line in plain.split("\n")]


def record(command: str, typed: tuple[str, ...], folder: Path, environment: dict[str, str]) -> Screen:
    """Run a command on a terminal; each of `typed` is sent when the prompt stands there."""
    fd, inner = pty.openpty()
    python = f"{sys.executable} -m headrace"
    shell = re.sub("^headrace", python, command)
    process = subprocess.Popen(
        shell, shell=True, cwd=folder, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
    )
    os.close(inner)
    seen, answered = "", 0
    while True:
        if not select.select([fd], [], [], SECONDS)[0]:
            raise SystemExit(f"{command}: nothing for {SECONDS} s")
        try:
            seen += os.read(fd, 65536).decode(errors="replace")
        except OSError:  # the terminal is gone with the last process on it
            break
        if answered < len(typed) and seen.endswith(">>> "):
            os.write(fd, f"{typed[answered]}\n".encode())
            answered += 1
            seen += " "
    process.wait()
    os.close(fd)
    return Screen(seen.replace(">>>  ", ">>> "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    parts = [ABOUT]
    with tempfile.TemporaryDirectory() as at:
        folder, home = Path(at), Path(at) / "home"
        for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "renamed.gguf"):
            (folder / name).symlink_to(file.absolute())
        (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M"}')
        shutil.copytree(Path(os.environ.get("HEADRACE_HOME", Path.home() / ".cache" / "headrace")) / "models", home / "models")
        environment = {**os.environ, "HEADRACE_HOME": str(home), "COLUMNS": str(COLUMNS), "LINES": "40", "NO_COLOR": "1"}
        for about, command, typed in WALK:
            screen = record(command, typed, folder, environment)
            text = "\n".join([f"$ {command}", *screen.lines]).rstrip()
            text = text.replace(str(home), "~/.cache/headrace").replace(str(folder), "~/models")
            said = f"\n[{' · '.join(screen.stages)}]" if screen.stages else ""
            parts.append(f"{about}\n\n```\n{text}{said}\n```\n" if about else f"```\n{text}{said}\n```\n")
    OUT.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
