"""Parser of calls as XML: `<function=NAME><parameter=KEY>VALUE</parameter></function>` (Seed-OSS, Qwen3-Coder).

A value is text; it becomes JSON by the tool's schema. Arguments are shown parameter by parameter.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace.text.dialects.call_formats import CallFormat
from headrace.text.dialects.call_parser import MAX_HEAD, CallParser, Piece

FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,128})>")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")
VALUE_END, FUNCTION_END = "</parameter>", "</function>"
PYTHON = {"True": True, "False": False, "None": None}


class XmlCallParser(CallParser):
    """A `CallParser` of a format with `xml`. schemas: JSON schema of the arguments by tool."""

    def __init__(self, form: CallFormat, schemas: Mapping[str, Mapping[str, Any]], *, held: bool = False) -> None:
        super().__init__(form, held=held)
        self._schemas = schemas
        self._name = ""
        self._count = 0  # parameters of the current call

    @property
    def unfinished(self) -> bool:
        return self._state == "parameters" or super().unfinished

    def _head(self, pieces: list[Piece]) -> bool:
        if "{".startswith(self._held.lstrip()[:1]) and self._held.strip():
            return super()._head(pieces)  # JSON, as other models of the family write it
        match = FUNCTION.match(self._held)
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
        match = PARAMETER.match(self._held)
        if match is not None:
            value, end, rest = self._held[match.end() :].partition(VALUE_END)
            if not end:
                return False
            between = ", " if self._count else ""
            key = match[1].strip()
            pieces.append(Piece(f"{between}{json.dumps(key)}: {self._json(key, value)}", self.calls - 1))
            self._count += 1
            self._held = rest
            return True
        lead = self._held.lstrip()
        if lead.startswith((FUNCTION_END, self.form.closing)):
            pieces.append(Piece("}", self.calls - 1))
            self._held, self._state = lead.removeprefix(FUNCTION_END), "tail"
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
        schema = (self._schemas.get(self._name, {}).get("properties") or {}).get(key)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "string":
            return json.dumps(text, ensure_ascii=False)
        bare = text.strip()
        if bare in PYTHON:
            return json.dumps(PYTHON[bare])
        try:
            return json.dumps(json.loads(bare, parse_constant=_refuse), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)


def _refuse(text: str) -> Any:
    raise ValueError(text)
