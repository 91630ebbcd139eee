"""Recipes of compress: which methods follow one another, and what is said where they cannot."""

import re
from itertools import product

import pytest

from headrace.compress.pipeline import FOLDS, METHODS, ROUNDS, Pipeline, check_known, check_order

RIGHT = (
    *("rtn", "gptq", "awq", "awq,gptq", "awq,rtn", "smoothquant,gptq", "magnitude", "wanda,gptq", "sparsegpt"),
    *("awq,sparsegpt", "smoothquant,wanda,gptq", "awq,magnitude,rtn", "neurons,layers,awq,wanda,gptq", "kv-heads,sparsegpt"),
    *("layers,heal", "neurons,heal,wanda,gptq", "weighted", "awq,weighted", "magnitude,weighted"),
)
WRONG = (
    ("gptq,awq", "awq scales what is neither scaled nor rounded yet; use awq,gptq"),
    ("wanda,awq,gptq", "awq scales before weights are left out; use awq,wanda,gptq"),
    ("gptq,magnitude", "weights are left out before others are rounded, by rtn or gptq; sparsegpt does both; use magnitude,"),
    ("sparsegpt,gptq", "sparsegpt does both; use sparsegpt"),
    ("magnitude,wanda", "weights are left out once; take one of each kind, as in awq,gptq or neurons,heal,wanda,gptq"),
    ("awq,smoothquant", "smoothquant scales what is neither scaled nor rounded yet; take one of each kind"),
    ("rtn,gptq", "what is rounded is not rounded again; take one of each kind"),
    ("weighted,gptq", "what is rounded is not rounded again; take one of each kind"),
    ("rtn,neurons,awq", "use neurons,awq,rtn"),
    ("heal,neurons,rtn", "neurons makes matrices smaller before they change; use neurons,heal,rtn"),
    ("neurons,gptq,heal", "heal trains before inputs are scaled and weights rounded; use neurons,heal,gptq"),
    ("neurons,heal,heal", "a model is healed once; take one of each kind"),
    ("heal,gptq", "heal trains what a cut has left; take one of each kind, as in awq,gptq or neurons,heal"),
)


@pytest.mark.parametrize("names", RIGHT)
def test_valid_orders_of_methods_are_accepted(names: str) -> None:
    check_order(names.split(","))


@pytest.mark.parametrize(("names", "line"), WRONG)
def test_a_wrong_order_is_refused_with_the_right_one(names: str, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as found:
        check_order(names.split(","))
    assert str(found.value).startswith(f"{names} cannot be: ")
    assert "\n" not in str(found.value)


def test_advised_orders_are_valid() -> None:
    """Of all pairs and triples: what "use" names is another order of the same methods, and is allowed."""
    advised = 0
    for names in (*product(METHODS, repeat=2), *product(METHODS, repeat=3)):
        try:
            check_order(names)
        except ValueError as error:
            _, use, order = str(error).partition("; use ")
            if use:
                check_order(order.split(","))
                assert set(order.split(",")) >= set(names) - set(ROUNDS)
                advised += 1
    assert advised > 100


def test_unknown_methods_and_missing_numbers_are_refused() -> None:
    for methods, line in ((("obq",), "unknown method 'obq'; known are rtn, weighted, gptq"), ((), "no method is named")):
        with pytest.raises(ValueError, match=line):
            check_known(methods)
    cut = {"method": ("layers", "heal"), "drop_layers": 1}
    assert str(Pipeline(**cut, heal_steps=9).heal) == "9 steps at 0.0001"  # type: ignore[arg-type]
    for more, line in (({}, "go together"), ({"heal_steps": 0}, "1 or more"), ({"heal_steps": 9, "heal_rate": 2.0}, "0 and 1")):
        with pytest.raises(ValueError, match=line):
            Pipeline(**cut, **more).check()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--heal-rate needs the method heal"):
        Pipeline(heal_rate=1e-3).check()
    with pytest.raises(ValueError, match="neurons needs --keep-neurons"):
        Pipeline(method=("neurons", "gptq")).check()
    for fold in FOLDS:
        Pipeline(method=(fold, "wanda", "gptq"), sparsity="2:4", format="Q4_0").check()
