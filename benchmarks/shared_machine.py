"""Decoding speed on a machine that other processes use, with one and two threads, for two builds in alternation.

    python -m benchmarks.shared_machine MODEL --before OTHER_VENV/bin/python [--after PYTHON] [--rounds 9] [--seconds 1]

Scenes: quiet; next to one busy process; next to ten; two engines at once (the sum of their tokens/s). Each cell is the median
of the rounds in tokens/s at batch 1; a round measures every build and number of threads once, in
random order, so that a drift of the machine favours none. Nothing else should run.
"""

import argparse
import random
import statistics
import subprocess
import sys

from benchmarks.busy import busy

CHILD = """
import os, sys, time
os.environ["OMP_NUM_THREADS"] = "1"
from headrace import LLM, SamplingParams
model, threads = sys.argv[1], int(sys.argv[2])
llm = LLM(model, threads=threads, max_model_len=512)
params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
llm.generate(["Tell me a story."], params)
print("ready", flush=True)
for line in sys.stdin:
    start, tokens = time.perf_counter(), 0
    while time.perf_counter() - start < float(line):
        llm.generate(["Tell me a story."], params)
        tokens += 32
    print(tokens / (time.perf_counter() - start), flush=True)
"""
SCENES = {"quiet": (0, 1), "1 busy": (1, 1), "10 busy": (10, 1), "2 engines": (0, 2)}  # busy processes, engines at once
THREADS = (1, 2)


class Engine:
    """A process that holds a loaded model and decodes for some seconds when it is asked to."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        command = [python, "-W", "ignore", "-c", CHILD, model, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.process.args!r} ended; its message is above")
        return line.strip()

    def start(self, seconds: float) -> None:
        assert self.process.stdin is not None
        print(seconds, file=self.process.stdin, flush=True)

    def rate(self) -> float:
        return float(self._answer())


def measure(engines: list[Engine], seconds: float) -> float:
    for engine in engines:
        engine.start(seconds)
    return sum(engine.rate() for engine in engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    args = parser.parse_args()
    builds = {"before": args.before, "after": args.after}
    most = max(SCENES[scene][1] for scene in args.scenes)
    engines = {
        (build, threads): [Engine(python, args.model, threads) for _ in range(most)]
        for build, python in builds.items()
        for threads in THREADS
    }
    print(
        f"{'':<12}"
        + "".join(f"{build + ', ' + str(threads):>12}" for build, threads in engines)
        + "   tokens/s by build, threads"
    )
    shuffled = random.Random(0)
    for scene in args.scenes:
        load, count = SCENES[scene]
        rates: dict[tuple[str, int], list[float]] = {cell: [] for cell in engines}
        with busy(load):
            for _ in range(args.rounds):
                for cell in shuffled.sample(list(engines), len(engines)):
                    rates[cell].append(measure(engines[cell][:count], args.seconds))
        print(f"{scene:<12}" + "".join(f"{statistics.median(each):>12.1f}" for each in rates.values()), flush=True)
    for group in engines.values():
        for engine in group:
            engine.process.kill()


if __name__ == "__main__":
    main()
