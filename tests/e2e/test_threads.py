"""Default number of threads of the native core: the affinity mask, limited by the control group's quota."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace import core
from headrace.backends.native.program import SPIN_MICROSECONDS, spin_microseconds, thread_pool
from headrace.cli.app import OPENMP_WAITING
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from tests.cli_shell import environment

ROOT = Path(__file__).parents[2]

# Membership as in /proc/self/cgroup, files below the root of the cgroup file system, CPUs' worth of time.
GROUPS: dict[str, tuple[str, dict[str, str], float]] = {
    "no quota": ("0::/box", {"box/cpu.max": "max 100000\n"}, 0.0),
    "no files": ("0::/box", {}, 0.0),
    "its own": ("0::/box", {"box/cpu.max": "150000 100000\n"}, 1.5),
    "in a container, which sees its group as the root": ("0::/", {"cpu.max": "50000 100000\n"}, 0.5),
    "a group above has less": (
        "0::/slice/box/job",
        {"slice/cpu.max": "100000 100000", "slice/box/cpu.max": "400000 100000", "slice/box/job/cpu.max": "max 100000"},
        1.0,
    ),
    "a group above has more": ("0::/slice/box", {"slice/cpu.max": "max 100000", "slice/box/cpu.max": "200000 100000"}, 2.0),
    "another group's": ("0::/box", {"other/cpu.max": "100000 100000"}, 0.0),
    "version 1": (
        "3:cpuset:/\n2:cpu,cpuacct:/docker/box\n0::/",
        {"cpu/docker/box/cpu.cfs_quota_us": "300000\n", "cpu/docker/box/cpu.cfs_period_us": "100000\n"},
        3.0,
    ),
    "version 1 without a quota": (
        "1:cpu:/docker/box",
        {"cpu/docker/box/cpu.cfs_quota_us": "-1", "cpu/docker/box/cpu.cfs_period_us": "100000"},
        0.0,
    ),
    "both versions": (
        "1:cpu:/box\n0::/box",
        {"cpu/box/cpu.cfs_quota_us": "400000", "cpu/box/cpu.cfs_period_us": "100000", "box/cpu.max": "200000 100000"},
        2.0,
    ),
    "damaged": ("0::/box\nnonsense\n", {"box/cpu.max": "much 0\n"}, 0.0),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_quota_of_a_control_group_bounds_the_threads(name: str, tmp_path: Path) -> None:
    membership, files, cpus = GROUPS[name]
    (tmp_path / "membership").write_text(membership)
    for path, words in files.items():
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).write_text(words)
    quota = core.module().cgroup_cpus(str(tmp_path / "membership"), str(tmp_path / "root"))
    assert quota == cpus
    cores = core.module().default_threads(0.0)
    assert core.module().default_threads(quota) == (min(cores, max(1, int(cpus + 0.25))) if cpus else cores)


def test_the_default_pool_size_follows_affinity_and_quota() -> None:
    info = core.module().cpu_info()
    assert info["cpus"] == len(os.sched_getaffinity(0))
    assert info["quota"] == core.module().cgroup_cpus()
    assert core.module().ThreadPool().size == info["threads"] == core.module().default_threads(info["quota"])
    assert core.module().default_threads(1.0) == 1


SAY = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {int(sys.argv[2])})  # before the core makes threads
from headrace.llm import LLM
from tests.cli_shell import environment
from headrace.backends.native.program import thread_pool
from headrace.data.params import SamplingParams
llm = LLM(sys.argv[1])
outputs = llm.generate("The mill", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
masks = {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}
print(llm.backend, thread_pool(0).size, sorted(map(sorted, masks)), outputs[0].outputs[0].token_ids)
"""


