"""Static against continuous batching on one trace, and what paging saves: steps, tokens/s, KV memory."""

import math
import random
import time
from dataclasses import dataclass

from headrace.bench import reservation
from headrace.bench.fake_model import VOCAB, Deferred, FakeRunner
from headrace.bench.reservation import Job
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.engine.engine import Engine
from headrace.llm import LLM
from headrace.startup.loading import open_model

POLICIES = ("static", "continuous")
MAX_LEN = 2048
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one trace. `waste`: share of the slots in held blocks that hold no token, over all steps."""

    policy: str
    steps: int
    tokens: int
    seconds: float
    waste: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def trace(count: int, seed: int = 0, mean_in: int = 300, mean_out: int = 150, sigma: float = 1.0) -> list[Job]:
    """Log-normal lengths with heavy tails, cut to the context; the same for the same seed."""
    rng = random.Random(seed)

    def length(mean: int, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    jobs = []
    for _ in range(count):
        prompt = length(mean_in, MAX_LEN // 2)
        jobs.append(Job(prompt, length(mean_out, MAX_LEN - prompt)))
    return jobs


def drive(engine: Engine, jobs: list[Job], vocab_size: int, policy: str, seed: int = 0) -> Result:
    """All jobs at once through an engine; prompts are random tokens, answers have the length the trace says."""
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
    return Result(policy, steps, tokens, time.perf_counter() - start, 1 - filled / max(held, 1))


def on_fake_model(jobs: list[Job], policy: str, max_num_seqs: int = 16) -> Result:
    """A model that costs nothing: what is counted is steps."""
    blocks = max_num_seqs * MAX_LEN // BLOCK_SIZE
    scheduler = SchedulerConfig(max_num_seqs, 512, MAX_LEN, policy)
    config = EngineConfig(scheduler, CacheConfig(blocks, BLOCK_SIZE, prefix_caching=False))
    engine = Engine(Deferred(FakeRunner(blocks, BLOCK_SIZE), 1), config, vocab_size=VOCAB)
    return drive(engine, jobs, VOCAB - 1, policy)


def memory_table(jobs: list[Job], memory: int = 16 * MAX_LEN) -> dict[str, reservation.Shares]:
    """Each scheme's use of the same memory on the same trace."""
    table = {name: reservation.contiguous(jobs, memory, reserve) for name, reserve in reservation.schemes(MAX_LEN).items()}
    table[f"paged ({BLOCK_SIZE})"] = reservation.paged(jobs, memory, BLOCK_SIZE)
    return table


def on_model(model: str, jobs: list[Job], policy: str, max_num_seqs: int = 16) -> Result:
    """The same on a real model; every job at most 2,048 tokens."""
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
