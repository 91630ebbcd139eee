"""List of what does not run on several ranks, in docs/en/understand/tensor-parallelism.md, from the refusals of the code."""

from headrace.parallel.ranks.refusals import REFUSALS
from headrace.parallel.ranks.share import UNIT, WORLDS
from tests.architecture import entries


def text() -> str:
    worlds = ", ".join(map(str, WORLDS[:-1]))
    rows = [
        (f"other values than {worlds} or {WORLDS[-1]}", "choose one of these"),
        (f"fewer units of {UNIT} columns in the heads, the MLP or the vocabulary than ranks", "a smaller tp"),
        *((one.part, one.remedy) for one in REFUSALS),
    ]
    return entries(f"{part}; instead: {remedy}" for part, remedy in rows)
