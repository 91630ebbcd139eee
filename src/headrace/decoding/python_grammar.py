"""Grammar of tool calls as Python: `name(key=value, …)`, the arguments in the order of the tool's schema, each value JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.decoding.grammar import WHITESPACE

KEY = re.compile(r"[^\s=,()'\"\[\]{}]{1,256}")
OPTIONS = {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}


def python_rules(names: Sequence[str], schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rules `body`, for each tool `body_0`, …: a call. schemas: of the arguments, as the grammar compiler takes them."""
    rules = [f"body: {' | '.join(f'body_{i}' for i in range(len(names)))}"]
    for i, (name, schema) in enumerate(zip(names, schemas, strict=True)):
        rules.append(f'body_{i}: {json.dumps(name + "(")} first_{i}_0 ")"')
        rules += _arguments(i, schema)
    return rules


def _arguments(i: int, schema: Mapping[str, Any]) -> list[str]:
    """Rules of a tool's arguments: `first_i_j` are those from the j-th on if none came before, `more_i_j` if one did."""
    given, required = schema.get("properties"), schema.get("required") or []
    listed = {key: value for key, value in given.items() if value is not False} if isinstance(given, dict) else {}
    shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    rules = []
    for j, (key, value) in enumerate(listed.items()):
        typed = {**(value if isinstance(value, dict) else {}), **shared, **OPTIONS}
        rules.append(f"argument_{i}_{j}: {json.dumps(key + '=')} %json {json.dumps(typed)}")
        then = f"argument_{i}_{j} more_{i}_{j + 1}"
        if key in required:
            rules += [f"first_{i}_{j}: {then}", f'more_{i}_{j}: ", " {then}']
        else:
            rules += [f"first_{i}_{j}: {then} | first_{i}_{j + 1}", f'more_{i}_{j}: (", " argument_{i}_{j})? more_{i}_{j + 1}']
    last = len(listed)
    if isinstance(given, dict) and schema.get("additionalProperties", True) is False:
        return [*rules, f'first_{i}_{last}: ""', f'more_{i}_{last}: ""']
    other = f'other_{i}: /[A-Za-z_][A-Za-z0-9_]{{0,127}}/ "=" %json {json.dumps(OPTIONS)}'
    return [*rules, other, f'first_{i}_{last}: (other_{i} (", " other_{i})*)?', f'more_{i}_{last}: (", " other_{i})*']


def unheld_of(schema: Any) -> list[str]:
    """Keywords of the arguments' schema that a grammar of Python calls leaves out."""
    without = isinstance(schema, dict) and not isinstance(schema.get("properties"), dict)
    return ["parameters without properties"] if without and {*schema} & {"$ref", "anyOf", "oneOf"} else []


def invalid_name(schema: Any) -> str | None:
    """A parameter whose name a call as Python cannot hold; None if there is none."""
    listed = schema.get("properties") if isinstance(schema, dict) else None
    return next((key for key in listed or {} if not KEY.fullmatch(key)), None) if isinstance(listed, dict) else None
