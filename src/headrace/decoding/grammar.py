"""Turns structured-output parameters into a grammar in llguidance's format."""

import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.json_schema.literals import literally
from headrace.decoding.json_schema.prepare import prepare, read_schema

# Between the parts of a JSON text: nothing, one space, or a new line with its indent, once. A model cannot lose itself in
# blanks: an indent has six levels of four spaces, or eight of a tab; what is deeper is indented no further.
WHITESPACE = r"[ ]?|\r?\n(?:[ ]{0,24}|\t{0,8})"
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # a text of a Lark grammar may hold the sign, too
MAX_NESTING = 64  # brackets within brackets of a regex or a grammar


def grammar_of(spec: StructuredOutputs) -> str:
    """The grammar of a constraint, not compiled yet. Raises ConstraintError."""
    if spec.json is not None:
        schema = prepare(read_schema(spec.json), closed=not spec.open_objects).schema
        return _json(schema, spec.disable_any_whitespace)
    if spec.json_object:
        return _json({"type": "object"}, spec.disable_any_whitespace)
    if spec.regex is not None:
        _check_nesting(spec.regex, "regex")
        return str(LLMatcher.grammar_from_regex(spec.regex))
    if spec.choice:
        return str(LLMatcher.grammar_from_regex("|".join(map(literally, spec.choice))))
    assert spec.grammar is not None
    return str(LLMatcher.grammar_from_lark(_lark(spec.grammar)))


def _json(schema: dict[str, Any], compact: bool) -> str:
    options: Any = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
    options["lenient"] = False
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


def _lark(grammar: str) -> str:
    _check_nesting(grammar, "grammar")
    if GBNF_RULE.search(grammar) is None:
        return grammar
    try:
        return str(any_to_lark(grammar))
    except Exception as error:
        # Another library's parser, with a client's input.
        raise ConstraintError(f"the grammar is not GBNF ({' '.join(str(error).split())[:200]}); correct it") from None


def _check_nesting(text: str, name: str) -> None:
    """Raise ConstraintError for deep nesting, which would recurse deeply in parsers. Quoted brackets count too, so the bound is
    safe."""
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}" and depth > 0)
        if depth > MAX_NESTING:
            raise ConstraintError(f"the {name} nests brackets more than {MAX_NESTING} deep; flatten it")
