"""Inspects clients' constraints and checks finished texts against them, in a confined process with limits on time and
memory."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
from llguidance import LLMatcher

from headrace.confined.pool import OverrunError, Task, shared_pool
from headrace.data.outputs import RequestOutput
from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.constrained import limits
from headrace.decoding.grammar import grammar_of
from headrace.decoding.json_schema.prepare import late_keywords, prepare, why_broken
from headrace.decoding.tools import CallReader, Tooling, gathered_calls
from headrace.text.dialects.call_parser import Piece
from headrace.text.dialects.json_calls import Steps

CHECK = Task(__name__, "inspect_constraint", memory=2 << 30)


@contextlib.contextmanager
def refuse_overruns() -> Iterator[None]:
    """While open, a task that exceeds its limits raises ConstraintError."""
    try:
        yield
    except OverrunError:
        raise ConstraintError("the constraint takes too much time or memory to check; make it smaller") from None


def raise_on_error(answer: dict[str, Any]) -> dict[str, Any]:
    """The result of `inspect_constraint`. Raises ConstraintError if it is an error."""
    if "error" in answer:
        raise ConstraintError(answer["error"])
    return answer


def inspect_constraint(question: dict[str, Any]) -> dict[str, Any]:
    """Answer one question. {"spec"}: {"late", "grammar"}, the keywords that masks do not enforce, and the grammar. {"schemas"}:
    {"prepared"} (both JSON of a list). {"spec", "text"}: {"broken"}, why the text does not fit. In case of an error
    {"error"}."""
    try:
        if "schemas" in question:
            closed = not question.get("open_objects", False)
            made = [_prepare(number, schema, closed) for number, schema in enumerate(json.loads(question["schemas"]))]
            return {"prepared": json.dumps(made)}
        spec = StructuredOutputs.of(question["spec"])
        if "text" in question:
            return {"broken": why_broken(spec, question["text"])}
        late = late_keywords(spec)
        grammar = grammar_of(spec)
        if problem := LLMatcher.validate_grammar(grammar, None, limits=limits()):
            return {"error": f"the constraint cannot be compiled: {' '.join(problem.split())[:300]}"}
        return {"late": late, "grammar": grammar}
    except ConstraintError as error:
        return {"error": str(error)}
    except (RecursionError, MemoryError):
        return {"error": "the constraint is too large or nested too deeply; make it smaller"}
    except Exception as error:
        # Another library, with a client's input.
        return {"error": f"the constraint cannot be understood ({type(error).__name__}); correct it"}


def _prepare(number: int, schema: dict[str, Any], closed: bool) -> dict[str, Any]:
    """Prepare one of several schemas; an error names its number."""
    try:
        made = prepare(schema, closed=closed)
    except ConstraintError as error:
        raise ConstraintError(f"number {number}: {error}") from None
    return {"schema": made.schema, "late": made.late}


def warm(_: str) -> None:
    """Load what the libraries load on first use: drafts of JSON schema, and grammars in other syntaxes."""
    for draft in ("2020-12", "2019-09"):
        schema = {"$schema": f"https://json-schema.org/draft/{draft}/schema", "oneOf": [{"const": 1}, {"type": "string"}]}
        spec = {"json": json.dumps({**schema, "format": "date-time", "pattern": "a", "uniqueItems": True})}
        inspect_constraint({"spec": spec})
        inspect_constraint({"spec": spec, "text": "[1, 1]"})
    inspect_constraint({"spec": {"grammar": "root ::= a"}})


def check_outputs(output: RequestOutput) -> None:
    """Check finished texts for the schema keywords that masks do not enforce. A text that does not fit, or cannot be checked,
    gets the finish reason "error", and the output gets the message."""
    spec = output.structured
    if spec is None or spec.json is None or output.error is not None or not late_keywords(spec):
        return
    for one in output.outputs:
        if one.finish_reason == "stop" and (broken := _check_text(spec, one.text)):
            one.finish_reason, output.error = "error", broken


def extract_calls(output: RequestOutput, tools: Tooling) -> None:
    """Move the tool calls from the texts of a finished output to its `tool_calls`."""
    for one in output.outputs:
        reader = CallReader(tools)
        one.text, one.tool_calls = gathered_calls(_pieces(reader.push(one.text, final=True), tools))
        one.finish_reason = reader.finish_reason(one.finish_reason)


def _pieces(steps: Steps, tools: Tooling) -> list[Piece]:
    """The pieces of an answer. A JSON object in its text is a call if its arguments fit."""
    try:
        call = next(steps)
        while True:
            call = steps.send(not _check_text(tools.schema_of(call.name), call.arguments))
    except StopIteration as end:
        return list(end.value)


def _check_text(spec: StructuredOutputs, text: str) -> str:
    """Why a finished text does not fit; empty if it does. Runs in a confined process, as some patterns take for ever."""
    try:
        with refuse_overruns():
            return str(raise_on_error(shared_pool().run(CHECK, {"spec": msgspec.to_builtins(spec), "text": text}))["broken"])
    except ConstraintError as error:
        return str(error)
    except Exception as error:
        # An output that cannot be checked must not fail the caller's other outputs.
        return f"the output cannot be checked against its JSON schema ({type(error).__name__}: {str(error)[:200]})"