def test_an_engine_stays_on_its_allowed_cpus(tiny_gguf: Path) -> None:
    """One CPU: one thread, and no thread of the process is allowed anywhere else; the tokens are the same."""
    cpu = max(os.sched_getaffinity(0))
    command = [sys.executable, "-c", SAY, str(tiny_gguf), str(cpu)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, check=False
    )
    assert done.returncode == 0, done.stderr
    llm = LLM(tiny_gguf, threads=2)
    (output,) = llm.generate("The mill", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert done.stdout.strip() == f"native 1 [[{cpu}]] {output.outputs[0].token_ids}"


FEW = """
import os, resource, sys, threading
from headrace import core
from headrace.backends.native.program import thread_pool

def memory(name):
    return 1024 * int(dict(line.split(":", 1) for line in open("/proc/self/status"))[name].split()[0])

def threads():
    return len(os.listdir("/proc/self/task"))

before, soft = threads(), resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + (200 << 20), soft[1]))  # stacks of 8 MB: some twenty threads
try:
    thread_pool(1000)
except RuntimeError as error:
    print(type(error).__name__, error)
print(threads() - before)
resource.setrlimit(resource.RLIMIT_AS, soft)
pool = thread_pool(3)
print(pool.size, sum(pool.test_barriers(5)), threads() - before)
"""


def test_threads_that_cannot_be_started_are_an_error() -> None:
    """It says what to change; those that were started are gone, and a smaller pool works: the control."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, env=env, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    said, left, after = done.stdout.splitlines()
    assert re.match(r"ThreadsError only \d+ of 1000 threads could be started \(.+\); ask for fewer threads, or let", said)
    assert left == "0"
    assert after == "3 0 2"


def test_engines_share_the_threads_of_one_number() -> None:
    """None asked for is the same pool as its number asked for; another number is another pool."""
    default = thread_pool(0)
    assert thread_pool(default.size) is default
    assert thread_pool(default.size + 1) is not default


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (1.5, 1), (1.74, 1), (1.75, 2), (2.5, 2), (0.0, 1000)])
def test_a_part_of_a_cpu_is_a_thread_from_three_quarters_on(quota: float, threads: int) -> None:
    cores = core.module().default_threads(0.0)
    assert core.module().default_threads(quota) == min(cores, threads)


def test_workers_spin_shortly_under_a_quota() -> None:
    assert spin_microseconds(0.0) == SPIN_MICROSECONDS > 10 * spin_microseconds(1.5)


FORKED = """
import os, sys
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from tests.cli_shell import environment

def tokens(llm):
    return llm.generate("The mill", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids

parent = LLM(sys.argv[1], threads=2)
before = tokens(parent)
child = os.fork()
if child == 0:
    print(tokens(parent))
    print(tokens(LLM(sys.argv[1], threads=2)) == before, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(tokens(parent) == before)
"""


def test_a_forked_child_loads_its_own_model(tiny_gguf: Path) -> None:
    """The parent's model does not run in the child; the error says to load the model there, and that works."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tiny_gguf)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "True", "True"]  # the parent's model in the child, the child's, the parent's
    assert "load the model after the fork" in done.stderr


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_threads_of_torch_stay_the_callers(tiny_gguf: Path, backend: str) -> None:
    torch.set_num_threads(3)
    llm = LLM(tiny_gguf, backend=backend, threads=2)
    assert torch.get_num_threads() == 3
    during = []

    class Note:
        scope = "pointwise"

        def apply(self, logits: torch.Tensor, history: object, paths: object) -> torch.Tensor:
            during.append(torch.get_num_threads())
            return logits

    llm.generate("The mill", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), processors=[Note()])
    assert torch.get_num_threads() == 3
    assert set(during) == {1 if backend == "native" else 2}, "the control: a step has other threads"
    llm.close()
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "0"), ({"OMP_WAIT_POLICY": "active"}, "30000000000"), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_threads_of_torch_do_not_spin_in_commands(given: dict[str, str], spins: str, tmp_path: Path) -> None:
    """Unless the user's environment chooses how they wait. OpenMP prints its settings when torch is imported."""
    command = [sys.executable, "-m", "headrace", "train-masked", "numbers", "-o", str(tmp_path / "out"), "--steps", "1"]
    kept = {name: value for name, value in environment().items() if name not in OPENMP_WAITING}
    done = subprocess.run(
        command, env={**kept, **given, "OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
