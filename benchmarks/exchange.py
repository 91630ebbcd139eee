"""Time of one exchange between two processes: ranks of the native core and gloo (torch.distributed), in alternation.

    python -m benchmarks.exchange [--floats 576] [--rounds 7] [--count 3000]

An exchange adds one vector of float32 over both processes; both have the sum afterwards. Each figure is the median of the
rounds' medians, as process 0 measures them; a round measures the core and gloo once. Both processes stay awake. Exit code 1 if
the core takes more than `--most` microseconds or is not `--ratio` times as fast.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from headrace import core, host

WARM_UP = 200
GLOO_SHARE = 10  # gloo is slower: a tenth of the exchanges


class Process:
    """One of the two processes, with both kinds of exchange set up."""

    def __init__(self, rank: int, region: Any, folder: str, floats: int) -> None:
        import torch
        from torch import distributed

        self.ranks = core.module().Ranks(region, rank, timeout=60.0)
        self.x = np.random.default_rng(rank).normal(size=floats).astype(np.float32)
        torch.set_num_threads(1)
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        self.tensor, self._add = torch.from_numpy(self.x.copy()), distributed.all_reduce

    def core(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The sum and the seconds of each exchange."""
        sums, seconds = core.module().time_exchanges(self.ranks, self.x, count)
        return sums, seconds

    def gloo(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The same with gloo."""
        seconds = np.empty(count)
        for i in range(count):
            each = self.tensor.clone()
            start = time.perf_counter()
            self._add(each)
            seconds[i] = time.perf_counter() - start
        return each.numpy(), seconds

    def rounds(self, rounds: int, count: int) -> tuple[list[float], list[float]]:
        """Median seconds of an exchange, by round: the core, gloo."""
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(rounds):
            for times, exchange, number in ((ours, self.core, count), (theirs, self.gloo, count // GLOO_SHARE)):
                exchange(WARM_UP)
                seconds = exchange(number)[1]
                times.append(float(np.median(seconds)))
        assert np.array_equal(self.core(1)[0], self.gloo(1)[0]), "the sums differ"
        return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--floats", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--most", type=float, default=3.0, help="microseconds")
    parser.add_argument("--ratio", type=float, default=30.0)
    parser.add_argument("--follow", nargs=2, metavar=("DESCRIPTOR", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow:
        region = core.module().Region.open(int(args.follow[0]))
        Process(1, region, args.follow[1], args.floats).rounds(args.rounds, args.count)
        return
    region = core.module().Region(2, 1, args.floats, 64)
    with tempfile.TemporaryDirectory() as folder:
        again = [sys.executable, "-W", "ignore", "-m", "benchmarks.exchange", "--follow", str(region.descriptor), folder]
        sizes = ["--floats", str(args.floats), "--rounds", str(args.rounds), "--count", str(args.count)]
        other = subprocess.Popen([*again, *sizes], pass_fds=[region.descriptor])
        try:
            ours, theirs = Process(0, region, folder, args.floats).rounds(args.rounds, args.count)
        finally:
            other.wait(60)
    mine, gloo = statistics.median(ours) * 1e6, statistics.median(theirs) * 1e6
    print(f"{host.cpu_model()}, {os.cpu_count()} CPUs; {args.floats} floats, two processes, p50 of {args.rounds} rounds")
    print(f"core   {mine:8.2f} us   {min(ours) * 1e6:.2f} to {max(ours) * 1e6:.2f}")
    print(f"gloo   {gloo:8.2f} us   {min(theirs) * 1e6:.2f} to {max(theirs) * 1e6:.2f}")
    print(f"ratio  {gloo / mine:8.1f}")
    if mine > args.most or gloo / mine < args.ratio:
        raise SystemExit("slower than it should be")


if __name__ == "__main__":
    main()
