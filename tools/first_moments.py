"""How long a person waits: tools/first_moments.py MODEL [--python OTHER_VENV/bin/python …] [--runs 10]

To the first sign on a terminal, to the first token, to a refusal, to a help: medians of the clock and of CPU time, of this
build and of others in turns. The CPU time of a process counts until the moment that is meant.
"""

import argparse
import os
import pty
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu(pid: int) -> float:
    """Seconds of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def first_byte(command: list[str], terminal: bool) -> tuple[float, float]:
    """Until something stands on the terminal, or comes out of stdout."""
    outer, inner = pty.openpty() if terminal else os.pipe()
    errors = inner if terminal else subprocess.DEVNULL
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=inner, stderr=errors, start_new_session=True)
    os.close(inner)
    os.read(outer, 1)
    found = time.perf_counter() - begun, cpu(process.pid)
    os.close(outer)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return found


def to_the_end(command: list[str]) -> tuple[float, float]:
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    return time.perf_counter() - begun, used.ru_utime + used.ru_stime


def moments(model: str) -> dict[str, tuple[list[str], Callable[[list[str]], tuple[float, float]]]]:
    run = ["run", model, "Name three rivers."]
    return {
        "first sign": (run, lambda command: first_byte(command, terminal=True)),
        "first token": ([*run, "-q"], lambda command: first_byte(command, terminal=False)),
        "no such model": (["run", "nosuch", "hi"], to_the_end),
        "wrong regex": ([*run, "--regex", "("], to_the_end),
        "no such folder": (["generate", model, "-i", __file__, "-o", "/nowhere/at/all"], to_the_end),
        "--help": (["--help"], to_the_end),
        "run --help": (["run", "--help"], to_the_end),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--python", action="append", default=[], help="the Python of another build")
    parser.add_argument("--runs", type=int, default=10)
    given = parser.parse_args()
    builds = [sys.executable, *given.python]
    print("| | " + " | ".join(f"{name}: clock, CPU s" for name in builds) + " |\n|---|" + "---|" * len(builds))
    for name, (arguments, measure) in moments(given.model).items():
        found: list[list[tuple[float, float]]] = [[] for _ in builds]
        for _ in range(given.runs + 1):  # the first warms up
            for python, times in zip(builds, found, strict=True):
                times.append(measure([python, "-m", "headrace", *arguments]))
        medians = [[statistics.median(part) for part in zip(*times[1:], strict=True)] for times in found]
        print(f"| {name} | " + " | ".join(f"{clock:.2f}, {used:.2f}" for clock, used in medians) + " |", flush=True)


if __name__ == "__main__":
    main()
