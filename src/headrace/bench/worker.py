"""A measured engine in a process of its own, stopped between measurements so that it uses no CPU of the others."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from headrace.bench.machine import others_share
from headrace.host import busy_seconds, peak_memory, process_seconds

# Seconds for a process to end before it is killed.
END_TIMEOUT = 10


class EngineProcess:
    """A process that answers each JSON line with a JSON line (`workers/serve.py`). Its output goes to `log`.

    A signal stops the process between two measurements, so that no thread of it can spin. It is a process group of its own in
    this session: the system sends SIGHUP to a stopped group whose parent has died, so it does not outlive this process.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=None if env is None else {**os.environ, **env},
                text=True,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the process and its ended children."""
        return process_seconds(self.pid, children=True)

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send one measurement; returns the answer with `others_cpu`, the share of the cores that other processes used.

        Raises ValueError with the engine's error, or with the last line of its log if the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        start, busy, mine = time.perf_counter(), busy_seconds(), self.cpu_seconds
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ValueError(f"the process ended: {self._last_words()}")
        others = busy_seconds() - busy - (self.cpu_seconds - mine)
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(" ".join(str(answer["error"]).split())[:300])
        if peak := peak_memory(self.pid):
            answer["peak_rss_mb"] = peak / 2**20
        return {**answer, "others_cpu": others_share(others, time.perf_counter() - start)}

    def close(self) -> None:
        """End the process by closing its input; kill it after END_TIMEOUT."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, number)

    def _last_words(self) -> str:
        self._signal(signal.SIGKILL)
        self._process.wait()
        lines = [line.strip() for line in self.log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return f"{lines[-1][:300] if lines else 'nothing in its log'} (exit status {self._process.returncode}; {self.log})"
