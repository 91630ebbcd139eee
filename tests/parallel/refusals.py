"""Table of what does not run on several ranks, in docs/en/understand/parallel.md, from the refusals of the code."""

from headrace.parallel.ranks.refusals import REFUSALS
from headrace.parallel.ranks.share import UNIT, WORLDS


def text() -> str:
    worlds = ", ".join(map(str, WORLDS[:-1]))
    rows = [
        (f"other values than {worlds} or {WORLDS[-1]}", "choose one of these"),
        (f"fewer units of {UNIT} columns in the heads, the MLP or the vocabulary than ranks", "a smaller tp"),
        *((one.part, one.remedy) for one in REFUSALS),
    ]
    return "\n".join(["| not with tp | instead |", "|---|---|", *(f"| {part} | {remedy} |" for part, remedy in rows)])
