"""Grammar of tool calls as XML: the parameters of a tool in the order of its schema, each value between two tags.

A value of another type than text is JSON and follows its schema. A text has no quotes and may be anything without the closing
tag; of its schema `enum`, `const`, `minLength` and `maxLength` are held to. `unheld_of` names the rest.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.decoding.grammar import WHITESPACE
from headrace.text.dialects.call_formats import CallFormat, XmlTags
from headrace.text.dialects.xml_calls import kinds_of, resolved

# Keywords of a text's schema that a grammar of XML holds to, or that say nothing about the value.
HELD = frozenset("type enum const minLength maxLength title description default examples deprecated $ref $comment".split())
TEXT = frozenset({"string"})


def xml_rules(form: CallFormat, names: Sequence[str], schemas: Sequence[Mapping[str, Any]], given: Sequence[Any]) -> list[str]:
    """The rules `body`, for each tool `body_0`, …: a call between the opening and the closing tag.

    schemas: of the arguments, as the grammar compiler takes them. given: the same as the client gave them.
    """
    tags = form.tags
    rules = [f"body: {' | '.join(f'body_{i}' for i in range(len(names)))}"]
    for i, (name, schema, original) in enumerate(zip(names, schemas, given, strict=True)):
        parts = []
        given_properties, required = schema.get("properties"), schema.get("required") or []
        listed: dict[str, Any] = given_properties if isinstance(given_properties, dict) else {}
        for j, key in enumerate(listed):
            if listed[key] is False:
                continue
            parts.append(f"value_{i}_{j}" + ("" if key in required else "?"))
            rules.append(f"value_{i}_{j}: {_parameter(f'{i}_{j}', key, schema, original, tags, rules)}")
        if not isinstance(given_properties, dict) or schema.get("additionalProperties", True) is not False:
            parts.append(f"other_{i}*")
            head, between = json.dumps(tags.key), json.dumps(tags.key_end)
            rules.append(f"other_{i}: {head} /[^<>\\n]{{1,256}}/ {between} any_{i}")
            rules.append(f"any_{i}[lazy]: {_terminal(f'ANY_{i}', _free(tags), rules)} {json.dumps(tags.value_end)} {_line()}")
        head = json.dumps(f"{tags.head}{name}{tags.head_end}\n")
        rules.append(f"body_{i}: {head} {' '.join(parts)} {json.dumps(tags.end) if tags.end else ''}")
    return rules


def unheld_of(schema: Any) -> list[str]:
    """Keywords of the arguments' schema that a grammar of XML leaves out."""
    if not isinstance(schema, dict) or not isinstance(listed := schema.get("properties"), dict):
        return ["parameters without properties"] if isinstance(schema, dict) and {*schema} & {"$ref", "anyOf", "oneOf"} else []
    found = set[str]()
    for each in listed.values():
        kinds, target = kinds_of(each, schema), resolved(each, schema)
        if kinds == TEXT and isinstance(target, dict):
            found |= target.keys() - HELD
        elif "string" in kinds or not kinds:
            found.add("values of several types")
    return sorted(found)


def invalid_name(schema: Any) -> str | None:
    """A parameter whose name XML cannot hold; None if there is none."""
    listed = schema.get("properties") if isinstance(schema, dict) else None
    names = listed if isinstance(listed, dict) else {}
    return next((key for key in names if set(key) & set("<>\n") or not key.strip() or len(key) > 256), None)


def _parameter(number: str, key: str, schema: Mapping[str, Any], given: Any, tags: XmlTags, rules: list[str]) -> str:
    """The body of a rule: one parameter."""
    head = json.dumps(f"{tags.key}{key}{tags.key_end}{tags.wrap}")
    original = given.get("properties", {}).get(key) if isinstance(given, dict) else None
    kinds = kinds_of(original, given)
    if kinds == TEXT:
        return f"{head} {_text(number, resolved(original, given), tags, rules)}"
    if "string" in kinds or not kinds:
        return f"{head} {_ended(number, _free(tags), tags, rules)}"
    shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    value = schema["properties"][key]
    typed = {**(value if isinstance(value, dict) else {}), **shared}
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}
    return f"{head} %json {json.dumps(typed | options)} {json.dumps(tags.wrap + tags.value_end)} {_line()}"


def _text(number: str, schema: Any, tags: XmlTags, rules: list[str]) -> str:
    """A text, its end included."""
    limits = schema if isinstance(schema, dict) else {}
    chosen = limits["enum"] if isinstance(limits.get("enum"), list) else [limits["const"]] if "const" in limits else None
    if chosen is not None:
        ended = [json.dumps(str(text) + tags.wrap + tags.value_end) for text in chosen]
        return f"({' | '.join(ended)}) {_line()}"
    least, most = limits.get("minLength"), limits.get("maxLength")
    if least is None and most is None:
        return _ended(number, _free(tags), tags, rules)
    counted = f"(.|\\n){{{int(least or 0)},{'' if most is None else int(most)}}}"
    # Without a line of its own, the reader takes a line feed at either end for layout.
    inner = "" if tags.wrap else r" & ~/\n(.|\n)*/ & ~/(.|\n)*\n/"
    return _ended(number, f"/{counted}/{_without_end(tags)}{inner}", tags, rules)


def _free(tags: XmlTags) -> str:
    """Any text without the closing tag."""
    return f"/(.|\\n)*/{_without_end(tags)}"


def _without_end(tags: XmlTags) -> str:
    return f" & ~/(.|\\n)*{tags.value_end.replace('/', chr(92) + '/')}(.|\\n)*/"


def _ended(number: str, terminal: str, tags: XmlTags, rules: list[str]) -> str:
    """A reference to a text with its closing tag."""
    name = _terminal(f"TEXT_{number}", terminal, rules)
    rules.append(f"text_{number}[lazy]: {name} {json.dumps(tags.wrap + tags.value_end)}")
    return f"text_{number} {_line()}"


def _terminal(name: str, terminal: str, rules: list[str]) -> str:
    rules.append(f"{name}: {terminal}")
    return name


def _line() -> str:
    return json.dumps("\n")
