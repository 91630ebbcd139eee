"""What mutants are tested with: copies of the tree, forked processes that run pytest in them, the tests of every line."""

import ast
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "COVERAGE_CORE": "ctrace"}

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
TESTS = ("ops", "unit", "property", "e2e")
# Tests that start programs, and those of what no mutant is made of.
ELSEWHERE = "bench beside cli docs examples gguf hub imports install interrupt mutants native_build native_process".split()
ELSEWHERE += "native_start peers progress safetensors tokenizer".split()
MARKS = "not slow and not weights and not peers and not ray and not net"
# Imported once, before anything is forked: this takes seconds.
AHEAD = "torch numpy scipy.stats hypothesis jsonschema msgspec llguidance tokenizers jinja2 safetensors gguf rich".split()
LIMIT = 60.0  # seconds for the tests of a mutant
BUDGET = 30.0  # of them by the record: a mutant that takes twice that hangs
LONGEST = 20.0  # seconds of a test that is taken
RECORDING = 900.0  # seconds for a file of tests
FOREIGN = 90  # exit status: what was imported is not the copy
# An editable install puts a finder of its own before sys.path.
NO_FINDER = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""


@dataclass(slots=True)
class Job:
    """`run`, in a process and in a copy of the tree where `file` says `code`; `done` gets its exit status, None where the
    time was over, and the seconds."""

    run: Callable[[], int]
    done: Callable[[int | None, float], None]
    file: str = ""
    code: str = ""
    limit: float = LIMIT


