"""Static and continuous batching on one trace, and KV memory by reservation scheme: `python -m benchmarks.batching`."""

import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from benchmarks import reservation
from benchmarks.command import run
from benchmarks.fake_model import VOCAB, Deferred, FakeRunner
from benchmarks.reservation import TraceRequest
from headrace.cli.output import print_table, say
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.progress import counted
from headrace.engine.engine import Engine
from headrace.llm import LLM
from headrace.startup.loading import open_model

POLICIES = ("static", "continuous")
MAX_LEN = 2048
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """One policy on one trace. `waste`: share of the slots in allocated blocks that hold no token, over all steps."""

    policy: str
    steps: int
    tokens: int
    seconds: float
    waste: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def trace(count: int, seed: int = 0, mean_in: int = 300, mean_out: int = 150, sigma: float = 1.0) -> list[TraceRequest]:
    """Requests with log-normal, heavy-tailed lengths, truncated to the context; equal for equal seeds."""
    rng = random.Random(seed)

    def length(mean: int, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    jobs = []
    for _ in range(count):
        prompt = length(mean_in, MAX_LEN // 2)
        jobs.append(TraceRequest(prompt, length(mean_out, MAX_LEN - prompt)))
    return jobs


def drive(engine: Engine, jobs: list[TraceRequest], vocab_size: int, policy: str, seed: int = 0) -> PolicyResult:
    """Run all requests at once through an engine, with random prompts and the output lengths of the trace."""
    rng = random.Random(seed)
    for job in jobs:
        prompt = [rng.randrange(vocab_size) for _ in range(job.prompt)]
        engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=job.output, ignore_eos=True))
    steps = held = filled = tokens = 0
    start = time.perf_counter()
    while engine.busy:
        tokens += sum(len(delta.token_ids) for delta in engine.step())
        steps += 1
        held += engine.blocks.used * engine.blocks.block_size
        filled += sum(seq.kv.computed[0] for request in engine.scheduler.running for seq in request.seqs)
    return PolicyResult(policy, steps, tokens, time.perf_counter() - start, 1 - filled / max(held, 1))


def run_on_fake_model(jobs: list[TraceRequest], policy: str, max_num_seqs: int = 16) -> PolicyResult:
    """Run on the fake model, which costs nothing: only steps are measured."""
    blocks = max_num_seqs * MAX_LEN // BLOCK_SIZE
    scheduler = SchedulerConfig(max_num_seqs, 512, MAX_LEN, policy)
    config = EngineConfig(scheduler, CacheConfig(blocks, BLOCK_SIZE, prefix_caching=False))
    engine = Engine(Deferred(FakeRunner(blocks, BLOCK_SIZE), 1), config, vocab_size=VOCAB)
    return drive(engine, jobs, VOCAB - 1, policy)


def memory_table(jobs: list[TraceRequest], memory: int = 16 * MAX_LEN) -> dict[str, reservation.MemoryUse]:
    """Memory use of each reservation scheme on the same trace."""
    table = {name: reservation.contiguous(jobs, memory, reserve) for name, reserve in reservation.schemes(MAX_LEN).items()}
    table[f"paged ({BLOCK_SIZE})"] = reservation.paged(jobs, memory, BLOCK_SIZE)
    return table


def run_on_model(model: str, jobs: list[TraceRequest], policy: str, max_num_seqs: int = 16) -> PolicyResult:
    """Run on a real model; requests have at most MAX_LEN tokens."""
    llm = LLM(
        model,
        policy=policy,
        preset="online",
        max_num_seqs=max_num_seqs,
        max_model_len=min(MAX_LEN, open_model(model).config.max_position),
        enable_prefix_caching=False,
    )
    result = drive(llm.engine, jobs, llm.model_config.vocab_size, policy)
    llm.close()
    return result


def batching(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model to run a part of the trace on, besides the fake one.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace.")] = 200,
    on_model: Annotated[int, typer.Option(min=1, help="How many of them run on MODEL.")] = 32,
    seqs: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 0,
) -> None:
    """Static against continuous batching on one trace, and KV memory under each reservation scheme."""
    jobs = trace(requests, seed)
    rows = [_row(None, run_on_fake_model(jobs, policy, seqs)) for policy in POLICIES]
    if model is not None:
        say(f"running {counted(min(on_model, requests), 'requests')} on {model} under each policy")
        rows += [_row(model, run_on_model(model, jobs[:on_model], policy, seqs)) for policy in POLICIES]
    print_table(("model", "policy", "steps", "tokens", "tokens/step", "tokens/s", "KV waste"), rows)
    print()
    table = memory_table(jobs, seqs * MAX_LEN)
    columns = ("KV memory", "steps", "used", "reserved", "internal", "external", "waste")
    print_table(columns, [_shares(name, shares) for name, shares in table.items()])


def _row(model: str | None, result: PolicyResult) -> tuple[str, ...]:
    """Cells of one policy. The fake model has no speed."""
    speed = f"{result.tokens_per_second:.1f}" if model else "-"
    counts = (str(result.steps), str(result.tokens), f"{result.tokens / result.steps:.2f}")
    return (model or "fake model", result.policy, *counts, speed, f"{result.waste:.1%}")


def _shares(name: str, shares: reservation.MemoryUse) -> tuple[str, ...]:
    whole = shares.taken + shares.external
    parts = (shares.used, shares.reserved, shares.internal, shares.external)
    return (name, str(shares.steps), *(f"{part / whole:.1%}" for part in parts), f"{shares.waste:.1%}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (
        ("", "Steps of a fake model: policies and KV memory."),
        ("smollm2-135m --on-model 16", "And the speed of a real one."),
    )
    return run(batching, "batching", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
