"""Parser of calls as XML: `<function=NAME><parameter=KEY>VALUE</parameter></function>` (Seed-OSS, Qwen3-Coder), or
`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` (GLM-4.5).

A value is text; it becomes JSON by the tool's schema. Arguments are shown parameter by parameter.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace.text.dialects.call_formats import CallFormat
from headrace.text.dialects.call_parser import MAX_HEAD, CallParser, Piece

PYTHON = {"True": True, "False": False, "None": None}
MAX_REFERENCES = 8
KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}


class XmlCallParser(CallParser):
    """A `CallParser` of a format with `xml`. schemas: JSON schema of the arguments by tool."""

    def __init__(self, form: CallFormat, schemas: Mapping[str, Mapping[str, Any]], *, held: bool = False) -> None:
        super().__init__(form, held=held)
        self._schemas = schemas
        self._name = ""
        self._count = 0  # parameters of the current call
        tags = self._tags = form.tags
        name = r"\s*{}([^<>\n]{{1,128}}?)\s*{}".format(*map(re.escape, (tags.head, tags.head_end)))
        self._function = re.compile(name if tags.head_end else rf"\s*{re.escape(tags.head)}([^<>\n{{}}]{{1,128}})(?=[\n<])")
        opened, _, rest = tags.key_end.partition("\n")
        between = rf"{re.escape(opened)}\s*{re.escape(rest)}" if rest else re.escape(opened)
        self._parameter = re.compile(rf"\s*{re.escape(tags.key)}([^<>\n]{{1,256}}){between}")
        self._ends = tuple(filter(None, (tags.end.strip(), form.closing)))

    @property
    def unfinished(self) -> bool:
        return self._state == "parameters" or super().unfinished

    def _head(self, pieces: list[Piece]) -> bool:
        if "{".startswith(self._held.lstrip()[:1]) and self._held.strip():
            return super()._head(pieces)  # JSON, as other models of the family write it
        match = self._function.match(self._held)
        if match is None:
            if len(self._held) <= MAX_HEAD:
                return False
            self._state = "text"
            return True
        self._blanks, self._name, self._count = [], match[1].strip(), 0
        pieces += [Piece("", self.calls, self._name), Piece("{", self.calls)]
        self.calls += 1
        self._held, self._state = self._held[match.end() :], "parameters"
        return True

    def _parameters(self, pieces: list[Piece]) -> bool:
        """One parameter, or the end of the function."""
        match = self._parameter.match(self._held)
        if match is not None:
            value, end, rest = self._held[match.end() :].partition(self._tags.value_end)
            if not end:
                return False
            between = ", " if self._count else ""
            key = match[1].strip()
            pieces.append(Piece(f"{between}{json.dumps(key)}: {self._json(key, value)}", self.calls - 1))
            self._count += 1
            self._held = rest
            return True
        lead = self._held.lstrip()
        if lead.startswith(self._ends):
            pieces.append(Piece("}", self.calls - 1))
            self._held, self._state = lead.removeprefix(self._tags.end.strip()), "tail"
            return True
        if lead and not lead.startswith("<"):
            self._held = lead[lead.find("<") :] if "<" in lead else ""  # text between parameters means nothing
            return bool(self._held)
        if len(lead) > MAX_HEAD:  # an unknown tag
            self._held = lead[1:]
            return True
        return False

    def _json(self, key: str, text: str) -> str:
        """The value of a parameter as JSON."""
        text = text.removeprefix("\n").removesuffix("\n")
        root = self._schemas.get(self._name, {})
        kinds = kinds_of((root.get("properties") or {}).get(key), root)
        bare = text.strip()
        if kinds == {"string"}:
            return json.dumps(text, ensure_ascii=False)
        if bare in PYTHON:
            return json.dumps(PYTHON[bare])
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        kind = KIND_OF[type(value)]
        fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
        return json.dumps(value if fits or "string" not in kinds else text, ensure_ascii=False)


def resolved(schema: Any, root: Any) -> Any:
    """The schema, or the target of its reference to `#/$defs/…` of the root."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not isinstance(root, Mapping):
            return schema
        place, _, name = reference.removeprefix("#/").partition("/")
        schema = (root.get(place) or {}).get(name) if place in ("$defs", "definitions") else None
    return None


def kinds_of(schema: Any, root: Any = None) -> frozenset[str]:
    """JSON types that a schema allows by `type`, `enum`, `const` and unions of them; empty: unknown."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(named := schema.get("type"), str | list):
        return frozenset({named} if isinstance(named, str) else filter(lambda one: isinstance(one, str), named))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return frozenset(KIND_OF.get(type(value), "object") for value in values)
    branches = [kinds_of(each, root) for name in ("anyOf", "oneOf") for each in schema.get(name) or [] if each is not schema]
    return frozenset().union(*branches) if branches and all(branches) else frozenset()


def _refuse(text: str) -> Any:
    raise ValueError(text)
