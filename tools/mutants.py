#!/usr/bin/env python3
"""Mutation testing: is a wrong line of the engine noticed by a test that runs it?

    python tools/mutants.py [MODULE]... [--sample 100] [--seed 1] [--jobs 2] [--again]

Of each module a seeded sample of mutants, made by mutmut's operators. Each is run against the tests that run its line, the
fastest first, until one fails. mutmut itself takes no sample, goes by function instead of line, and leaves decorated
functions out, among them every op; so it is asked for the mutants only. `raise` statements are not mutated: they are text.

build/mutants has every outcome (results.jsonl: a run goes on where the last one ended; --again repeats what was not killed),
the tests of every line (cover/: recorded again for files of tests that changed) and report.md, which is also printed.
tests/mutants_equivalent.toml names mutants that change nothing that a test could see.
"""

import argparse
import difflib
import hashlib
import json
import random
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import libcst
from mutant_tests import FOREIGN, ROOT, TESTS, WORK, Cover, Job, Only, copy_tree, work
from mutmut.mutation.file_mutation import NEVER_MUTATE_FUNCTION_NAMES, MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

MODULES = {name: f"engine/{name}.py" for name in ("engine", "scheduler", "feeding", "children")}
MODULES |= {name: f"{name}/**/*.py" for name in ("kv", "decoding", "drafting")}
MODULES |= {f"ops.{name}": f"ops/{name}.py" for name in ("rejection", "filters", "penalties", "noise", "trees")}
RESULTS, REPORT, EQUIVALENT = WORK / "results.jsonl", WORK / "report.md", ROOT / "tests" / "mutants_equivalent.toml"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`line`: in the unchanged file. `diff`: the lines that go and those that come."""

    module: str
    file: str
    line: int
    diff: str
    code: str

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.file} {self.code}".encode()).hexdigest()[:16]


class Visitor(MutationVisitor):
    """mutmut's own puts all mutants of a function beside it, which it cannot do for a decorated one."""

    def _skip_node_and_children(self, node: libcst.CSTNode) -> bool:
        if isinstance(node, libcst.FunctionDef):
            return node.name.value in NEVER_MUTATE_FUNCTION_NAMES
        return isinstance(node, libcst.Raise) or super()._skip_node_and_children(node)


def sources(module: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "src" / "headrace").glob(MODULES[module]))]


def mutants(module: str, sample: int, seed: int) -> list[Mutant]:
    """A sample of a module's mutants, in the order of the draw: as many as were run are a sample, too."""
    found: list[tuple[str, str, libcst.Module, Any]] = []
    for file in sources(module):
        visitor, text = Visitor(mutation_operators, IgnoredCode(set(), set(), set())), (ROOT / file).read_text()
        tree = libcst.MetadataWrapper(libcst.parse_module(text)).visit(visitor)
        found += [(file, text, tree, mutation) for mutation in visitor.mutations]
    random.Random(f"{module} {seed}").shuffle(found)
    made: dict[str, Mutant] = {}
    for file, text, tree, mutation in found:
        if len(made) == sample:
            break
        code = tree.deep_replace(mutation.original_node, mutation.mutated_node).code
        if code != text and _compiles(code):
            mutant = _describe(module, file, text, code)
            made.setdefault(mutant.key, mutant)
    return list(made.values())


