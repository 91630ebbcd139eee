"""Decoding of request bodies. The first error is a 400 that names the field and what to change.

Bytes that are not JSON have one message per cause, with the position in bytes. Values that cost much to decode are counted
before anything is decoded. Two spellings are accepted besides strict JSON: null for an unknown field, and 5.0 for the integer
5. The types of a request decide where that holds; inside data (schemas, metadata, template variables) nothing changes.
"""

import functools
import gc
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import inspect

from headrace.data.spelling import did_you_mean
from headrace.server.http.api_error import ApiError
from headrace.server.http.limits_check import StrictStruct

T = TypeVar("T", bound=StrictStruct)

# Limits of one body. The largest useful bodies stay below: ten thousand messages, a schema, many prompts as ids.
CONTAINERS, STRINGS, VALUES = 1 << 17, 1 << 18, 3 << 18
QUOTE, COMMA, BACKSLASH, OBJECT = b'",\\{'
OTHER_CASE = 0x20  # the bit in which [ and { differ
PIECE = 1 << 16  # bytes counted together
LONG_MESSAGE = 2048  # characters kept at each end of a message of msgspec
MOST_NAME = 256  # characters of an unknown field that may be null; a pattern of megabytes takes seconds to compile
MOST_FIELDS = 1024  # objects with more fields are not normalized; no request has as many
MOST = np.array([CONTAINERS, 2 * STRINGS, VALUES])  # brackets, quotes, commas
NORMALIZED = 1 << 14  # brackets and commas of the largest body that is normalized, value by value in Python

