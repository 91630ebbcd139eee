"""Rewrites the numbers of a JSON schema so that the grammar compiler keeps them exactly. It reads numbers as 64-bit floats,
those with more than 15 digits sometimes as a neighbouring float, and writes ranges with about as many digits."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeGuard

from headrace.data.structured import ConstraintError

MAX_MULTIPLE = 65_536  # states of an automaton, which take 30 MB
MAX_DIGITS = 15  # significant digits that a float always holds
MAX_EXPONENT = 22  # powers of ten that are floats
SMALL = 2**53 - 1  # below it floats hold whole numbers and their neighbours
WIDEST = 2**63 - 1024  # the largest float below 2**63
LARGEST = 10**15 - 1  # of integers without a bound
UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = ("minimum", "exclusiveMinimum", *UPPER)


def check_multiple(value: Any) -> None:
    """Raise ConstraintError if the automaton of a `multipleOf` would be too large: it has a state per remainder."""
    if not is_number(value):
        return
    digits = int("".join(map(str, _decimal(value).normalize().as_tuple().digits)))
    if digits > MAX_MULTIPLE:
        raise ConstraintError(
            f"the JSON schema has multipleOf {str(value)[:40]}, and {MAX_MULTIPLE} is the most (its digits without zeros at "
            "either end count); use a smaller one"
        )


def check_values(value: Any) -> None:
    """Raise ConstraintError for a number in a `const` or `enum` that the compiler would replace by another."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list):
            todo += one
        elif is_number(one) and not is_exact(one):
            raise ConstraintError(
                f"the JSON schema has the value {str(one)[:40]}, which a 64-bit float does not hold; use a text, or a number "
                f"with at most {MAX_DIGITS} digits"
            )


def kept_bound(keyword: str, value: Any) -> Any:
    """The bound itself, or a close one within it that the compiler keeps. Raises ConstraintError if there is none."""
    if not is_number(value) or (abs(value) < SMALL and (isinstance(value, int) or _is_short(value))):
        return value
    upper = keyword in UPPER
    if abs(value) > WIDEST:
        if (value > 0) != upper:
            most = -WIDEST if upper else WIDEST
            raise ConstraintError(f"the JSON schema has {keyword} {str(value)[:40]} and {most} is the most; use another")
        return WIDEST if upper else -WIDEST
    if abs(value) < SMALL:
        return float(Context(prec=MAX_DIGITS, rounding=ROUND_FLOOR if upper else ROUND_CEILING).plus(_decimal(value)))
    kept = float(value)  # the compiler reads a large number as a float and writes its shortest spelling
    inclusive = keyword in ("minimum", "maximum")
    while any(
        (each > value if upper else each < value) or (each == value and not inclusive) for each in (int(kept), _decimal(kept))
    ):
        kept = math.nextafter(kept, -math.inf if upper else math.inf)
    return int(kept)


def kept_range(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with bounds that hold. Between neighbouring whole numbers the compiler accepts the whole number of an
    exclusive bound, so the next decimal within it becomes the bound."""
    result = dict(schema)
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    tops = [value for value in (high, schema.get("maximum")) if is_number(value)]
    bottoms = [value for value in (low, schema.get("minimum")) if is_number(value)]
    if schema.get("type") == "integer" or not tops or not bottoms or min(tops) > max(bottoms) + 1:
        return result
    if is_number(low) and low == int(low):
        del result["exclusiveMinimum"]
        result["minimum"] = max(_next(low, up=True), schema.get("minimum", -math.inf))
    if is_number(high) and high == int(high):
        del result["exclusiveMaximum"]
        result["maximum"] = min(_next(high, up=False), schema.get("maximum", math.inf))
    return result


def _next(value: int | float, *, up: bool) -> float:
    """The next decimal of `MAX_DIGITS` digits."""
    context = Context(prec=MAX_DIGITS)
    number = context.plus(_decimal(value))
    return float(context.next_plus(number) if up else context.next_minus(number)) if number else (1e-12 if up else -1e-12)


def with_digits(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an integer, bounded to 15 digits if it has no bounds: a small model may write digits until its tokens run
    out. Numbers stay unbounded, as bounds would exclude exponents (1e-09)."""
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    limits = {keyword: schema[keyword] for keyword in BOUNDS if keyword in schema}
    if "integer" not in kinds or "number" in kinds or {"const", "enum"} & set(schema):
        return schema
    if not all(map(is_number, limits.values())):
        return schema  # flags, in draft 4
    lows = [limits[keyword] for keyword in BOUNDS if keyword in limits and keyword not in UPPER]
    highs = [limits[keyword] for keyword in UPPER if keyword in limits]
    result = dict(schema)
    if not lows:
        result["minimum"] = -LARGEST if min(highs, default=LARGEST) >= -LARGEST else -WIDEST
    if not highs:
        result["maximum"] = LARGEST if max(lows, default=-LARGEST) <= LARGEST else WIDEST
    return result


def check_all(schema: dict[str, Any]) -> None:
    """Raise ConstraintError for a number in a schema that is not rewritten and that the compiler would not keep."""
    todo: list[Any] = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        if not isinstance(node, dict):
            continue
        check_multiple(node.get("multipleOf"))
        check_values([node.get("const"), node.get("enum")])
        for keyword in BOUNDS:
            if kept_bound(keyword, node.get(keyword)) != node.get(keyword):
                raise ConstraintError(
                    f"the JSON schema has {keyword} {str(node[keyword])[:40]} and names parts; shorten the number"
                )
        todo += node.values()


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (isinstance(value, int) or math.isfinite(value))


def is_exact(value: int | float) -> bool:
    """Whether the compiler writes a single number unchanged."""
    return _is_short(value) or (isinstance(value, int) and abs(value) <= WIDEST and int(float(value)) == value)


def _is_short(value: int | float) -> bool:
    number = _decimal(value).normalize()
    digits, exponent = number.as_tuple().digits, number.as_tuple().exponent
    return len(digits) <= MAX_DIGITS and isinstance(exponent, int) and abs(exponent) <= MAX_EXPONENT


def _decimal(value: int | float) -> Decimal:
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))
