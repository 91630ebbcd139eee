"""Numbers of JSON schemas that 64-bit floats do not hold: the output fits, or the schema is refused."""

import json
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.constrained import Grammars
from headrace.decoding.json_schema import prepare
from headrace.decoding.json_schema.numbers import kept_bound
from headrace.text.tokenizer import Tokenizer
from tests.unit.vocabularies import byte_level

BIG = 1234567890123456789
CASES = 300


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.from_gguf(byte_level())
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def outputs(grammars: Grammars, schema: dict[str, Any], count: int = 10, steps: int = 40) -> list[Decimal]:
    """Numbers that a model without any preference writes. Raises ConstraintError."""
    tokenizer = grammars._tokenizer
    start = grammars.constraint(StructuredOutputs.of({"json": schema, "disable_any_whitespace": True}))
    found = []
    for seed in range(count):
        draw, constraint, ids = random.Random(seed), start.copy(), []
        for _ in range(steps):
            allowed = np.flatnonzero(
                np.unpackbits(np.frombuffer(constraint.masks(), dtype=np.uint8), bitorder="little")
            ).tolist()
            going_on = [token for token in allowed if token not in tokenizer.eos_ids]
            if not going_on or (len(going_on) < len(allowed) and draw.random() < 0.1):
                break
            ids.append(draw.choice(going_on))
            constraint.push(ids[-1])
            if constraint.done:
                break
        if constraint.whole:
            found.append(json.loads(tokenizer.decode(ids), parse_int=Decimal, parse_float=Decimal))
    return found


def exact(value: int | float) -> Decimal:
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def fits(number: Decimal, schema: dict[str, Any]) -> bool:
    sides = {
        "minimum": number.__ge__,
        "exclusiveMinimum": number.__gt__,
        "maximum": number.__le__,
        "exclusiveMaximum": number.__lt__,
    }
    return all(holds(exact(schema[name])) for name, holds in sides.items() if name in schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [BIG, BIG - 1]},
        {"const": BIG},
        {"const": 2**53 + 1},
        {"const": {"id": [BIG]}},
        {"const": 123456789.12345679},
        {"type": "object", "properties": {"id": {"enum": [BIG]}}},
        {"$defs": {"id": {"$anchor": "id", "enum": [BIG]}}, "$ref": "#id"},
        {"$defs": {"id": {"$anchor": "id", "minimum": BIG}}, "$ref": "#id"},
        {"type": "integer", "minimum": 2**63, "maximum": 2**64},
        {"type": "integer", "minimum": BIG - 1, "maximum": BIG},
    ],
)
def test_numbers_beyond_floats_are_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match="the JSON schema has|Unsatisfiable"):
        grammars.constraint(StructuredOutputs.of({"json": schema}))


@pytest.mark.parametrize("value", [2**53, 2**60, 10**22, -(2**53), 0.12345678901234, 1.5e-10, 12345678.25])
def test_float_constants_are_written_exactly(grammars: Grammars, value: int | float) -> None:
    assert outputs(grammars, {"const": value}, count=1, steps=80) == [exact(value)]


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(("low", "high"), [(-(2**63), 2**63 - 1), (0, 2**64 - 1), (2**63 - 5000, 2**63 - 1)])
def test_the_bounds_of_machine_integers_are_served(grammars: Grammars, kind: str, low: int, high: int) -> None:
    schema = {"type": kind, "minimum": low, "maximum": high}
    found = outputs(grammars, schema)
    assert found
    assert all(fits(number, schema) for number in found)


def some_number(draw: random.Random) -> int | float:
    return draw.choice(
        [
            lambda: draw.randrange(-(2**63), 2**63),
            lambda: draw.randrange(2**53, 2**64),
            lambda: draw.choice([2**53, 2**53 + 1, 2**63 - 1, -(2**63), 10**15, 10**17 + 1, -(2**53) - 1]),
            lambda: draw.random() * 10 ** draw.randrange(-8, 16),
            lambda: round(draw.random() * 10 ** draw.randrange(-3, 12), draw.randrange(9)),
            lambda: draw.randrange(-1000, 10 ** draw.randrange(3, 19)),
        ]
    )()


def wrong(grammars: Grammars) -> list[tuple[dict[str, Any], Decimal]]:
    """Outputs beyond the bounds of random schemas."""
    draw, found, written = random.Random(3), [], 0
    for _ in range(CASES):
        low, high = sorted((some_number(draw), some_number(draw)))
        if draw.random() < 0.6:  # close together
            width = draw.randrange(5000) if isinstance(low, int) else abs(low) * 10.0 ** -draw.randrange(3, 17)
            high = low + width
        schema = {
            "type": draw.choice(["integer", "number"]),
            draw.choice(["minimum", "exclusiveMinimum"]): low,
            draw.choice(["maximum", "exclusiveMaximum"]): high,
        }
        try:
            numbers = outputs(grammars, schema)
        except ConstraintError:
            continue
        written += len(numbers)
        found += [(schema, number) for number in numbers if not fits(number, schema)]
    assert written > CASES
    return found


def test_random_bounds_hold_to_the_last_digit(grammars: Grammars) -> None:
    assert wrong(grammars) == []


def test_unadjusted_bounds_admit_wrong_numbers(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the change of bounds wrong numbers come."""
    monkeypatch.setattr(prepare, "kept_bound", lambda keyword, value: value)
    assert wrong(grammars)


def test_exclusive_bounds_close_together(grammars: Grammars) -> None:
    for schema in (
        {"type": "number", "exclusiveMinimum": 32.0, "exclusiveMaximum": 32.00000032},
        {"type": "number", "exclusiveMinimum": 31.9999, "exclusiveMaximum": 32},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 0},
    ):
        found = outputs(grammars, schema)
        assert found
        assert all(fits(number, schema) for number in found), schema


def test_common_bounds_stay_unchanged() -> None:
    for value in (0, 1, -1, 100, 2**31 - 1, 2**53 - 2, 0.1, 1e-9, 1e9, 99.99):
        for keyword in ("minimum", "maximum"):
            assert kept_bound(keyword, value) == value
