"""Recipes: which methods may follow one another in one command.

The order is: cut, heal, fold scales, prune, round. Each step works on the result of the steps before it.
"""

from collections.abc import Sequence
from itertools import pairwise

from headrace.compress.pruning import PRUNES, SPARSEGPT
from headrace.compress.structure import STRUCTURES

HEAL = "heal"
FOLDS = ("awq", "smoothquant")
WEIGHTED = "weighted"  # to nearest, with scales searched by importance
ROUNDS = ("rtn", WEIGHTED, "gptq")
STAGES = (STRUCTURES, (HEAL,), FOLDS, PRUNES, ROUNDS)  # in order: any number of the first, at most one of each other
METHODS = (*ROUNDS, *FOLDS, *PRUNES, *STRUCTURES, HEAL)
READ = (WEIGHTED, "gptq", *FOLDS, SPARSEGPT)  # methods that read texts
EXAMPLES = "awq,gptq or neurons,heal,wanda,gptq"


def check_known(methods: Sequence[str]) -> None:
    """Raise ValueError for unknown methods."""
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; known are {', '.join(METHODS)}")
    if not methods:
        raise ValueError(f"no method is named; known are {', '.join(METHODS)}")


def check_order(methods: Sequence[str]) -> None:
    """Raise ValueError for methods that cannot follow one another."""
    reasons = (_why_not(before, after) for before, after in pairwise(methods))
    alone = f"{HEAL} trains what a cut has left" if methods[0] == HEAL else ""
    if why := next(filter(None, (*reasons, alone)), ""):
        raise ValueError(f"{','.join(methods)} cannot be: {why}; {_instead(methods)}")


def _why_not(before: str, after: str) -> str:
    """Why `after` may not follow `before`; empty if it may."""
    first, then = (next(at for at, stage in enumerate(STAGES) if name in stage) for name in (before, after))
    if after in STRUCTURES and first > then:
        return f"{after} makes matrices smaller before they change"
    if after == HEAL and first >= then:
        return "a model is healed once" if before == HEAL else f"{HEAL} trains before inputs are scaled and weights rounded"
    if after in FOLDS and first >= then:
        if before in PRUNES:
            return f"{after} scales before weights are left out"
        return f"{after} scales what is neither scaled nor rounded yet"
    if after in PRUNES and first >= then:
        if before in PRUNES:
            return "weights are left out once"
        return "weights are left out before others are rounded, by rtn or gptq; sparsegpt does both"
    if after in ROUNDS and before == SPARSEGPT:
        return "weights are left out before others are rounded, by rtn or gptq; sparsegpt does both"
    if after in ROUNDS and first >= then:
        return "what is rounded is not rounded again"
    return ""


def _instead(methods: Sequence[str]) -> str:
    """Advice: the same methods in the order of the stages, if that is valid."""
    kept = [name for name in methods if not (name in ROUNDS and SPARSEGPT in methods)]
    order = sorted(kept, key=lambda name: next(at for at, stage in enumerate(STAGES) if name in stage))
    right = order[0] != HEAL and not any(_why_not(*pair) for pair in pairwise(order))
    return f"use {','.join(order)}" if right else f"take one of each kind, as in {EXAMPLES}"
