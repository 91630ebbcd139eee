"""llama.cpp's programs for speculation: each question is a process, which loads its models and is timed by itself.

Prompts are texts, and so is the first of what comes back. Options of a question: `program`, `draft` (a GGUF file or ""), `most`
(tokens drafted at once). Needs the standard library alone.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
ENCODED = re.compile(r"encoded +(\d+) tokens in +([\d.]+) seconds")


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        self.model, self.threads, self.context = model, threads, setting["context"]
        self.about = "llama.cpp's speculative-simple and lookup"

    def run(
        self, prompts: list[str], new_tokens: int, program: str, draft: str, most: int
    ) -> tuple[float, float, list[str], int]:
        (prompt,) = prompts
        kind = ["--spec-type", "draft-simple", "-md", draft, "--spec-draft-threads", str(self.threads)] if draft else []
        count = ["-n", str(new_tokens), "--spec-draft-n-max", str(most), "-t", str(self.threads), "-c", str(self.context)]
        given = ["-m", self.model, "-p", prompt, "--no-escape", "--temp", "0", "--top-k", "1", "--log-colors", "off"]
        done = subprocess.run([program, *given, *count, *kind], capture_output=True, text=True, errors="replace", check=False)
        decoded, encoded = DECODED.search(done.stderr), ENCODED.search(done.stderr)
        if done.returncode or decoded is None or encoded is None:
            last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise RuntimeError(f"{Path(program).name} failed: {last}")
        answer = done.stdout.partition(prompt)[2]
        return float(encoded[2]), float(decoded[2]), [answer], int(decoded[1])
