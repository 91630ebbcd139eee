"""Compilation of clients' grammars in a confined process, with the model's vocabulary."""

import functools
from pathlib import Path
from typing import Any

from headrace.confined.pool import Task
from headrace.data.structured import ConstraintError
from headrace.decoding import constraint_check
from headrace.decoding.constrained import Grammars
from headrace.startup.opening import open_files

SECONDS = 2.0  # CPU time to read, rewrite and compile one constraint
MEMORY = 2 << 30  # bytes of address space, of which the vocabulary takes a part


def task(path: Path, *, remembered: bool) -> Task:
    """The task that answers `inspect_constraint` for the model at `path`. `remembered`: equal questions are answered once."""
    return Task(__name__, "inspect_constraint", str(path.absolute()), seconds=SECONDS, memory=MEMORY, remembered=remembered)


def inspect_constraint(question: dict[str, Any]) -> dict[str, Any]:
    """`constraint_check.inspect_constraint`, and for a grammar also its compilation: "bytes" is the memory that it takes,
    "seconds" its CPU time. "model" is the path of the model."""
    answer = constraint_check.inspect_constraint({name: value for name, value in question.items() if name != "model"})
    if "grammar" not in answer:
        return answer
    try:
        cost = _grammars(question["model"]).measure(answer["grammar"])
        cost.check()
    except ConstraintError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "the constraint is too large; make it smaller"}
    return {**answer, "bytes": cost.bytes, "seconds": cost.seconds}


@functools.cache
def _grammars(path: str) -> Grammars:
    opened = open_files(path, download=False)
    try:
        return Grammars(opened.tokenizer, opened.config.vocab_size, opened.eos_ids)
    finally:
        opened.source.close()


def warm(path: str) -> None:
    """Load everything that a question needs: the libraries and the vocabulary."""
    constraint_check.warm("")
    inspect_constraint({"model": path, "spec": {"regex": "[0-9]"}})
