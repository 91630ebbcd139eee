"""Runs of a mixed load: every request alone in a plain engine, and all of them together in a small one in which steps fail,
requests are preempted, aborted and come from several threads."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.data.config import CacheConfig, EngineConfig
from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.data.plan import StepOutput, StepPlan
from headrace.data.types import Delta
from headrace.engine.scheduler import Scheduler
from headrace.kv.blocks import BlockManager
from headrace.llm import LLM
from tests.property.comparing import Difference, differences, unlikely_logprobs
from tests.property.mixed_loads import CONTEXT, DRAFTERS, Files, Job, Load

MOST_STEPS = 6000  # of a load; more is a hang
THREADS = 3
TREES = "takes chains, and"  # an engine whose drafter makes trees refuses verification by rejection

Answer = RequestOutput | str  # or why the request was refused


@dataclass
class Report:
    """What happened in a load."""

    differences: list[Difference] = field(default_factory=list)
    faults: int = 0
    preemptions: int = 0
    drafts: int = 0
    early: int = 0  # tokens that were written before the last layer
    aborted: int = 0


@contextmanager
def opened(load: Load, files: Files, **more: Any) -> Iterator[LLM]:
    settings: dict[str, Any] = {"backend": load.backend, "device": "cpu", "threads": 1, "kv_dtype": load.kv_dtype}
    settings |= {"dtype": "float64"} if load.backend == "torch" else {}
    with LLM(getattr(files, load.model), max_model_len=CONTEXT[load.model], **settings, **more) as llm:
        yield llm


def run_alone(load: Load, files: Files) -> list[Answer]:
    """Each request of a load by itself, without cache and drafts."""
    plain = {name: value for name, value in load.settings.items() if name not in DRAFTERS}
    with opened(load, files, **plain, speculate=None, enable_prefix_caching=False, max_num_seqs=8) as llm:
        return [_answer(llm, job) for job in load.jobs]


def _answer(llm: LLM, job: Job) -> Answer:
    try:
        (output,) = llm.generate([job.prompt], job.params, processors=job.processors)
    except ValueError as error:
        return str(error)
    return output


class Trouble:
    """Makes steps of an engine fail before and after they ran, and preempts requests between steps. Checks the books."""

    def __init__(self, llm: LLM, rng: random.Random, rate: float, check: bool) -> None:
        self.llm, self.rng, self.rate, self.check = llm, rng, rate, check
        self.faults = self.steps = 0
        self._step, self._execute = llm.engine.step, llm.runner.execute
        llm.engine.step, llm.runner.execute = self.step, self.execute  # type: ignore[method-assign]

    def step(self) -> list[Delta]:
        scheduler = self.llm.engine.scheduler
        if self.rng.random() < 0.04 and scheduler.running:
            scheduler._preempt(scheduler.running[-1])
        self.steps += 1
        assert self.steps < MOST_STEPS, "a request never ends"
        deltas = self._step()
        if self.check:
            self.llm.engine.check()
        return deltas

    def execute(self, plan: StepPlan) -> StepOutput:
        engine = self.llm.engine
        again = bool(plan.feeds) and any(request.in_flight for request in engine.scheduler.retries)
        strikes = not again and self.rng.random() < self.rate
        self.faults += strikes
        if strikes and self.rng.random() < 0.5:
            raise RuntimeError("a fault before the step")
        output = self._execute(plan)
        if strikes:
            raise RuntimeError("a fault after the step")
        return output


def shrink_pool(llm: LLM, blocks: int) -> None:
    """Leave a new engine so few blocks that requests drive each other out."""
    engine = llm.engine
    if llm.memory_plan.num_blocks <= blocks:
        return
    cache = CacheConfig(blocks, engine.config.cache.block_size, engine.config.cache.prefix_caching)
    engine.config = EngineConfig(engine.config.scheduler, cache)
    engine.blocks = BlockManager(cache, engine.blocks.groups)
    engine.scheduler = Scheduler(engine.config.scheduler, engine.blocks, 1)
    engine.children.scheduler = engine.scheduler
    engine.limits.cache = cache


def run_together(seed: int, load: Load, files: Files, alone: list[Answer], check: bool = True) -> Report:
    """All requests of a load in one engine, three times: in turns of one thread, again from the prefix cache, and from several
    threads."""
    rng, report = random.Random(seed), Report()
    settings = {
        "max_num_seqs": rng.choice([5, 8, 16]),
        "max_num_batched_tokens": rng.choice([12, 33, 70, 512]) if load.model == "decoder" else None,
        "enable_prefix_caching": rng.random() < 0.8,
    }
    with opened(load, files, **load.settings, **settings) as llm:
        shrink_pool(llm, rng.choice([30, 40, 60]))
        trouble = Trouble(llm, rng, rng.choice([0.0, 0.0, 0.1, 0.25]), check)
        for way in (_by_turns, _by_turns, _by_threads):
            answers, aborted = way(llm, load, rng)
            report.aborted += len(aborted)
            for at, found in answers.items():
                report.differences += _compared(load, at, alone[at], found, at in aborted)
                if isinstance(found, RequestOutput):
                    report.drafts += found.metrics.drafts
                    report.early += sum(one.layers < 4 for output in found.outputs for one in output.exits or ())
            if check:
                _check_empty(llm)
        report.faults, report.preemptions = trouble.faults, llm.engine.scheduler.preemptions
        if load.model == "decoder":
            report.differences += _unlikely(load, llm, answers)
    return report


def _by_turns(llm: LLM, load: Load, rng: random.Random) -> tuple[dict[int, Answer], set[int]]:
    """One thread that adds, aborts and steps."""
    order = list(range(len(load.jobs)))
    rng.shuffle(order)
    arrivals = {at: rng.randrange(30) for at in order}
    aborts = {at: arrivals[at] + rng.randrange(40) for at in order if rng.random() < 0.15}
    answers: dict[int, Answer] = {}
    aborted: set[int] = set()
    step = 0
    while len(answers) < len(load.jobs) or llm.engine.busy:
        for at in order:
            if arrivals[at] == step:
                answers[at] = _added(llm, load.jobs[at])
            found = answers.get(at)
            if aborts.get(at) == step and isinstance(found, RequestOutput) and not found.finished:
                llm.engine.abort(found.request_id)
                aborted.add(at)
        if llm.engine.busy:
            llm.step()
        step += 1
    return answers, aborted


def _added(llm: LLM, job: Job) -> Answer:
    try:
        return llm.add(job.prompt, job.params, processors=job.processors)
    except ValueError as error:
        return str(error)


def _by_threads(llm: LLM, load: Load, rng: random.Random) -> tuple[dict[int, Answer], set[int]]:
    """Several threads that each generate some of the requests, one after the other; they share steps."""
    answers: dict[int, Answer] = {}
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for at in range(first, len(load.jobs), THREADS):
                answers[at] = _answer(llm, load.jobs[at])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers, set()


def _compared(load: Load, at: int, alone: Answer, found: Answer, aborted: bool) -> list[Difference]:
    job = load.jobs[at]
    name = f"request {at} ({job.what})"
    if not job.exact and isinstance(found, str) and TREES in found:
        return []
    if isinstance(alone, str) or isinstance(found, str):
        return [] if alone == found else [Difference(name, "refused", alone, found)]
    if not job.exact:
        return [] if found.error is None else [Difference(name, "error", None, found.error)]
    return differences(name, alone, found, exact=load.backend == "native", begins=aborted)


def _check_empty(llm: LLM) -> None:
    """No block and no slot is held by a request that has ended."""
    engine = llm.engine
    assert engine.blocks.used == 0, f"{engine.blocks.used} blocks have leaked"
    assert sorted(engine.scheduler._slots) == list(range(engine.config.scheduler.max_num_seqs)), "a slot has leaked"
    assert llm.callers.open == 0


def _unlikely(load: Load, llm: LLM, answers: dict[int, Answer]) -> list[Difference]:
    """Requests that are verified by rejection draw other tokens next to other drafts. Their log-probabilities must be those
    of the model."""
    found: list[Difference] = []
    for at, answer in answers.items():
        job = load.jobs[at]
        if job.exact or not isinstance(answer, RequestOutput) or not answer.outputs[0].token_ids:
            continue
        text = [*job.prompt, *answer.outputs[0].token_ids]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=len(job.prompt))
        if len(text) < CONTEXT[load.model]:
            (scored,) = llm.generate([text], params)
            found += unlikely_logprobs(f"request {at} ({job.what})", answer, scored, exact=load.backend == "native")
    return found
