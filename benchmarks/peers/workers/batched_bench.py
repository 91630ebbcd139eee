"""llama-batched-bench of a person's own build of llama.cpp or ik_llama.cpp: each cell is a process, which loads the model and
measures with tokens of its own choice.

Settings: `command` (the program and a person's options). Its own times are taken: the prompts' until all are fed, and those of
the tokens after them. Needs the standard library alone.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROW = re.compile(r"^\|\s*\d+\s*\|.*\|\s*$")
PREFILL, DECODE = 4, 6  # columns of a row: PP TG B N_KV T_PP S_PP T_TG S_TG T S
BATCH = 2048  # tokens of prompts given at once


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        self.model, self.threads, self.command = model, threads, setting["command"]
        done = self.call("--version")
        found = re.search(r"version: (.*)", done.stderr + done.stdout)
        self.about = f"{Path(self.command[0]).name} {found[1] if found else '(version not said)'}"

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int]]:
        count, length, tokens = len(prompts), len(prompts[0]), max(new_tokens, 1)
        sizes = ["-c", str(count * -(-(length + tokens) // 256) * 256), "-b", str(BATCH), "-t", str(self.threads)]
        cell = ["-npp", str(length), "-ntg", str(tokens), "-npl", str(count), "-tb", str(self.threads)]
        done = self.call("-m", self.model, *sizes, *cell)
        found = times(done.stdout) or times(done.stderr)
        if done.returncode or found is None:
            last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise RuntimeError(f"{Path(self.command[0]).name} failed: {last}")
        return *found, []

    def call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*self.command, *arguments], capture_output=True, text=True, errors="replace", check=False)


def times(text: str) -> tuple[float, float] | None:
    """Seconds of prefill and of decoding, of the last line that has them: a row of its table, or of JSON."""
    for line in reversed(text.splitlines()):
        if ROW.match(line):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            return float(cells[PREFILL]), float(cells[DECODE])
        if line.startswith("{"):
            row = json.loads(line)
            return float(row["t_pp"]), float(row["t_tg"])
    return None
