"""Cost of serving compared with offline generation, and the effect of a long prompt on running answers.

    python -m benchmarks.serving saturation MODEL [--requests 64 --prompt 32 --answer 64]
    python -m benchmarks.serving interference MODEL [--chunks 128,256,512]

The server is `headrace serve` in processes of its own on this machine; the machine should be otherwise idle.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence

import numpy as np

from headrace import LLM, SamplingParams
from headrace.bench.load.client import PendingRequest, Target
from headrace.bench.load.drive import drive
from headrace.bench.load.summary import summary
from headrace.bench.load.workload import ScheduledRequest

EXACT = {"temperature": 0.0, "ignore_eos": True}
STREAMS = 8  # that are being answered while a long prompt comes
PATIENCE = 120.0  # seconds for a server to be ready


@contextlib.contextmanager
def server(model: str, *options: str) -> Iterator[tuple[Target, int]]:
    """A server of a model, and the web process's id."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "headrace",
        "serve",
        model,
        "--served-model-name",
        "m",
        "--port",
        str(port),
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            time.sleep(0.05)
        else:
            raise SystemExit("the server did not become ready")
        yield Target(f"http://127.0.0.1:{port}/v1", "m", extra=EXACT), process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def saturation(model: str, requests: int, prompt: int, answer: int, rounds: int) -> None:
    """The same requests through the server, 32 at once, and through `LLM.generate`, in turns."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    cores = len(os.sched_getaffinity(0))
    with server(model) as (target, pid), contextlib.closing(LLM(model)) as llm:
        drive(target, [ScheduledRequest(0.0, prompt, 4, seed=n) for n in range(8)], at_once=8)
        llm.generate([ScheduledRequest(0.0, prompt, 4, seed=n).ids() for n in range(8)], params.replace(max_tokens=4))
        for number in range(rounds):
            jobs = [ScheduledRequest(0.0, prompt, answer, seed=1000 * (number + 1) + n) for n in range(requests)]
            told = summary(drive(target, jobs, at_once=32, watch=[pid]), {})
            begun = time.perf_counter()
            llm.generate([job.ids() for job in jobs], params)
            offline = requests * answer / (time.perf_counter() - begun)
            served = told["output_tokens_per_s"]
            apart = told["output_tokens"] / (told["seconds"] - told["client_cpu_s"] / cores)
            print(
                f"served {served:.1f} tokens/s ({apart:.1f} with the client's CPU apart), offline {offline:.1f}: "
                f"{served / offline:.3f} ({apart / offline:.3f}); "
                f"web process {told['cpu_us_per_token'][str(pid)]:.1f} us a token, "
                f"client {1e6 * told['client_cpu_s'] / told['output_tokens']:.1f}; failed {told['failed']}",
                flush=True,
            )


def interference(model: str, chunks: list[int], prompt: int, answer: int, rounds: int) -> None:
    """p99 of the time between tokens of 8 answers, without and with a prompt of 4,000 tokens that arrives amid them."""
    for chunk in chunks:
        beside = chunk - STREAMS  # what a step has left for the prompt when all answers take their token
        times: list[tuple[float, ...]] = []
        for number in range(rounds):
            with contextlib.closing(LLM(model, preset="online", max_num_batched_tokens=beside)) as llm:
                alone = steps(llm, ScheduledRequest(0.0, prompt, 1, seed=1).ids())
            with server(model, "--max-num-batched-tokens", str(chunk)) as (target, _):
                between(target, 8, None, seed=50)
                quiet = between(target, answer, None, seed=100)
                loud = between(target, answer, ScheduledRequest(0.0, prompt, 1, seed=7), seed=200)
            before, after = (float(np.percentile(gaps, 99)) * 1000 for gaps in (quiet, loud))
            times.append((before, after, after - before, float(np.mean(alone)) * 1000, max(alone) * 1000))
            say(f"chunk {chunk}, round {number + 1} ({len(quiet)} and {len(loud)} times)", times[-1])
        say(f"chunk {chunk}, medians", np.median(times, axis=0).tolist())


def say(what: str, times: Sequence[float]) -> None:
    before, after, rise, mean, slowest = times
    print(
        f"{what}: p99 {before:.1f} ms without, {after:.1f} ms with, risen by {rise:.1f} ms; "
        f"a chunk alone takes {mean:.1f} ms, the slowest {slowest:.1f}",
        flush=True,
    )


def steps(llm: LLM, prompt: list[int]) -> list[float]:
    """Seconds of each step of a prompt that is alone."""
    llm.engine.add(prompt[:64], SamplingParams(max_tokens=2))
    while llm.engine.busy:
        llm.engine.step()
    llm.engine.add(prompt, SamplingParams(max_tokens=1))
    times: list[float] = []
    while llm.engine.busy:
        begun = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - begun)
    return times


def between(target: Target, answer: int, long: ScheduledRequest | None, seed: int) -> list[float]:
    """Times between the tokens of 8 answers; `long` is sent when all have begun."""
    streams = [PendingRequest(target, ScheduledRequest(0.0, 16, answer, seed=seed + number)) for number in range(STREAMS)]
    late = PendingRequest(target, long) if long is not None else None

    async def main() -> None:
        tasks = [asyncio.create_task(one.run(time.perf_counter())) for one in streams]
        while not all(one.begun for one in streams):
            await asyncio.sleep(0.005)
        if late is not None:
            await late.run(time.perf_counter())
        await asyncio.gather(*tasks)

    asyncio.run(main())
    answers = [one.read() for one in streams]
    assert all(one.error is None for one in answers), [one.error for one in answers]
    return [float(gap) for one in answers for gap in np.diff(one.times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("saturation", "interference"))
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--chunks", default="128,256,512")
    given = parser.parse_args()
    if given.what == "saturation":
        saturation(given.model, given.requests, given.prompt or 32, given.answer, given.rounds)
    else:
        interference(
            given.model, [int(one) for one in given.chunks.split(",")], given.prompt or 4000, given.answer, given.rounds
        )


if __name__ == "__main__":
    main()