def copy_tree(folder: Path) -> Path:
    """All that git knows or would take, and the compiled core."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for path in (*map(ROOT.joinpath, listed), *(ROOT / "src" / "headrace" / "native").glob("*.so")):
        if path.is_file():
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    (folder / "sitecustomize.py").write_text(NO_FINDER)  # for the processes that a test starts
    return folder


def work(jobs: Iterable[Job], trees: list[Path]) -> None:
    """Do them all, as many at once as there are copies."""
    for name in AHEAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    free, running, serial = list(trees), dict[int, tuple[Job, Path, float]](), 0
    waiting = iter(jobs)
    job = next(waiting, None)
    while job or running:
        while job and free:
            serial += 1
            tree = free.pop()
            running[_start(job, tree, serial)] = job, tree, time.monotonic()
            job = next(waiting, None)
        time.sleep(0.02)
        for pid, (one, tree, began) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            seconds = time.monotonic() - began
            if not ended and seconds < one.limit:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # and what it started
            if not ended:
                os.waitpid(pid, 0)
            del running[pid]
            free.append(tree)
            if one.file:
                shutil.copy2(ROOT / one.file, tree / one.file)
            one.done(os.waitstatus_to_exitcode(status) if ended else None, seconds)


def _start(job: Job, tree: Path, serial: int) -> int:
    if job.file:
        (tree / job.file).write_text(job.code)
        os.utime(tree / job.file, (serial, serial))  # no two have one time: bytecode of another is never taken for it
    if pid := os.fork():
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    status = FOREIGN
    try:
        os.setpgid(0, 0)
        log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = f"{tree}:{tree / 'src'}"
        sys.path[:0] = [str(tree), str(tree / "src")]
        exec(NO_FINDER, {})
        status = job.run()
        places = {getattr(sys.modules[name], "__file__", None) or "" for name in sys.modules if name.startswith("headrace.")}
        if not all(place.startswith(str(tree)) for place in places):
            status = FOREIGN
    finally:
        os._exit(status)


class Only:
    """Of what pytest collects, these tests in this order; stops at the first that fails."""

    def __init__(self, names: list[str]) -> None:
        self.order = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid])

    def run(self) -> int:
        files = sorted({name.partition("::")[0] for name in self.order})
        return int(pytest.main(["-q", "-x", *COMMON, *files], plugins=[self]))


COMMON = ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", MARKS]


class Recorder:
    """Runs a file of tests; writes for each that passed its seconds and the lines of `sources` that it ran."""

    def __init__(self, test: str, sources: list[str], record: Path) -> None:
        self.test, self.sources, self.record = test, sources, record
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.cover.switch_context(item.nodeid)
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - start
            self.cover.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def run(self) -> int:
        tree = Path.cwd()
        for source in self.sources:  # a line that runs on import is no test's
            importlib.import_module(".".join(Path(source).with_suffix("").parts[1:]))
        self.cover = coverage.Coverage(data_file=None, include=[str(tree / source) for source in self.sources])
        self.cover.start()
        status = pytest.main(["-q", *COMMON, self.test], plugins=[self])
        self.cover.stop()
        found: dict[str, Any]
        found = {name: {"seconds": seconds, "lines": {}} for name, seconds in self.seconds.items() if name not in self.failed}
        for source in self.sources:
            for line, names in self.cover.get_data().contexts_by_lineno(str(tree / source)).items():
                for name in names:
                    if name in found:
                        found[name]["lines"].setdefault(source, []).append(line)
        self.record.write_text(json.dumps({"digest": digest(self.test, *self.sources), "tests": found}))
        return 0 if status in (0, 5) else int(status)


def digest(*files: str) -> str:
    return hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in files)).hexdigest()


class Cover:
    """Which tests run which line of the sources."""

    def __init__(self, sources: list[str]) -> None:
        self.sources = sources
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[int, set[str]]] = {source: {} for source in sources}
        self.trees = {source: ast.parse((ROOT / source).read_text()) for source in sources}

    def load(self, folders: list[str], trees: list[Path], say: Callable[[str], None]) -> None:
        """From build/mutants/cover; what is missing there or older than its tests and the sources is recorded first."""
        (WORK / "cover").mkdir(parents=True, exist_ok=True)
        records: dict[str, Path] = {}
        for path in (path for folder in folders for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))):
            if not any(word in path.stem for word in ELSEWHERE):
                name = str(path.relative_to(ROOT))
                records[name] = WORK / "cover" / (name.replace("/", "-") + ".json")
        jobs = []
        for test, record in records.items():
            if not record.exists() or json.loads(record.read_text())["digest"] != digest(test, *self.sources):
                record.unlink(missing_ok=True)
                told = partial(_tell, say, test)
                jobs.append(Job(Recorder(test, self.sources, record).run, told, limit=RECORDING))
        say(f"recording which lines {len(jobs)} of {len(records)} files of tests run")
        work(jobs, trees)
        for record in records.values():
            if record.exists():
                self._add(json.loads(record.read_text())["tests"])

    def _add(self, tests: dict[str, Any]) -> None:
        for name, found in tests.items():
            self.seconds[name] = found["seconds"]
            for source, lines in found["lines"].items():
                for line in lines:
                    self.lines[source].setdefault(line, set()).add(name)

    def tests(self, source: str, line: int) -> tuple[list[str], int]:
        """Those that run the statement at the line, the fastest first, as many as fit the budget; and how many there are.
        Where there are none (a line that runs on import): those that run any line of the file."""
        start, end = _statement(self.trees[source], line)
        covered = self.lines[source]
        names = set[str]().union(*(covered.get(one, ()) for one in range(start, end + 1)))
        any_line = set[str]().union(*covered.values())
        chosen, left = list[str](), BUDGET
        for name in sorted(names or any_line, key=lambda name: self.seconds[name]):
            if self.seconds[name] <= min(LONGEST, left):
                left -= self.seconds[name]
                chosen.append(name)
        return chosen, len(names)


def _tell(say: Callable[[str], None], test: str, status: int | None, seconds: float) -> None:
    say(f"{test}: recorded in {seconds:.0f} s" + ("" if status == 0 else f", what failed is left out (exit status {status})"))


def _statement(tree: ast.Module, line: int) -> tuple[int, int]:
    """First and last line of the innermost statement around a line; of one with a body, of its head."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)]
    if not around:
        return line, line
    inner = max(around, key=lambda node: node.lineno)
    body = getattr(inner, "body", None)
    return inner.lineno, max(inner.lineno, body[0].lineno - 1) if body else inner.end_lineno or line
