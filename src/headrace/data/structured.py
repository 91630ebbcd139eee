"""`StructuredOutputs`: the constraint of an output, a JSON schema, a regex, a choice or a grammar. Plain data."""

import json
from typing import Any, Self

import msgspec

MAX_SOURCE = 256 << 10  # characters of a schema, a regex or a grammar
MAX_CHOICES = 4096
KINDS = ("json", "json_object", "regex", "choice", "grammar")


class ConstraintError(ValueError):
    """An invalid constraint: malformed, too large, or not supported. The message contains the required change."""


class StructuredOutputs(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True, forbid_unknown_fields=True
):
    """The constraint of an output, exactly one of the first five fields. The names are those of other engines.

    json: JSON schema, text or object. json_object: any JSON object. regex: Rust's syntax, over the whole output. choice: one
    of these texts. grammar: Lark, or GBNF/EBNF with `::=`.
    disable_any_whitespace: JSON without whitespace. open_objects: objects may have properties that the schema does not list,
    and numbers any count of digits. Raises ConstraintError.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    disable_any_whitespace: bool = False
    open_objects: bool = False

    def __post_init__(self) -> None:
        if not (self.json is None or isinstance(self.json, str)):
            msgspec.structs.force_setattr(self, "json", _text(self.json))
        if isinstance(self.choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        given = [name for name in KINDS if getattr(self, name) not in (None, (), False)]
        _require(len(given) == 1, f"a constraint is one of {', '.join(KINDS)}, not {', '.join(given) or 'none of them'}")
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), f"{name} must be text, not {type(value).__name__}")
            _require(
                value is None or 0 < len(value) <= MAX_SOURCE,
                f"{name} must have 1 to {MAX_SOURCE} characters, not {len(value or '')}; give another",
            )
        self._check_choice()

    def _check_choice(self) -> None:
        _require(
            isinstance(self.choice, tuple) and all(isinstance(text, str) and text for text in self.choice),
            "choice must be a list of texts, none of them empty",
        )
        _require(
            len(self.choice) <= MAX_CHOICES and sum(map(len, self.choice)) <= MAX_SOURCE,
            f"choice may have {MAX_CHOICES} texts of {MAX_SOURCE} characters in all; give fewer",
        )

    @classmethod
    def of(cls, value: Any) -> Self:
        """Convert from a mapping of the fields. Raises ConstraintError."""
        if isinstance(value, cls):
            return value
        _require(isinstance(value, dict), f"structured_outputs must be a mapping or StructuredOutputs, not {value!r}")
        if unknown := sorted(set(map(str, value)) - set(cls.__struct_fields__)):
            raise ConstraintError(f"structured_outputs has no {unknown[0][:40]!r}; use {', '.join(cls.__struct_fields__)}")
        for name in ("json_object", "disable_any_whitespace", "open_objects"):
            _require(isinstance(value.get(name, False), bool), f"{name} must be true or false, not {value.get(name)!r}")
        return cls(**value)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConstraintError(message)


def _text(schema: object) -> str:
    """JSON text of a schema that is an object."""
    _require(isinstance(schema, (dict, bool)), f"a JSON schema is an object, not {type(schema).__name__}")
    try:
        # Much faster than json.dumps. A character has at most four bytes.
        size = len(msgspec.json.encode(schema))
        if size <= 4 * MAX_SOURCE:
            return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConstraintError(f"the JSON schema is not JSON ({error}); correct it") from None
    raise ConstraintError(f"json has {size} bytes and {MAX_SOURCE} characters is the limit; make it smaller")
