"""Declarations of request parameters and model settings: a `Field` in the annotation of a struct's field.

This module checks values by the declarations. Protocols, the command line, the native core and the docs are made from them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from enum import Flag
from functools import cache
from itertools import chain
from math import inf, isfinite
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from headrace.data.spelling import did_you_mean
from headrace.data.structured import ConstraintError, StructuredOutputs

PROMPT = "prompt"  # `FieldError.field` of an error about a prompt
# Default bound of a whole number.
LARGEST = 2**31 - 1
SPELLED: dict[float, str] = {LARGEST: "2**31 - 1", 2**64 - 1: "2**64 - 1"}


class FieldError(ValueError):
    """An error about one field of a request.

    field: the field's flat name (`Declared.flat`). For the prompt it is PROMPT, although protocols call that field prompt,
    messages or input.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type["FieldError"], tuple[str, str]]:
        return type(self), (self.field, str(self))


class ParamError(FieldError):
    """An invalid parameter. The message names it and the required change."""


class Params(msgspec.StructMeta):
    """Metaclass of parameter structs. Raises TypeError for an unknown field, with the most similar known name."""

    def __call__(self, *args: Any, **fields: Any) -> Any:
        known = self.__struct_fields__
        if unknown := [name for name in fields if name not in known]:
            question = did_you_mean(unknown[0], known, f"help(headrace.{self.__name__}) lists the fields")
            raise TypeError(f"{self.__name__} has no field {unknown[0]!r}; {question}")
        return super().__call__(*args, **fields)


class Use(Flag):
    """The component that reads a field.

    LOOP: the engine, for every strategy. DRAW: a `Sample` want. CORE: the native sampler, under the same name. FILTER: a
    sampler field that excludes tokens, none by default. DETAIL: it only qualifies another field.
    """

    NOBODY = 0
    LOOP = 1
    DRAW = 2
    CORE = 4
    SAMPLER = DRAW | CORE
    FILTER = SAMPLER | 8
    DETAIL = 16


@dataclass(frozen=True, slots=True)
class Field:
    """Declaration of a field, next to its type and default.

    doc: help text without a full stop. ge, gt, le, lt: bounds of a number. most: largest number of entries of a
    list or mapping; each: of the lists in it. means: a value and its meaning, such as (0, "off"). neutral: values that mean the
    same as the default. name: the flat name (`Declared.flat`), if it is not the field's. http: protocols of the server accept
    the field. option: more names on the command line; None: the field is no option there.
    """

    doc: str
    use: Use = Use.NOBODY
    _: KW_ONLY
    ge: float = -inf
    gt: float = -inf
    le: float = inf
    lt: float = inf
    most: int = LARGEST
    each: int = LARGEST
    means: tuple[float, str] | None = None
    neutral: tuple[object, ...] = ()
    name: str = ""
    http: bool = True
    option: str | None = ""

    @property
    def help(self) -> str:
        """Help text on the command line."""
        return f"{self.doc}." if self.means is None else f"{self.doc} ({self.means[0]}: {self.means[1]})."

    @property
    def bounds(self) -> str:
        """The range of a number in words."""
        words = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        spelled = {word: self._spelled(bound) for word, bound in words.items() if isfinite(bound)}
        if spelled.keys() == {"at least", "at most"}:
            text = f"between {spelled['at least']} and {spelled['at most']}"
        elif spelled.keys() == {"at least"}:
            text = f"{spelled['at least']} or more"
        else:
            text = " and ".join(f"{word} {bound}" for word, bound in spelled.items()) or "a finite number"
        if self.means is None or self.means[0] in words.values():
            return text
        return f"{text} ({self.means[0]} is {self.means[1]})"

    def _spelled(self, bound: float) -> str:
        text = SPELLED.get(bound, str(bound))
        return f"{text} ({self.means[1]})" if self.means is not None and self.means[0] == bound else text

    def holds(self, value: Any) -> bool:
        """Whether a real number is within the bounds; NaN never is."""
        return bool(self.ge <= value <= self.le and self.gt < value < self.lt)


@dataclass(frozen=True, slots=True)
class Declared:
    """One field of a struct with its declaration.

    kind: its type without None. check: returns the value that the struct keeps, or raises ParamError.
    """

    name: str
    kind: Any
    optional: bool
    default: Any
    field: Field
    check: "Callable[[Declared, Any], Any]"

    @property
    def flat(self) -> str:
        """Name in protocols and on the command line, where all fields are in one list, also those of nested structs."""
        return self.field.name or self.name


UNSAID = Field("")  # of a field without a declaration


@cache
def declared(params: type[msgspec.Struct]) -> tuple[Declared, ...]:
    """The declared fields of a struct, in its order."""
    hints = get_type_hints(params, include_extras=True)
    return tuple(
        _declared(name, hints[name], default)
        for name, default in zip(params.__struct_fields__, params.__struct_defaults__, strict=True)
    )


def _declared(name: str, hint: Any, default: Any) -> Declared:
    kind, field = get_args(hint) if get_origin(hint) is Annotated else (hint, UNSAID)
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    optional = NoneType in members
    if optional:
        kind = Union[tuple(member for member in members if member is not NoneType)]  # noqa: UP007 - of one type it is that type
    check = _choice if get_origin(kind) is Literal else CHECKS.get(kind, lambda one, value: value)
    return Declared(name, kind, optional, default, field, check)