# Words of messages for msgspec's names of types.
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
LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
NO_NUMBER = re.compile(rb"-?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)
PLACE = re.compile(r"(?:JSON is malformed: )?(?P<cause>.*) \(byte (?P<at>\d+)\)")
# First bytes of data that is not UTF-8 text, and the message for it.
BEGINNINGS = (
    (b"\x1f\x8b", "is compressed with gzip (byte 0); send it without compression"),
    (b"\xef\xbb\xbf", "begins with a byte order mark (byte 0); remove it"),
    (b"\xff\xfe\0\0", "is UTF-32 (byte 0 is a byte order mark); send UTF-8"),
    (b"\0\0\xfe\xff", "is UTF-32 (byte 0 is a byte order mark); send UTF-8"),
    (b"\xff\xfe", "is UTF-16 (byte 0 is a byte order mark); send UTF-8"),
    (b"\xfe\xff", "is UTF-16 (byte 0 is a byte order mark); send UTF-8"),
    (b"{\0", "is UTF-16 (byte 1 is zero); send UTF-8"),
    (b"\0{", "is UTF-16 (byte 0 is zero); send UTF-8"),
)


def read_json(data: bytes, kind: Any = Any) -> Any:
    """Decode standard JSON: no NaN, no lone surrogates, limited nesting. Raises msgspec.DecodeError or RecursionError if it is
    invalid, msgspec.ValidationError if it is not of type `kind`, ApiError if it holds too many values."""
    check_size(data)
    collects = gc.isenabled()
    # The collector would walk the growing value again and again; JSON has no cycles.
    gc.disable()
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError:
        raise msgspec.DecodeError("it is not UTF-8") from None
    finally:
        if collects:
            gc.enable()


def read_body(data: bytes, kind: type[T]) -> T:
    """Decode the body of a request. Raises ApiError."""
    if not data.strip():
        raise ApiError(400, "the body is missing; give it", code="missing_field")
    try:
        return read_json(data, kind)
    except msgspec.ValidationError as error:
        if not _may_be_normalized(_shortened(error), data):
            raise _refusal(error, data, kind) from None
        return _read_normalized(data, kind, error)
    except (msgspec.DecodeError, RecursionError):
        raise ApiError(400, json_problem(data)) from None


def _may_be_normalized(message: str, data: bytes) -> bool:
    """Return whether the first error of a body may be another spelling: null for an unknown field, or an integer as 5.0.

    Bodies with more than NORMALIZED values are not normalized: it would delay other requests.
    """
    if (match := WRONG.fullmatch(message)) is None or (unknown := UNKNOWN.fullmatch(match["what"])) is None:
        other_spelling = "got `float`" in message
    elif len(unknown["name"]) > MOST_NAME:
        return False
    else:
        name = re.escape(msgspec.json.encode(unknown["name"]))
        other_spelling = re.search(rb"%s\s*:\s*null\b" % name, data) is not None
    return other_spelling and (len(data) <= NORMALIZED or int(_count(data)[[0, 2]].sum()) <= NORMALIZED)


def _refusal(error: msgspec.ValidationError, data: bytes, kind: type[StrictStruct]) -> ApiError:
    """Return the first error of a body; data behind it may be invalid JSON, which is reported instead."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ApiError(400, json_problem(data))
    return _wrong_field(_shortened(error), kind)


def _shortened(error: msgspec.ValidationError) -> str:
    """Return the message of an error without the middle of a name of megabytes, which patterns would walk through."""
    message = str(error)
    return message if len(message) <= 2 * LONG_MESSAGE else message[:LONG_MESSAGE] + message[-LONG_MESSAGE:]


def _read_normalized(data: bytes, kind: type[T], first: msgspec.ValidationError) -> T:
    """Decode a body that may have values in another spelling. Raises ApiError."""
    try:
        value = read_json(data)
    except msgspec.ValidationError:  # a number outside every type; `first` names the field
        raise _wrong_field(str(first), kind) from None
    except (msgspec.DecodeError, RecursionError):
        raise ApiError(400, json_problem(data)) from None
    try:
        return msgspec.convert(normalize(value, type_of(kind)), kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None


def read_query(given: dict[str, str], kind: type[T]) -> T:
    """Convert query parameters. Raises ApiError."""
    if unknown := sorted(set(given) - set(kind.__struct_fields__)):
        name = unknown[0][:100]
        raise ApiError(400, f"unknown parameter {name!r}; remove it", param=name, code="unknown_parameter")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None


def read_form(given: dict[str, Any], kind: type[T]) -> T:
    """Convert the fields of a form: texts, or lists of texts. Raises ApiError."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None


def check_size(data: bytes) -> None:
    """Raises ApiError if decoding all values of a body would delay other requests.

    The counts of its characters are upper bounds. If they are above a limit, the characters outside of strings are counted,
    until one count is above its limit.
    """
    if len(data) < CONTAINERS or (
        data.count(b"[") + data.count(b"{") <= CONTAINERS and data.count(b'"') <= 2 * STRINGS and data.count(b",") <= VALUES
    ):
        return
    for count, bound, what in zip(_count(data), MOST, ("arrays and objects", "texts and names", "values"), strict=True):
        if count > bound:
            most = bound // 2 if bound == 2 * STRINGS else bound
            raise ApiError(400, f"the body holds more than {most} {what}; send less", code="invalid_value")


def _count(data: bytes) -> np.ndarray:
    """Count opening brackets, quotes and commas outside of strings, until one count is above its limit in MOST."""
    data = b" " + (data.replace(rb"\\", b"  ") if rb"\\" in data else data)
    read = np.frombuffer(data, np.uint8)
    counts, within = np.zeros(3, np.int64), False
    for start in range(1, len(read), PIECE):
        piece = read[start : start + PIECE]
        quotes = (piece == QUOTE) & (read[start - 1 : start - 1 + len(piece)] != BACKSLASH)
        outside = np.bitwise_xor.accumulate(quotes) ^ (not within)
        within = not outside[-1]
        counts[0] += np.count_nonzero(((piece | OTHER_CASE) == OBJECT) & outside)
        counts[1] += np.count_nonzero(quotes)
        counts[2] += np.count_nonzero((piece == COMMA) & outside)
        if (counts > MOST).any():
            break
    return counts


def _wrong_field(message: str, kind: type[StrictStruct]) -> ApiError:
    """Return the error for a message of msgspec. It repeats nothing of the body but the name of an unknown field."""
    what, place = message, ""
    if (match := re.fullmatch(WRONG, message)) is not None:
        what, place = match["what"], match["where"] or ""
    path = [part for part in re.split(r"[.\[\]]+", place) if part]
    if (named := UNKNOWN.fullmatch(what)) is not None or (named := MISSING.fullmatch(what)) is not None:
        path.append(named["name"])
    elif (own := re.match(r"([a-z_.0-9]+): ", what)) is not None:  # raised by a `__post_init__`
        path += own[1].split(".")
        what = what[own.end() :]
    where, param = ".".join(path)[:200], path[0][:100] if path else None
    if UNKNOWN.fullmatch(what):
        question = did_you_mean(where, kind.__struct_fields__, "remove it")
        return ApiError(400, f"unknown field {where!r}; {question}", param=param, code="unknown_field")
    if MISSING.fullmatch(what):
        return ApiError(400, f"{where} is missing; give it", param=param, code="missing_field")
    return ApiError(400, f"{where or 'the body'}: {_words(what, kind, param)}", param=param, code="invalid_value")


def _words(what: str, kind: type[StrictStruct], param: str | None) -> str:
    """Describe what a value must be."""
    if what.startswith("Invalid enum value"):
        return f"must be {' or '.join(_choices(get_type_hints(kind, include_extras=True).get(param or '')))}"
    if what.endswith("out of range"):
        return "must be a number nearer to zero"
    if (match := EXPECTED.fullmatch(what)) is None:
        return what[:300]
    kinds = [KINDS.get(one, one) for one in match["kinds"].split(" | ") if one != "null"]
    must = "must be " + " or ".join(kinds)
    if match["length"]:
        must += f" of {BOUNDS[match['bound']]} {match['most']} {'characters' if kinds == ['text'] else 'entries'}"
    elif match["bound"]:
        must += f", {BOUNDS[match['bound']]} {match['most']}"
    return must if match["got"] is None else f"{must}, not {KINDS.get(match['got'], match['got'])}"


def _choices(kind: Any) -> list[str]:
    """Return the values of a `Literal`, also of one inside a union."""
    if get_origin(kind) is Literal:
        return [str(one) for one in get_args(kind)]
    return [text for one in get_args(kind) for text in _choices(one)]


@functools.cache
def type_of(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def normalize(value: Any, kind: inspect.Type) -> Any:
    """Return a decoded value without unknown fields that are null, and with integers where `kind` has integers."""
    if isinstance(kind, inspect.Metadata):  # a type with additions for the OpenAPI document
        kind = kind.type
    match kind:
        case inspect.StructType() if isinstance(value, dict) and len(value) <= MOST_FIELDS:
            known = {one.encode_name: one.type for one in kind.fields}
            kept = {name: inner for name, inner in value.items() if name in known or inner is not None}
            return {name: normalize(inner, known[name]) if name in known else inner for name, inner in kept.items()}
        case inspect.UnionType():
            return _normalize_union(value, [one.type if isinstance(one, inspect.Metadata) else one for one in kind.types])
        case inspect.IntType() if type(value) is float and value.is_integer():
            return int(value)
        case inspect.ListType() if isinstance(value, list):
            return [normalize(inner, kind.item_type) for inner in value]
        case inspect.DictType() if isinstance(value, dict) and not isinstance(kind.value_type, inspect.AnyType):
            return {name: normalize(inner, kind.value_type) for name, inner in value.items()}
    return value


def _normalize_union(value: Any, kinds: Sequence[inspect.Type]) -> Any:
    wanted: Any
    match value:
        case float():
            wanted = () if any(isinstance(one, inspect.FloatType) for one in kinds) else inspect.IntType
        case list():
            wanted = inspect.ListType
        case dict():
            wanted = (inspect.StructType, inspect.DictType)
        case _:
            return value
    inner = next((one for one in kinds if isinstance(one, wanted)), None)
    return value if inner is None else normalize(value, inner)


def json_problem(data: bytes, what: str = "the body") -> str:
    """Return one line about bytes that `read_json` refuses. `what` names them."""
    for beginning, cause in BEGINNINGS:
        if data.startswith(beginning):
            return f"{what} {cause}"
    try:
        data.decode()
        msgspec.json.decode(data, type=msgspec.Raw)
    except UnicodeDecodeError as error:
        return f"{what} is not UTF-8 at byte {error.start}; send UTF-8"
    except RecursionError:
        return f"{what} is nested too deeply; flatten it"
    except msgspec.DecodeError as error:
        return f"{what} is not JSON: {_cause(data, str(error))}"
    return f"{what} is not JSON, or is nested too deeply"


def _cause(data: bytes, message: str) -> str:
    match = PLACE.fullmatch(message)
    if match is None or "surrogate" in message:  # msgspec reports some lone surrogates as cut off
        if lone := LONE_SURROGATE.search(data.replace(rb"\\", b"  ")):
            return f"the escape {lone[0].decode()} at byte {lone.start()} is a lone surrogate; remove it"
        return f"it ends at byte {len(data)} inside a value; send all of it"
    at, cause = int(match["at"]), match["cause"]
    if "trailing comma" in cause:
        return f"there is a trailing comma before byte {at}; remove it"
    for start in (at - 1, at):  # msgspec reports -Infinity at its second byte
        if start >= 0 and (number := NO_NUMBER.match(data, start)):
            return f"{number[0].decode()} at byte {start} is not a number of JSON; send null or leave the field out"
    return f"{cause} at byte {at}"
