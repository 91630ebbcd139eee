"""The native core and its process: instruction sets by name, several engines, forks, and Ctrl-C in the middle of a step."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import core
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from tests.tiny_native import Feeder, native_model, native_program

ROOT = Path(__file__).parents[2]
PROMPTS = ["水渠里的水", "The water in the headrace", "turns"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

SAY = """
import json, sys
from headrace.llm import LLM
from headrace import core
from headrace.data.params import SamplingParams
llm = LLM(sys.argv[1], threads=2)
outputs = llm.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
print(json.dumps([llm.backend, core.module().cpu_info()["isa"], [output.outputs[0].token_ids for output in outputs]]))
"""


@pytest.fixture(scope="module")
def llm(tiny_gguf: Path) -> LLM:
    made = LLM(tiny_gguf, threads=2)
    assert made.backend == "native"
    return made


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def run_script(model: Path, isa: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HEADRACE_ISA": isa}
    command = [sys.executable, "-c", SAY, str(model), json.dumps(PROMPTS)]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("isa", core.module().cpu_info()["isas"])
def test_an_instruction_set_is_chosen_by_the_environment(isa: str, llm: LLM, tiny_gguf: Path) -> None:
    done = run_script(tiny_gguf, isa)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["native", isa, tokens(llm)]


def test_an_unknown_instruction_set_is_refused(tiny_gguf: Path) -> None:
    done = run_script(tiny_gguf, "avx1024")
    assert done.returncode != 0
    known = "amx, amxall, avx512, avx512vnni, avxvnni, avx2 or plain"
    assert done.stderr.splitlines()[-1].endswith(f"unknown instruction set 'avx1024'; use {known}")


def test_two_engines_work_at_once(llm: LLM, tiny_gguf: Path) -> None:
    """They share the threads of the process, and take turns step by step."""
    other, wanted = LLM(tiny_gguf, threads=2), tokens(llm)
    found: dict[int, list[list[list[int]]]] = {}

    def work(number: int, mine: LLM) -> None:
        found[number] = [tokens(mine) for _ in range(5)]

    workers = [threading.Thread(target=work, args=pair) for pair in enumerate((llm, other))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {0: [wanted] * 5, 1: [wanted] * 5}


def test_a_step_releases_the_gil() -> None:
    """Threads that may not be interrupted for an hour: another one gets its turn only where a step gives up Python's lock."""
    runner, step = native_program(native_model("llama")), core.module().Step()
    step.feed(Feeder(runner, [[1, 2, 3]]).sequences[0], 0, 3, 1)
    gate, ran, before = threading.Lock(), [], sys.getswitchinterval()

    def other() -> None:
        with gate:
            ran.append(True)

    gate.acquire()
    worker = threading.Thread(target=other)
    try:
        sys.setswitchinterval(3600)
        worker.start()  # comes back when the thread waits at the gate
        gate.release()
        for _ in range(1000):
            sum(range(1000))
        assert not ran, "the control: Python alone gives up nothing"
        for _ in range(10_000):
            if ran:
                break
            runner.core.run(step)
        assert ran
    finally:
        sys.setswitchinterval(before)
        worker.join()


def test_a_forked_child_raises_an_error_with_advice(llm: LLM) -> None:
    wanted = tokens(llm)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            (output,) = llm.generate(PROMPTS[:1], GREEDY)
            os.write(write, (output.error or "no error").encode())
        finally:
            os._exit(0)  # whatever happens: the tests go on in the parent alone
    os.close(write)
    with os.fdopen(read) as pipe:
        words = pipe.read()
    os.waitpid(child, 0)
    assert "this process was forked after the native core had started its threads" in words
    assert "spawn or forkserver" in words
    assert tokens(llm) == wanted


def test_ctrl_c_during_a_step_keeps_the_engine_usable(llm: LLM) -> None:
    """Pressed again and again while requests run: they end early, and what follows is as if nothing had been."""
    wanted = tokens(llm)

    def until(pressed: threading.Timer) -> None:
        pressed.start()
        while True:
            llm.generate(PROMPTS, GREEDY)

    for delay in (0.0, 0.001, 0.003, 0.01, 0.02):
        pressed = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            until(pressed)
        pressed.join()
        assert not llm.engine.busy
        assert llm.engine.blocks.used == 0
    assert tokens(llm) == wanted


