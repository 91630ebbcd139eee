#!/usr/bin/env python3
"""Run the tests whose bits depend on the instruction set once for each path of the native core: what `make test-isa` does.

    python tools/test_isa.py [--paths avx2,plain] [PYTEST OPTION]...

A path is chosen by HEADRACE_ISA; torch, the oracle beside it, is held to the same vectors by ATEN_CPU_CAPABILITY. Paths that
this CPU lacks are named. Ends with a table, and with 1 where a path failed. Needs the environment of `make test`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from headrace import core

ROOT = Path(__file__).parents[1]
PATHS = {  # and what torch calls such a CPU
    "amx": "avx512",
    "avx512": "avx512",
    "avx512vnni": "avx512",
    "avxvnni": "avx2",
    "avx2": "avx2",
    "plain": "default",
}
# What runs kernels: the engine, beams, random loads, windows, and the native part of adapters, encoders and ranking. Tests of
# texts, files and the server do not. Left out, as no kernel of the core runs in them: the torch part of windows (NOT_TORCH,
# four times the native one), and comparisons of adapters, encoders and rankers with formulas and `transformers`.
EACH = (
    "tests/property",
    "tests/ops/test_native_pack.py",
    "tests/ops/test_native_reject.py",
    "tests/e2e/test_beam_native.py",
    "tests/e2e/test_contrastive_native.py",
    "tests/e2e/test_native_centring.py",
    "tests/e2e/test_native_engine.py",
    "tests/e2e/test_native_equalities.py",
    "tests/e2e/test_native_program.py",
    "tests/e2e/test_native_reference.py",
    "tests/e2e/test_native_rows.py",
    "tests/e2e/test_windows.py",
    "tests/e2e/test_adapters.py::test_a_batch_gives_the_bits_of_each_request_alone",
    "tests/e2e/test_adapters.py::test_batches_of_1_to_33_rows",
    "tests/e2e/test_adapters.py::test_chunks_prefix_hits_and_forks_keep_an_adapters_bits",
    "tests/e2e/test_adapters.py::test_the_native_core_is_close_to_torch",
    "tests/models/test_encoders.py::test_the_native_core_is_close_and_gives_the_same_bits_in_any_batch",
    "tests/e2e/test_ranking.py::test_the_native_core_ranks_alike_and_gives_the_same_bits_in_any_batch",
)
NOT_TORCH = "not (test_windows and torch)"
# These go over all paths by themselves: once.
ALL_PATHS = tuple(f"tests/ops/test_native_{name}.py" for name in ("activations", "attention", "linear", "sample"))
# And these are torch's alone: once for each of its kinds of vectors.
TORCH = (
    "tests/e2e/test_beam.py",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/ops").glob("test_*.py") if "native" not in path.name),
)


def tests_of(paths: list[str], path: str) -> list[str]:
    """The tests to run on one of the paths."""
    before = paths[: paths.index(path)]
    new = PATHS[path] not in [PATHS[name] for name in before]
    return [*EACH, *(() if before else ALL_PATHS), *(TORCH if new else ())]


def run(path: str, tests: list[str], options: list[str], report: Path) -> tuple[bool, str]:
    """One path's tests: whether all is well, and its line of the table."""
    env = {**os.environ, "HEADRACE_ISA": path, "ATEN_CPU_CAPABILITY": PATHS[path]}
    print(f"== {path}", flush=True)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", NOT_TORCH, f"--junitxml={report}", *options, *tests],
        cwd=ROOT,
        env=env,
        check=False,
    )
    seconds = time.monotonic() - begin
    if not report.exists():
        return False, f"{path:8}  pytest ended with {done.returncode} before a report"
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    line = f"{path:8}{total - skipped - failed:>8}{failed:>8}{skipped:>9}{seconds:>9.0f}"
    return done.returncode == 0, line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", default=",".join(PATHS), help="some of amx,avx512,avx512vnni,avxvnni,avx2,plain")
    args, options = parser.parse_known_args()
    wanted = args.paths.split(",")
    if unknown := sorted(set(wanted) - set(PATHS)):
        parser.error(f"unknown path {unknown[0]}; there are {', '.join(PATHS)}")
    here = [path for path in wanted if path in core.module().cpu_info()["isas"]]
    well, lines = True, [f"{'path':8}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    with tempfile.TemporaryDirectory() as folder:
        for path in wanted:
            if path in here:
                passed, line = run(path, tests_of(here, path), options, Path(folder) / f"{path}.xml")
                well = well and passed
            else:
                line = f"{path:8}  not run: this CPU has no such instructions"
            lines.append(line)
    print("\n".join(lines))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
