"""The format that a request asks of its answers, in the fields of OpenAI or of other servers."""

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.confined.pool import shared_pool
from headrace.data.structured import MAX_SOURCE, ConstraintError, StructuredOutputs
from headrace.decoding.constraint_check import raise_on_error, refuse_overruns
from headrace.decoding.json_schema.prepare import Prepared, read_schema
from headrace.server.engines.messages import Grammar
from headrace.server.engines.models import Service
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.errors import UNFIT
from headrace.server.protocols.chat_messages import check_keys, without_nulls
from headrace.server.protocols.fields import Sampling
from headrace.startup import compiling

SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Keys of response_format by its type, and of json_schema in it.
FORMAT_KEYS = {
    "text": frozenset({"type"}),
    "json_object": frozenset({"type"}),
    "json_schema": frozenset({"type", "json_schema"}),
}
SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def requested_format(
    request: Sampling, response_format: Any = None, open_objects: bool | None = None
) -> StructuredOutputs | None:
    """The format that a request asks of its answers; None if they are free.

    Raises ApiError for an invalid format, or for more than one.
    """
    formats: list[tuple[str, dict[str, Any]]] = []
    if (form := _response_format(response_format)) is not None:
        formats.append(("response_format", form))
    if request.structured_outputs is not None:
        formats.append(("structured_outputs", request.structured_outputs))
    for name in GUIDED:
        value = getattr(request, name)
        if value is not None:
            formats.append((name, {name.removeprefix("guided_"): value}))
    if not formats:
        return None
    name, fields = formats[0]
    if len(formats) > 1:
        raise bad(f"{name} and {formats[1][0]} both set the form of the answer; give one", formats[1][0])
    if open_objects is not None:
        fields = {"open_objects": open_objects, **fields}
    try:
        return StructuredOutputs.of(fields)
    except ConstraintError as error:
        raise bad(f"{name}: {error}", name) from None


def schema_of(form: StructuredOutputs) -> dict[str, Any] | None:
    """The JSON schema of a format; None if the format is not JSON. Raises ApiError."""
    if form.json_object:
        return {"type": "object"}
    try:
        return None if form.json is None else read_schema(form.json)
    except ConstraintError as error:
        raise bad(str(error), "response_format") from None


@dataclass(frozen=True, slots=True)
class CompiledFormat:
    """A format that the engine can enforce. `late`: keywords of its schema that are checked on the complete answer."""

    grammar: Grammar | None = None
    late: tuple[str, ...] = ()


async def compile_format(service: Service, spec: StructuredOutputs, *, streams: bool, param: str) -> CompiledFormat:
    """Compile a format in a confined process. Raises ApiError if the engine cannot enforce it."""
    try:
        answer = await _inspect(service, {"spec": msgspec.to_builtins(spec)}, remembered=True)
    except ConstraintError as error:
        raise bad(str(error), param) from None
    late = tuple(answer["late"])
    if late and streams:
        raise ApiError(
            400,
            f"{', '.join(late)} of the JSON schema can only be checked when an answer is whole; leave stream out",
            param=param,
            code="unsupported",
        )
    return CompiledFormat(Grammar(answer["grammar"], answer["bytes"], answer["seconds"]), late)


async def prepare_schemas(service: Service, schemas: list[dict[str, Any]], *, open_objects: bool) -> list[Prepared]:
    """Schemas of tools, rewritten for masks. Raises ApiError, also if together they are longer than the limit of one schema."""
    try:
        text = msgspec.json.encode(schemas).decode()
    except RecursionError:
        raise bad("tools: the JSON schemas are nested too deeply; flatten them", "tools") from None
    if len(text) > MAX_SOURCE:
        raise bad(
            f"tools: the JSON schemas have {len(text)} characters and {MAX_SOURCE} is the limit; make them smaller", "tools"
        )
    try:
        prepared = json.loads(
            (await _inspect(service, {"schemas": text, "open_objects": open_objects}, remembered=True))["prepared"]
        )
    except ConstraintError as error:
        raise bad(f"tools: {error}", "tools") from None
    return [Prepared(one["schema"], tuple(one["late"])) for one in prepared]


async def _inspect(service: Service, question: dict[str, Any], *, remembered: bool) -> dict[str, Any]:
    """Ask a confined process. `remembered`: equal questions are answered once. Raises ConstraintError or BusyError."""
    task = compiling.task(service.llm.opened.path, remembered=remembered)
    with refuse_overruns():
        return raise_on_error(await shared_pool().ask(task, {**question, "model": task.argument}))


async def check_answer(service: Service, spec: StructuredOutputs, text: str) -> None:
    """Check a complete answer, and count the result in the metrics. Raises ApiError if it does not have the format."""
    try:
        broken = (await _inspect(service, {"spec": msgspec.to_builtins(spec), "text": text}, remembered=False))["broken"]
    except ConstraintError as error:
        service.metrics.look("unchecked")
        raise ApiError(422, str(error), param="response_format", code="answer_unchecked") from None
    service.metrics.look("unfit" if broken else "fit")
    if broken:
        raise ApiError(422, f"{broken}; send the request again, or simplify the schema", param="response_format", code=UNFIT)


async def fits_tool(service: Service, spec: StructuredOutputs, arguments: str) -> bool:
    """Whether the arguments of a call fit their schema. False if the check takes too long."""
    try:
        question = {"spec": msgspec.to_builtins(spec), "text": arguments}
        return not (await _inspect(service, question, remembered=False))["broken"]
    except ConstraintError:
        return False


def _response_format(value: Any) -> dict[str, Any] | None:
    """The field response_format as a constraint; None for text. Raises ApiError."""
    if value is None:
        return None
    value = without_nulls(value) if isinstance(value, dict) else {}
    kind = value.get("type")
    if isinstance(kind, str) and kind in FORMAT_KEYS:
        check_keys("response_format", value, FORMAT_KEYS[kind], "response_format")
    match kind:
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            given = value.get("json_schema")
            schema = given.get("schema") if isinstance(given, dict) else None
            if not isinstance(schema, (dict, bool)):
                raise bad('response_format needs {"json_schema": {"name": …, "schema": {…}}}', "response_format")
            if not isinstance(name := given.get("name"), str) or not SCHEMA_NAME.fullmatch(name):
                raise bad("response_format: json_schema needs a name of 1 to 64 letters, digits, _ and -", "response_format")
            check_keys("json_schema of response_format", without_nulls(given), SCHEMA_KEYS, "response_format")
            return {"json": schema}
    raise bad("response_format must have the type text, json_object or json_schema", "response_format")