def test_a_signal_during_a_step_acts_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    execute, finished = llm.runner.execute, []

    def interrupted(plan: object) -> object:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)
        result = execute(plan)
        finished.append(plan)
        return result

    monkeypatch.setattr(llm.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert finished, "the step was carried through"


def test_an_exception_of_a_signal_handler_reaches_the_caller(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit by SIGALRM. Raised inside the step it would count as an error of the step, and the call would run on."""
    wanted, execute = tokens(llm), llm.runner.execute

    def ring(*_: object) -> None:
        raise TimeoutError("out of time")

    def alarmed(plan: object) -> object:
        signal.raise_signal(signal.SIGALRM)
        return execute(plan)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        monkeypatch.setattr(llm.runner, "execute", alarmed)
        with pytest.raises(TimeoutError, match="out of time"):
            llm.generate(PROMPTS, GREEDY)
    finally:
        signal.signal(signal.SIGALRM, before)
    monkeypatch.undo()
    assert (llm.engine.busy, llm.engine.blocks.used, llm.callers.open) == (False, 0, 0)
    assert tokens(llm) == wanted


def test_ctrl_c_again_during_aborts_leaves_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside the step, and one at each request that is aborted because of it."""
    wanted, abort, execute, pressed = tokens(llm), llm.engine.abort, llm.runner.execute, []

    def pressing(hook: Any) -> Any:
        def run(*arguments: Any) -> Any:
            pressed.append(hook)
            signal.raise_signal(signal.SIGINT)
            return hook(*arguments)

        return run

    monkeypatch.setattr(llm.runner, "execute", pressing(execute))
    monkeypatch.setattr(llm.engine, "abort", pressing(abort))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert pressed.count(abort) >= len(PROMPTS)
    assert (llm.engine.busy, llm.engine.blocks.used, llm.callers.open) == (False, 0, 0)
    assert tokens(llm) == wanted


def test_a_signal_while_requests_are_queued_leaves_no_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the engine's taking a request and the caller's knowing of it."""
    wanted, add = tokens(llm), llm.engine.add

    def interrupted(*arguments: Any, **options: Any) -> Any:
        request = add(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return request

    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.engine.busy
    assert llm.engine.blocks.used == 0
    monkeypatch.undo()
    assert tokens(llm) == wanted


WITHOUT_MEMORY = """
import resource
import numpy as np
from headrace import core

VOCAB, ROWS = 200_000, 40
pool, arena = core.module().ThreadPool(2), core.module().Arena(1 << 21)
values = np.random.default_rng(1).standard_normal((VOCAB, 32)).astype(np.float32)
table = core.module().pack(values.view(np.uint8), "F32", VOCAB, 32, arena, pool)
program = core.module().Program(pool, core.module().KVPool(1, 4, 16, 1, 16), 32, VOCAB)
program.begin("embed")
program.embed(table, 0)
program.begin("head")
own, logits, maxima = (program.buffer(*shape) for shape in (("bf16", 32, True), ("float", VOCAB), ("float", VOCAB // 64)))
program.quantize((1, 0), own)
program.linear(core.module().PackedLinear([table]), own, "logits", (logits, 0), maxima=maxima)
sequence, step = core.module().Sequence(list(range(ROWS)), core.module().SampleParams()), core.module().Step()
sequence.set_table(0, 0, [0, 1, 2])

def errors():
    step.clear()
    step.feed(sequence, 0, ROWS, ROWS)
    for row in range(ROWS):
        step.logits(row)  # 0.8 MB each
    program.run(step)
    return [step.error(row) for row in range(ROWS)]

def size():
    return 1024 * int(dict(line.split(":", 1) for line in open("/proc/self/status"))["VmSize"].split()[0])

step.feed(sequence, 0, ROWS, ROWS)
program.run(step)  # the step's own memory
soft = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size() + (8 << 20), soft[1]))
tight = errors()
resource.setrlimit(resource.RLIMIT_AS, soft)
print(sorted(set(tight)), 0 < sum(map(bool, tight)) < ROWS, set(errors()))
"""


def test_failed_allocations_are_errors_of_the_request() -> None:
    """Answers for which there is no memory say so, the others are there, and with memory all are: the control."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", WITHOUT_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    words = "there was not enough memory to answer; ask for less at once, or give the process more"
    assert done.stdout.strip() == f"{['', words]} True {{''}}"


OUTLIVED = """
import sys, threading, time
from headrace.llm import LLM
from headrace import core
core.module().set_leak_warnings("listed" in sys.argv)
llm, begun = LLM(sys.argv[1], threads=1), threading.Event()

def hold(kept):
    begun.set()
    time.sleep(600)

if "held" in sys.argv:
    threading.Thread(target=hold, args=(llm,), daemon=True).start()
    begun.wait()
"""


@pytest.mark.parametrize(("how", "leaks"), [(["held"], False), (["listed"], False), (["held", "listed"], True)])
def test_an_engine_held_by_a_thread_at_exit_is_no_leak(tiny_gguf: Path, how: list[str], leaks: bool) -> None:
    """Nobody hears of it; and nothing else is left, which would be listed: the control."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", OUTLIVED, str(tiny_gguf), *how]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=600)
    assert done.returncode == 0
    assert ("nanobind: leaked" in done.stderr) is leaks
    assert leaks or done.stderr == ""
