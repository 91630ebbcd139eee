"""Looks at constraints from strangers, in a process of its own: may they be served, and does a finished text fit.

The kernel ends this process when one question takes more CPU time or memory than it may; nothing else ends with it.
Protocol: a line of JSON in ({"spec", "seconds"} and perhaps {"text"}, or {"schemas", "seconds"}), a line out ({"late"},
{"broken"}, {"prepared"} or {"error"}).
"""

import json
import sys
from typing import Any

from llguidance import LLMatcher

from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.constrained import limits
from headrace.decoding.grammar import grammar_of
from headrace.decoding.json_schema.prepare import prepare
from headrace.decoding.json_schema.validate import late_keywords, why_broken
from headrace.text.template_worker import cpu_timer, limit_process


def answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        with cpu_timer(question["seconds"]):
            if "schemas" in question:
                return {"prepared": [_prepared(number, schema) for number, schema in enumerate(question["schemas"])]}
            spec = StructuredOutputs.of(question["spec"])
            if "text" in question:
                return {"broken": why_broken(spec, question["text"])}
            late = late_keywords(spec)
            if problem := LLMatcher.validate_grammar(grammar_of(spec), None, limits=limits()):
                return {"error": f"the constraint cannot be compiled: {' '.join(problem.split())[:300]}"}
            return {"late": late}
    except ConstraintError as error:
        return {"error": str(error)}
    except (RecursionError, MemoryError):
        return {"error": "the constraint is too large or nested too deeply; make it smaller"}
    except Exception as error:  # whatever a library makes of a stranger's input
        return {"error": f"the constraint cannot be understood ({type(error).__name__}); correct it"}


def _prepared(number: int, schema: dict[str, Any]) -> dict[str, Any]:
    """One of several schemas, which an error names by its number."""
    try:
        made = prepare(schema)
    except ConstraintError as error:
        raise ConstraintError(f"number {number}: {error}") from None
    return {"schema": made.schema, "late": made.late}


def main() -> None:
    limit_process(int(sys.argv[1]))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
