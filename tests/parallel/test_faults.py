"""Processes of a divided model that are killed or stopped at random steps: one clear error, no hang, no process left."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace import core
from headrace.data.params import SamplingParams
from headrace.data.plan import RankLostError
from headrace.llm import LLM
from headrace.parallel.pipeline import executor
from headrace.parallel.ranks import lead
from tests.parallel.engines import METHODS, PROMPTS, marked, no_process_is_left, opened
from tests.tiny_files import Sizes, write_tiny_gguf

__all__ = ["no_process_is_left"]

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

LAYOUTS = ({"tp": 2}, {"pp": 3}, {"tp": 2, "pp": 2})
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
STEPS = 12  # last step before which a process is hit
LIMIT = 120  # seconds until a test counts as hanging
LOST = re.compile(
    r"(stage \d, )?rank \d of 2 (has ended|has not answered for \d+ s); the model is closed, open it again"
    r"|stage \d \(layers \d to \d\) (ended \(signal SIGKILL\)|does not answer)"
    r"|no rows for \d s: a stage of the pipeline hangs"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = Sizes(heads=9, kv_heads=3, head_dim=64, ffn=512)
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", layers=3, sizes=sizes)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "PATIENCE", 2.0)
    monkeypatch.setattr(executor, "STUCK_AFTER", 6.0)
    monkeypatch.setattr(executor, "PATIENCE", 1.0)


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block after a time, in which this process was not stopped: signals of a timer then join."""
    ticks = 0

    def tick(*_: object) -> None:
        nonlocal ticks
        ticks += 1
        if ticks > seconds:
            raise TimeoutError(f"the engine hangs for {seconds} s")

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def role(pid: int) -> tuple[bool, int]:
    """Whether a process is a stage (otherwise a follower), and its parent."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return b"pipeline.stage" in Path(f"/proc/{pid}/cmdline").read_bytes(), int(parent)


def fill(llm: LLM, rng: random.Random) -> None:
    """Requests of all methods, of which some are still running at any step below STEPS."""
    for params in rng.sample(list(METHODS.values()), 3):
        llm.add(rng.choice(PROMPTS), params)
    for number in range(3):
        llm.add(rng.choice(PROMPTS), SamplingParams(max_tokens=90, ignore_eos=True, seed=number))


def run(llm: LLM, steps: int = 500) -> None:
    for _ in range(steps):
        llm.step()


def hit(model: Path, seed: int, layout: dict[str, int], number: int, mark: str) -> None:
    """Hit one process with a signal before a random step. The engine must end with one error that names a part."""
    rng = random.Random(f"{seed} {layout} {number}")
    with limited(LIMIT), opened(model, **layout) as llm:
        fill(llm, rng)
        victims = sorted(marked(mark), key=role)
        assert len(victims) == layout.get("tp", 1) * layout.get("pp", 1) - 1
        run(llm, rng.randrange(STEPS))
        os.kill(rng.choice(victims), number)
        with pytest.raises(RankLostError) as error:
            run(llm)
        assert LOST.fullmatch(str(error.value)), error.value
        with pytest.raises(RankLostError):
            llm.generate("a", max_tokens=1)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 16))])
def test_a_process_that_is_killed_or_stopped_at_a_random_step(
    model: Path, seed: int, layout: dict[str, int], number: int, no_process_is_left: str
) -> None:
    hit(model, seed, layout, number, no_process_is_left)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_follower_of_a_stage(model: Path, number: int, no_process_is_left: str) -> None:
    """The error comes through the pipeline, and names the stage and the rank."""
    with limited(LIMIT), opened(model, tp=2, pp=2) as llm:
        (follower,) = (pid for pid in marked(no_process_is_left) if not role(pid)[0] and role(pid)[1] != os.getpid())
        llm.add("The mill", SamplingParams(max_tokens=100, ignore_eos=True))
        run(llm, 3)
        os.kill(follower, number)
        with pytest.raises(RankLostError, match=r"^stage 0, rank 1 of 2 has (ended|not answered for 2 s); the model is closed"):
            run(llm)


def test_an_engine_that_closes_while_a_follower_is_stopped(model: Path, no_process_is_left: str) -> None:
    with limited(LIMIT), opened(model, tp=2, pp=2) as llm:
        llm.generate("The mill", max_tokens=2)
        for pid in marked(no_process_is_left):
            if not role(pid)[0]:
                os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_is_killed_leaves_no_process(model: Path, number: int, no_process_is_left: str) -> None:
    script = (
        "from headrace import LLM\n"
        f"llm = LLM({str(model)!r}, tp=2, pp=2, threads=1, kv_cache_memory='8MiB')\n"
        "print('ready', flush=True)\nllm.generate('The mill', max_tokens=200, ignore_eos=True, n=8)\ninput()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        assert len(marked(no_process_is_left)) == 4
        time.sleep(random.Random(number).random() / 2)
        program.send_signal(number)
    assert program.returncode == -number