def check(params: msgspec.Struct) -> None:
    """Check each field of `params` by itself. Raises ParamError for the first invalid value. Lists become tuples."""
    for one in declared(type(params)):
        value = getattr(params, one.name)
        if value is one.default or (value is None and one.optional):
            continue
        plain = plain_value(value)
        if isinstance(plain, (list, tuple, dict)) and len(plain) > one.field.most:
            raise ParamError(one.flat, f"{one.name} may have {one.field.most} entries, not {len(plain)}; leave some out")
        checked = one.check(one, plain)
        if checked is not value:
            msgspec.structs.force_setattr(params, one.name, checked)


def fields_with_use(params: type[msgspec.Struct], use: Use) -> tuple[str, ...]:
    """The names of the fields with this use."""
    return tuple(one.name for one in declared(params) if use in one.field.use)


def ignored_fields(params: msgspec.Struct, honours: frozenset[str]) -> list[str]:
    """The fields that are set but that neither a method with the fields `honours` nor the engine reads."""
    return [
        one.name
        for one in declared(type(params))
        if (value := getattr(params, one.name)) is not one.default
        and not (one.name in honours or one.field.use & (Use.LOOP | Use.DETAIL))
        and value not in (one.default, *one.field.neutral)
    ]


def token_ids(params: msgspec.Struct) -> Iterator[tuple[str, Iterable[int]]]:
    """The fields that hold token ids, with the ids."""
    for one in declared(type(params)):
        if one.kind in (IDS, BIASES):
            yield one.name, getattr(params, one.name) or ()
        elif one.kind == ID_LISTS:
            yield one.name, chain.from_iterable(getattr(params, one.name))


def plain_value(value: Any) -> Any:
    """Scalars and arrays of numpy and torch as Python's own numbers and lists; any other value unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value


# -- checks by type: value -> the value that the struct keeps ----------------------------------------------------------------


def _flag(one: Declared, value: object) -> object:
    if not isinstance(value, bool):
        raise ParamError(one.flat, f"{one.name} must be true or false, not {value!r}")
    return value


def _number(one: Declared, value: object) -> object:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ParamError(one.flat, f"{one.name} must be a number, not {value!r}")
    if not one.field.holds(value):
        raise ParamError(one.flat, f"{one.name} must be {one.field.bounds}, not {value}")
    return value if isinstance(value, int) else float(value)


def _whole(one: Declared, value: object) -> object:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ParamError(one.flat, f"{one.name} must be an integer{' or None' if one.optional else ''}, not {value!r}")
    number = int(value)
    if one.field.le == inf and abs(number) > LARGEST:
        raise ParamError(one.flat, f"{one.name} must be at most {SPELLED[LARGEST]}, not {number}")
    return _number(one, number)


def _choice(one: Declared, value: object) -> object:
    allowed = get_args(one.kind)
    if value not in allowed:
        choices = " or ".join(allowed) if len(allowed) < 3 else f"one of {', '.join(allowed)}"
        raise ParamError(one.flat, f"{one.name} must be {choices}, not {value!r}")
    return value


def _list(one: Declared, value: object) -> tuple[Any, ...]:
    """A list as a tuple. A single text counts as a list of one."""
    if not isinstance(value, (str, list, tuple)):
        raise ParamError(one.flat, f"{one.name} must be a list, not {value!r}")
    return (value,) if isinstance(value, str) else value if isinstance(value, tuple) else tuple(value)


def _texts(one: Declared, value: object) -> object:
    texts = _list(one, value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ParamError(one.flat, f"{one.name} strings must be non-empty text; remove the empty one")
    return tuple(map(str, texts))


def _ids(one: Declared, value: object) -> object:
    return tuple(_id(one, token) for token in _list(one, value))


def _id(one: Declared, value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    token = plain_value(value)
    number = int(token) if isinstance(token, Integral) and not isinstance(token, bool) else -1
    if number < 0:
        raise ParamError(one.flat, f"token ids in {one.name} must be integers of 0 or more, not {value!r}")
    return number


def _id_lists(one: Declared, value: object) -> object:
    return tuple(_id_list(one, plain_value(word)) for word in _list(one, value))


def _id_list(one: Declared, word: object) -> tuple[int, ...]:
    if not isinstance(word, (list, tuple)):
        raise ParamError(one.flat, f"{one.name} must be lists of token ids, not {word!r}")
    if not word:
        raise ParamError(one.flat, f"each of {one.name} needs at least one token; remove the empty one")
    if len(word) > one.field.each:
        raise ParamError(one.flat, f"each of {one.name} may have {one.field.each} tokens, not {len(word)}; shorten it")
    return tuple(_id(one, token) for token in word)


def _biases(one: Declared, value: object) -> object:
    if not isinstance(value, dict):
        raise ParamError(one.flat, f"{one.name} must map token ids to numbers, not {value!r}")
    return {_id(one, token): _bias(one, token, plain_value(bias)) for token, bias in value.items()}


def _bias(one: Declared, token: object, bias: object) -> float:
    if not isinstance(bias, Real) or isinstance(bias, bool) or not one.field.holds(bias):
        raise ParamError(one.flat, f"{one.name} of token {token} must be {one.field.bounds}, not {bias!r}")
    return float(bias)


def _form(one: Declared, value: object) -> object:
    try:
        return StructuredOutputs.of(value)
    except ConstraintError as error:
        raise ParamError(one.flat, str(error)) from None


TEXTS, IDS, ID_LISTS, BIASES = tuple[str, ...], tuple[int, ...], tuple[tuple[int, ...], ...], dict[int, float]
CHECKS: dict[Any, Callable[[Declared, Any], Any]] = {
    bool: _flag,
    float: _number,
    int: _whole,
    TEXTS: _texts,
    IDS: _ids,
    ID_LISTS: _id_lists,
    BIASES: _biases,
    StructuredOutputs: _form,
}
