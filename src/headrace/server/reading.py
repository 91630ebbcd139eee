"""From bytes to a request: what is wrong with one is a 400 that names the field and what to change. The first mistake ends
the look at it, and what would cost much to make is counted before any of it is made."""

import gc
import re
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from headrace.data.near import did_you_mean
from headrace.server.bounds import Strict
from headrace.server.errors import ApiError

T = TypeVar("T", bound=Strict)

# What one body may hold. An honest one of the largest size stays below: ten thousand messages, a schema, many prompts as ids.
CONTAINERS, STRINGS, VALUES = 1 << 17, 1 << 18, 3 << 18
QUOTE, COMMA, BACKSLASH, OBJECT = b'",\\{'
OTHER_CASE = 0x20  # the bit in which [ and { differ
PIECE = 1 << 16  # bytes that are looked at together
MOST = np.array([CONTAINERS, 2 * STRINGS, VALUES])  # brackets, quotes, commas

# The words of messages for what msgspec calls them.
KINDS = {
    "int": "an integer", "float": "a number", "str": "text", "bool": "true or false", "array": "a list", "object": "an object",
    "null": "null",
}  # fmt: skip
BOUNDS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
WRONG = re.compile(r"(?P<what>[^\n]*?)(?: - at (?:`key` in )?`\$(?P<where>[^`]*)`)?")
EXPECTED = re.compile(
    r"Expected `(?P<kinds>[^`]*)`(?:(?P<length> of length)? (?P<bound>[<>]=?) (?P<most>\S+))?(?:, got `(?P<got>\w+)`)?"
)
UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def read_json(data: bytes, kind: Any = Any) -> Any:
    """JSON as the standard has it: no NaN, no lone surrogates, bounded nesting. Raises msgspec.DecodeError and
    RecursionError where it is not, msgspec.ValidationError where it is no `kind`, ApiError where there is too much of it."""
    check_size(data)
    collects = gc.isenabled()
    gc.disable()  # else what is being made would be walked through again and again; JSON has no cycles
    try:
        return msgspec.json.decode(data, type=kind)
    finally:
        if collects:
            gc.enable()


def read_body(data: bytes, kind: type[T]) -> T:
    """A request. Raises ApiError."""
    if not data.strip():
        raise ApiError(400, "the body is missing; give it", code="missing_field")
    try:
        return read_json(data, kind)
    except msgspec.ValidationError as error:
        try:
            msgspec.json.decode(data, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise _no_json() from None
        raise _wrong_field(str(error), kind) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise _no_json() from None


def read_query(given: dict[str, str], kind: type[T]) -> T:
    """The parameters of a query. Raises ApiError."""
    if unknown := sorted(set(given) - set(kind.__struct_fields__)):
        name = unknown[0][:100]
        raise ApiError(400, f"unknown parameter {name!r}; remove it", param=name, code="unknown_parameter")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None


def check_size(data: bytes) -> None:
    """Raises ApiError where a body holds so many values that making them would hold others up.

    Its characters bound from above what it holds. Where that is not enough, what stands outside of texts is counted, as far
    as there is not too much of it.
    """
    if len(data) < CONTAINERS or (
        data.count(b"[") + data.count(b"{") <= CONTAINERS and data.count(b'"') <= 2 * STRINGS and data.count(b",") <= VALUES
    ):
        return
    data = b" " + (data.replace(rb"\\", b"  ") if rb"\\" in data else data)
    read = np.frombuffer(data, np.uint8)
    found, within = np.zeros(3, np.int64), False
    for start in range(1, len(read), PIECE):
        piece = read[start : start + PIECE]
        quotes = (piece == QUOTE) & (read[start - 1 : start - 1 + len(piece)] != BACKSLASH)
        outside = np.bitwise_xor.accumulate(quotes) ^ (not within)
        within = not outside[-1]
        found[0] += np.count_nonzero(((piece | OTHER_CASE) == OBJECT) & outside)
        found[1] += np.count_nonzero(quotes)
        found[2] += np.count_nonzero((piece == COMMA) & outside)
        if (found > MOST).any():
            break
    for count, bound, what in zip(found, MOST, ("arrays and objects", "texts and names", "values"), strict=True):
        if count > bound:
            most = bound // 2 if bound == 2 * STRINGS else bound
            raise ApiError(400, f"the body holds more than {most} {what}; send less", code="invalid_value")


def _no_json() -> ApiError:
    return ApiError(400, "the body is not JSON, or is nested too deeply")


def _wrong_field(message: str, kind: type[Strict]) -> ApiError:
    """What msgspec says, in our words. What was sent is not repeated but for the name of an unknown field."""
    what, place = message, ""
    if (found := re.fullmatch(WRONG, message)) is not None:
        what, place = found["what"], found["where"] or ""
    path = [part for part in re.split(r"[.\[\]]+", place) if part]
    if (named := UNKNOWN.fullmatch(what)) is not None or (named := MISSING.fullmatch(what)) is not None:
        path.append(named["name"])
    elif (own := re.match(r"([a-z_.0-9]+): ", what)) is not None:  # a `__post_init__`'s words
        path += own[1].split(".")
        what = what[own.end() :]
    where, param = ".".join(path)[:200], path[0][:100] if path else None
    if UNKNOWN.fullmatch(what):
        question = did_you_mean(where, kind.__struct_fields__, "remove it")
        return ApiError(400, f"unknown field {where!r}; {question}", param=param, code="unknown_field")
    if MISSING.fullmatch(what):
        return ApiError(400, f"{where} is missing; give it", param=param, code="missing_field")
    return ApiError(400, f"{where or 'the body'}: {_words(what, kind, param)}", param=param, code="invalid_value")


def _words(what: str, kind: type[Strict], param: str | None) -> str:
    """What a value must be."""
    if what.startswith("Invalid enum value"):
        return f"must be {' or '.join(_choices(get_type_hints(kind, include_extras=True).get(param or '')))}"
    if what.endswith("out of range"):
        return "must be a number nearer to zero"
    if (found := EXPECTED.fullmatch(what)) is None:
        return what[:300]
    kinds = [KINDS.get(one, one) for one in found["kinds"].split(" | ") if one != "null"]
    must = "must be " + " or ".join(kinds)
    if found["length"]:
        must += f" of {BOUNDS[found['bound']]} {found['most']} {'characters' if kinds == ['text'] else 'entries'}"
    elif found["bound"]:
        must += f", {BOUNDS[found['bound']]} {found['most']}"
    return must if found["got"] is None else f"{must}, not {KINDS.get(found['got'], found['got'])}"


def _choices(kind: Any) -> list[str]:
    """The texts of a `Literal`, also of one among other types."""
    if get_origin(kind) is Literal:
        return [str(one) for one in get_args(kind)]
    return [text for one in get_args(kind) for text in _choices(one)]