def _compiles(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _describe(module: str, file: str, before: str, code: str) -> Mutant:
    lines = list(difflib.unified_diff(before.splitlines(), code.splitlines(), lineterm="", n=0))
    line = int(lines[2].split()[1].lstrip("-").partition(",")[0])  # @@ -12,2 +12 @@
    return Mutant(module, file, line, "\n".join(line for line in lines[3:] if line[0] in "-+"), code)


def control(cover: Cover, file: str, trees: list[Any]) -> None:
    """A mutant that cannot be imported is killed, and the unchanged copy is not."""
    code, seen = (ROOT / file).read_text(), list[int | None]()
    names = sorted(set().union(*cover.lines[file].values()), key=lambda name: cover.seconds[name])[:5]
    for text in (code, "raise RuntimeError('the control')\n" + code):
        work([Job(Only(names).run, lambda status, _: seen.append(status), file, text)], trees)
    if seen[0] != 0 or seen[1] in (0, None, FOREIGN):
        sys.exit(f"the control failed: {file} unchanged ends with {seen[0]}, and with an error on import with {seen[1]}")


def jobs(todo: list[Mutant], cover: Cover) -> Iterator[Job]:
    for number, mutant in enumerate(todo, 1):
        names, tests = cover.tests(mutant.file, mutant.line)
        done = partial(_done, mutant, [len(names), tests], f"{number}/{len(todo)}")
        yield Job(Only(names).run, done, mutant.file, mutant.code)


def _done(mutant: Mutant, tests: list[int], place: str, status: int | None, seconds: float) -> None:
    if status == FOREIGN:
        sys.exit(f"a test of {mutant.file} imported Headrace from somewhere else, or pytest did not start: {WORK}/tree-*.log")
    outcome = "timeout" if status is None else "killed" if status else "survived"
    about = {"key": mutant.key, "module": mutant.module, "file": mutant.file, "line": mutant.line, "diff": mutant.diff}
    with RESULTS.open("a") as lines:
        lines.write(json.dumps({**about, "outcome": outcome, "seconds": round(seconds, 1), "tests": tests}) + "\n")
    say(f"{place} {outcome} in {seconds:.0f} s: {mutant.file}:{mutant.line}")


def results() -> dict[str, dict[str, Any]]:
    """The last outcome of every mutant that was ever run."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {told["key"]: told for told in map(json.loads, lines)}


def report(chosen: dict[str, list[Mutant]]) -> str:
    """Killed and total per module, then what was not killed."""
    listed = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
    found, rest = results(), list[str]()
    table = ["| module | mutants | killed | timeout | survived | equivalent |", "|---|" + "---:|" * 5]
    for module, each in chosen.items():
        counts: Counter[str] = Counter()
        for mutant in sorted(each, key=lambda mutant: (mutant.file, mutant.line)):
            told = found.get(mutant.key)
            outcome = told["outcome"] if told else "not run"
            if outcome == "survived" and any(_is(mutant, one) for one in listed):
                outcome = "equivalent"
            counts[outcome] += 1
            if told and outcome in ("survived", "timeout"):
                ran, there = told["tests"]
                note = f"{ran} of {there} tests of the line ran" if there else "no test runs the line"
                rest.append(f"{mutant.file}:{mutant.line}: {outcome} ({note})\n\n```diff\n{mutant.diff}\n```\n")
        columns = [counts[name] for name in ("killed", "timeout", "survived", "equivalent")]
        table.append(f"| {module} | {sum(columns)} | " + " | ".join(map(str, columns)) + " |")
    return "\n".join([*table, "", *rest])


def _is(mutant: Mutant, entry: dict[str, str]) -> bool:
    """Whether an entry means a mutant: by its `diff`, or because the lines differ in nothing but what matches `but`."""
    if not fnmatch(mutant.file, entry["file"]):
        return False
    if "diff" in entry:
        return entry["diff"].strip() == mutant.diff.strip()
    before, after = (
        re.sub(entry["but"], "", "\n".join(line[1:] for line in mutant.diff.splitlines() if line[0] == sign)) for sign in "-+"
    )
    return before == after


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Are wrong lines noticed by the tests that run them?")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}; all where none is given")
    parser.add_argument("--sample", type=int, default=100, help="mutants of each module (100)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    parser.add_argument("--tests", default=",".join(TESTS), help=f"folders of tests ({','.join(TESTS)})")
    parser.add_argument("--again", action="store_true", help="repeat what was not killed")
    given = parser.parse_args()
    if unknown := [name for name in given.modules if name not in MODULES]:
        parser.error(f"there is no module {unknown[0]}; choose from {', '.join(MODULES)}")
    chosen = {module: mutants(module, given.sample, given.seed) for module in given.modules or MODULES}
    trees = [copy_tree(WORK / f"tree-{number}") for number in range(given.jobs)]
    cover = Cover([file for module in MODULES for file in sources(module)])
    cover.load(given.tests.split(","), trees, say)
    control(cover, next(each[0].file for each in chosen.values()), trees)
    settled = {key for key, told in results().items() if told["outcome"] == "killed" or not given.again}
    todo = [mutant for each in chosen.values() for mutant in each if mutant.key not in settled]
    work(jobs(todo, cover), trees)
    REPORT.write_text(report(chosen))
    print(REPORT.read_text())


if __name__ == "__main__":
    main()
