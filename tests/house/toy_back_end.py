"""A back end of one file: torch under another name, which counts its steps."""

from typing import Any

from headrace.backends.eager.offer import EagerBackend
from headrace.backends.eager.program import EagerProgram
from headrace.backends.protocol import LoadedPrograms
from headrace.backends.recipe import Recipe


class Counting(EagerProgram):
    steps = 0

    def run(self, *args: Any, **more: Any) -> Any:
        Counting.steps += 1
        return super().run(*args, **more)


class Toy(EagerBackend):
    name = "toy"

    def load(self, recipe: Recipe) -> LoadedPrograms:
        loaded = super().load(recipe)
        programs = {role: Counting(made.model, made.pool) for role, made in loaded.programs.items()}  # type: ignore[attr-defined]
        return LoadedPrograms(programs, loaded.plan, loaded.dtype)
