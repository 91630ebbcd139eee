"""Tools of a conversation: the messages for the template, the grammar of an answer with calls, and a reader of the calls."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.data.params import SamplingParams
from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding import python_grammar, xml_grammar
from headrace.decoding.grammar import WHITESPACE
from headrace.decoding.json_schema.prepare import Prepared, prepare
from headrace.decoding.python_grammar import python_rules
from headrace.decoding.xml_grammar import xml_rules
from headrace.text.dialects.call_formats import GLM4, HERMES, MISTRAL, MISTRAL_NAMED, PHI4, CallFormat, format_of
from headrace.text.dialects.call_parser import CallParser, Piece, RepeatFilter, new_call_id
from headrace.text.dialects.json_calls import JsonCallFilter, Steps
from headrace.text.dialects.named_calls import NamedCallParser
from headrace.text.dialects.python_calls import PythonCallParser
from headrace.text.dialects.truncated_json import ArgumentsReader
from headrace.text.dialects.xml_calls import XmlCallParser

MAX_TOOLS = 128
MAX_CALLS = 10_000  # of a conversation
MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# A text may not begin like this: its reader would take it for a call without a schema.
NO_CALL = {
    **dict.fromkeys(("mistral", "granite", "phi4"), r" & ~/[ \t\r\n]*(functools)?\[[ \t\r\n]*\{(.|\n)*/"),
    "llama3_json": r" & ~/[ \t\r\n]*(<\|python_tag\|>[ \t\r\n]*)?(\{(.|\n)*)?/",
}
PHI4_SYSTEM = "You are a helpful assistant with some tools."  # of its model card
INSTRUCTIONS = (
    "You may call functions to answer. They are, one a line:\n<tools>\n{tools}\n</tools>\nTo call one, answer with its name "
    'and its arguments as JSON between these tags:\n<tool_call>\n{{"name": "…", "arguments": {{…}}}}\n</tool_call>'
)


class ToolError(ValueError):
    """Invalid tools, or an invalid message about them; the message contains what to change. param: the invalid field. code: the
    kind of error."""

    def __init__(self, message: str, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(slots=True)
class ToolChoice:
    """The fields of a request that declare tools and how they may be called."""

    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    allow_repeated_tool_calls: bool | None = None
    open_objects: bool | None = None


@dataclass(frozen=True, slots=True)
class Tooling:
    """The tools of one request. in_template: the chat template writes them; otherwise a system message does."""

    tools: list[dict[str, Any]]  # those that may be called
    form: CallFormat
    in_template: bool
    spec: StructuredOutputs
    ends_at_repeat: bool = False  # a call that equals an earlier one ends the answer
    reads_json: bool = False  # a JSON object in the text may be a call
    several: bool = True

    def held(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters that constrain the answer to the tools' schemas. Raises ToolError."""
        if params.structured_outputs is not None:
            raise ToolError("an answer that may call tools cannot be held to a format too; leave one out", "tools")
        return params.replace(structured_outputs=self.spec)

    def template_variables(self, template: str | None) -> dict[str, Any]:
        """Variables with the tools for the chat template; empty if a message has them. SmolLM3's has a name of its own."""
        if not self.in_template:
            return {}
        return {"tools": self.tools} | ({"xml_tools": self.tools} if "xml_tools" in (template or "") else {})

    def schema_of(self, name: str) -> StructuredOutputs:
        """The schema of one tool's arguments, for a check of finished arguments."""
        (tool,) = [tool for tool in self.tools if tool["function"]["name"] == name]
        return StructuredOutputs(json=json.dumps(schemas_of([tool])[0]))


class CallReader:
    """Splits the text of one answer into plain text and calls, as it comes."""

    def __init__(self, tools: Tooling, *, held: bool = False) -> None:
        """held: an answer without calls has a format, and nothing in it is a call."""
        self._text = parser_of(tools, held)
        self._repeats = RepeatFilter() if tools.ends_at_repeat else None
        names = frozenset(tool["function"]["name"] for tool in tools.tools)
        self._json = JsonCallFilter(names, several=tools.several) if tools.reads_json else None

    @property
    def ended(self) -> bool:
        """Whether the answer ends here, whatever else the model outputs."""
        return self._repeats is not None and self._repeats.ended

    def push(self, text: str, *, final: bool = False) -> Steps:
        """The pieces of more text, after answers to the candidates that come up. final: no text comes after it."""
        pieces = self._text.push(text) + (self._text.close() if final else [])
        if self._repeats is not None:
            return [*self._repeats.push(pieces), *(self._repeats.close() if final else [])]
        if self._json is None:
            return pieces
        shown: list[Piece] = []
        for piece in pieces:
            if piece.call is None:
                shown += yield from self._json.push(piece.text)
            else:  # a call in the template's form: the text before it is complete
                shown += yield from self._json.push("", final=True)
                shown.append(Piece(piece.text, piece.call + self._json.calls, piece.name))
        return shown + ((yield from self._json.push("", final=True)) if final else [])

    def finish_reason(self, reason: str | None) -> str | None:
        """`tool_calls` if the model stopped and its last call is complete; otherwise the `reason` of the text."""
        if self.ended:
            return "tool_calls"
        calls = self._text.calls + (self._json.calls if self._json is not None else 0)
        return "tool_calls" if reason == "stop" and calls and not self._text.unfinished else reason


def parser_of(tools: Tooling, held: bool = False) -> CallParser:
    """The parser of a format. held: an answer without calls has a format."""
    functions = [tool["function"] for tool in tools.tools]
    if tools.form.named is not None:
        return NamedCallParser(tools.form, [function["name"] for function in functions], held=held)
    schemas = {one["name"]: one.get("parameters") or {} for one in functions}
    if tools.form.xml:
        return XmlCallParser(tools.form, schemas, held=held)
    if tools.form.python:
        return PythonCallParser(
            tools.form, {name: list(one.get("properties") or {}) for name, one in schemas.items()}, held=held
        )
    return CallParser(tools.form, held=held)


def gathered_calls(pieces: Iterable[Piece]) -> tuple[str, list[dict[str, Any]]]:
    """The plain text of a whole answer, and its calls in OpenAI's format."""
    plain, calls = "", list[dict[str, Any]]()
    for piece in pieces:
        if piece.call is None:
            plain += piece.text
            continue
        if piece.name is not None:
            calls.append({"id": new_call_id(), "type": "function", "function": {"name": piece.name, "arguments": ""}})
        calls[piece.call]["function"]["arguments"] += piece.text
    return plain, calls


def callable_tools(request: ToolChoice) -> tuple[list[dict[str, Any]], bool]:
    """The tools that may be called, and whether one must be. Raises ToolError."""
    if not request.tools:
        if request.tool_choice not in (None, "none", "auto"):
            raise ToolError("tool_choice requires a call, but there are no tools; give tools", "tool_choice")
        return [], False
    tools = [_tool(number, tool) for number, tool in enumerate(request.tools)]
    names = [tool["function"]["name"] for tool in tools]
    if len(tools) > MAX_TOOLS or len(set(names)) < len(names):
        raise ToolError(f"at most {MAX_TOOLS} tools, with different names", "tools")
    must, chosen = _choice(request.tool_choice, names)
    return [tool for tool in tools if tool["function"]["name"] in chosen], must


def schemas_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The schemas of the tools' arguments."""
    given = [tool["function"].get("parameters") or {"type": "object", "properties": {}} for tool in tools]
    return [{"type": "object", **schema} for schema in given]


def tooling(
    request: ToolChoice,
    template: str | None,
    special: Callable[[str], int | None],
    prepared: Sequence[Prepared] | None = None,
    answer: dict[str, Any] | None = None,
) -> Tooling | None:
    """The tools of a request; None if there are none, or none may be called.

    special: the id of a text that is a control token, else None. prepared: the tools' schemas, if they are prepared already.
    answer: the schema of an answer without calls, for a mask. Raises ToolError.
    """
    usable, must = callable_tools(request)
    if not usable:
        return None
    form = format_of(template)
    several = request.parallel_tool_calls is not False and not names_function(request.tool_choice)
    try:
        closed = not request.open_objects
        known = [prepare(schema, closed=closed) for schema in schemas_of(usable)] if prepared is None else prepared
    except ConstraintError as error:
        raise ToolError(f"tools: {error}", "tools") from None
    schemas = [_parameters(i, tool["function"], one) for i, (tool, one) in enumerate(zip(usable, known, strict=True))]
    form_or_hermes = form or HERMES
    told_apart = form_or_hermes.opening and (not form_or_hermes.listed or (answer or {}).get("type") == "object")
    if answer is not None and not told_apart:
        message = "this model writes calls as JSON, which cannot be distinguished from an answer of this format; leave one out"
        raise ToolError(message, "response_format")
    if form_or_hermes.xml or form_or_hermes.python:
        _check_names(usable, form_or_hermes)
    grammar = _grammar(_Calls(usable, schemas, form_or_hermes, must, several, special, answer))
    try:
        spec = StructuredOutputs(grammar=grammar)
    except ConstraintError as error:
        raise ToolError(f"tools: {error}", "tools") from None
    ends_at_repeat = must and several and not request.allow_repeated_tool_calls
    reads_json = not must and answer is None
    return Tooling(usable, form_or_hermes, form is not None, spec, ends_at_repeat, reads_json, several)


def conversation(
    messages: list[dict[str, Any]],
    given: Tooling | None,
    template: str | None,
    read: Callable[[bytes], Any] = msgspec.json.decode,
) -> list[dict[str, Any]]:
    """Messages for the template: arguments of calls as objects; for a template without tools, calls and results as text. read:
    parses JSON. Raises ToolError."""
    known = format_of(template) is not None
    calls = sum(len(listed) for one in messages if isinstance(listed := one.get("tool_calls"), list))
    if calls > MAX_CALLS:
        raise ToolError(f"the messages have {calls} tool_calls and {MAX_CALLS} are the most; leave some out", "messages")
    if template is None or "developer" not in template:  # its newer name, for templates that do not know it
        messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
    form = format_of(template)
    write = _with_objects if known else _as_text
    reader = ArgumentsReader(read)
    made = [write(number, message, reader) for number, message in enumerate(messages)]
    if form in (MISTRAL, MISTRAL_NAMED):
        made = list(map(_with_mistral_ids, made))
    if form is not None and form.listed and "tool_calls" not in (template or ""):
        made = [_with_written_calls(message, form) for message in made]
    if form is PHI4 and given is not None:
        return _with_tools(made, given)
    if given is None or given.in_template:
        return made
    how = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in given.tools))
    if made and made[0].get("role") == "system" and isinstance(made[0].get("content"), str):
        return [{**made[0], "content": f"{made[0]['content']}\n\n{how}"}, *made[1:]]
    return [{"role": "system", "content": how}, *made]


def _tool(number: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ToolError(f"tool {number} must be a function: {{'type': 'function', 'function': {{…}}}}", "tools")
    function = {name: value for name, value in function.items() if value is not None}
    if not isinstance(function.get("name"), str) or not NAME.fullmatch(function["name"]):
        raise ToolError(f"tool {number} needs a name of 1 to 64 letters, digits, dots, dashes and underscores", "tools")
    if not isinstance(function.get("description", ""), str) or not isinstance(function.get("parameters") or {}, dict):
        raise ToolError(f"tool {number}: its description is text and its parameters are a JSON schema", "tools")
    return {"type": "function", "function": function}


def names_function(choice: Any) -> bool:
    """Whether a tool_choice names one function, so that there is exactly one call."""
    return isinstance(choice, dict) and choice.get("type") == "function"


def _choice(choice: Any, names: list[str]) -> tuple[bool, list[str]]:
    """Whether there must be a call, and the tools that may be called. Raises ToolError."""
    if choice in (None, "auto", "none", "required"):
        return choice == "required", [] if choice == "none" else names
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        function = choice.get("function")
        wanted, must = [function.get("name") if isinstance(function, dict) else None], True
    elif kind == "allowed_tools" and isinstance(choice.get("allowed_tools"), dict):
        allowed = choice["allowed_tools"]
        listed = allowed.get("tools") if isinstance(allowed.get("tools"), list) else []
        wanted = [
            t["function"].get("name") if isinstance(t, dict) and isinstance(t.get("function"), dict) else None for t in listed
        ]
        must = allowed.get("mode") == "required"
    else:
        raise ToolError("tool_choice is none, auto, required, or names a function", "tool_choice")
    if not wanted or any(name not in names for name in wanted):
        raise ToolError("tool_choice names a function that is not among the tools; add it, or name another", "tool_choice")
    return must, [str(name) for name in wanted]


@dataclass(frozen=True, slots=True)
class _Calls:
    """What a grammar of calls allows. schemas: of the arguments, by tool. must: a call is required. several: more than one may
    follow. special_id: number of a control token. answer: schema of a text that may stand in place of calls."""

    tools: list[dict[str, Any]]
    schemas: list[Any]
    form: CallFormat
    must: bool
    several: bool
    special_id: Callable[[str], int | None]
    answer: dict[str, Any] | None

    def bodies(self, head: Callable[[str], str], end: str = "") -> list[str]:
        """The rules of a call's body, by tool. head: of a name, in front of the arguments; end: behind them."""
        rules = [f"body: {' | '.join(f'body_{i}' for i in range(len(self.tools)))}"]
        for i, tool in enumerate(self.tools):
            rules.append(f"body_{i}: {head(tool['function']['name'])} args_{i}{end}")
            rules.append(f"args_{i}: %json {json.dumps(self.schemas[i])}")
        return rules

    def body(self) -> list[str]:
        """The rules of a call's body, of a format without `named`."""
        names = [tool["function"]["name"] for tool in self.tools]
        if self.form.xml:
            return xml_rules(self.form, names, self.schemas, schemas_of(self.tools))
        if self.form.python:
            return python_rules(names, self.schemas)
        return self.bodies(lambda name: json.dumps(f'{{"name": "{name}", "{self.form.key}": '), ' "}"')


def _check_names(tools: list[dict[str, Any]], form: CallFormat) -> None:
    """Raise ToolError for parameters that calls as XML or as Python cannot have."""
    language, rules, of = ("XML", xml_grammar, " of texts in XML") if form.xml else ("Python", python_grammar, "")
    for number, (tool, schema) in enumerate(zip(tools, schemas_of(tools), strict=True)):
        if (key := rules.invalid_name(schema)) is not None:
            message = f"tool {number}: this model writes calls as {language}, and {key[:40]!r} is no name there; rename it"
            raise ToolError(message, "tools")
        if tool["function"].get("strict") and (unheld := rules.unheld_of(schema)):
            message = f"tool {number}: {', '.join(unheld)[:100]}{of} cannot be held to; leave strict out"
            raise ToolError(message, "tools", "unsupported")


def _grammar(task: _Calls) -> str:
    """A Lark grammar of calls alone (`must`), of calls or a text of the schema `answer`, or of any text and then calls; if the
    opening is a control token, of text or calls."""
    form, must, several, special_id, answer = task.form, task.must, task.several, task.special_id, task.answer
    if form.named is not None:
        return _named_grammar(task)
    special = special_id(form.opening)
    rules = task.body()
    first = "[" if form.listed else "" if form.python or (form.xml and not form.xml.head) else "\n"
    opening, between = json.dumps(form.opening + first), json.dumps(form.between)
    more = f"({between} body)*" if several else ""
    closing = json.dumps(form.closing)
    if form.listed:
        end = f'"]" ({closing})?' if form.closing else '"]"'
        if form.closing and (special_end := special_id(form.closing)) is not None:
            end = f'"]" (<[{special_end}]>)?'
        calls, start = f"{opening} body {more} {end}", f'TEXT | trigger "[" body {more} {end}'
        if special is not None:
            calls = f'<[{special}]> "[" body {more} {end}'
            start += f" | {calls}"
    elif not form.opening:
        calls, start = f"body {more}", f"PLAIN | body {more}"
    elif form.python:
        calls = f"{opening} body {more} {closing}"
        start = f"TEXT | trigger body {more} {closing}"
    else:
        again = f"({between} {opening} body {closing})*" if several else ""
        calls = f"{opening} body {closing} {again}"
        start = f"TEXT | trigger {json.dumps(first) if first else ''} body {closing} {again}"
    if answer is not None and not must:
        return "\n".join([*rules, f"start: {calls} | answer", f"answer: %json {json.dumps(answer)}"])
    rules.append(f"start: {calls if must else start}")
    if not must:
        rules.append(f"{'TEXT' if form.opening else 'PLAIN'}: /(.|\\n)*/{NO_CALL.get(form.name, '')}")
        if form.opening:
            rules.append(f"trigger[lazy]: TEXT {json.dumps(form.opening)}")
    return "\n".join(rules)


def _named_grammar(task: _Calls) -> str:
    """The grammar of a format in which a call begins with its name. Tags may be control tokens."""
    form, must, answer = task.form, task.must, task.answer

    def tag(text: str) -> str:
        token = task.special_id(text) if text.strip() else None
        return json.dumps(text) if token is None else f"<[{token}]>"

    def head(name: str) -> str:
        named = form.named or ""
        return f"{json.dumps(name)} {tag(named)}" if named.strip() else json.dumps(name + named)

    rules, names = task.bodies(head), [tool["function"]["name"] for tool in task.tools]
    opening = tag(form.opening) if form.opening else ""
    between = json.dumps(form.between) if form.between else ""
    more = f"({between} {opening} body)*" if task.several else ""
    calls = f"{opening} body {more}"
    if must or answer is not None:
        rules.append(f"start: {calls}" + ("" if must else " | answer"))
        return "\n".join(rules if must else [*rules, f"answer: %json {json.dumps(answer)}"])
    # A text in which a line begins like a call would be read as one without a schema.
    begins = f"({re.escape(form.opening)})?" if form.opening else ""
    any_name = "|".join(re.escape(name) for name in names)
    begin = rf"[ \t\r\n]*{begins}[ \t\r\n]*({any_name})(\[[A-Z_]*\]\w*)*[ \t\r]*"
    end = r"(\n(.|\n)*|\{(.|\n)*)" if form is GLM4 else r"\n?[ \t]*\{(.|\n)*"
    text = rf"/(.|\n)*/ & ~/((.|\n)*\n)?{begin}{end}/"
    if not form.opening:
        return "\n".join([*rules, f"start: TEXT | {calls}", f"TEXT: {text}"])
    trigger = f"trigger[lazy]: TEXT {json.dumps(form.opening)}"
    return "\n".join([*rules, f"start: TEXT | {calls} | trigger body {more}", f"TEXT: {text}", trigger])


def _parameters(number: int, function: dict[str, Any], prepared: Prepared) -> dict[str, Any]:
    """The schema of a tool's arguments for a mask. Raises ToolError."""
    if prepared.late and function.get("strict"):
        message = f"tool {number}: {', '.join(prepared.late)} in its parameters cannot be held to; leave strict out"
        raise ToolError(message, "tools", "unsupported")
    return for_mask(prepared)


def for_mask(prepared: Prepared) -> dict[str, Any]:
    """A schema as part of a grammar."""
    return {**prepared.schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False}}


def _with_objects(number: int, message: dict[str, Any], reader: ArgumentsReader) -> dict[str, Any]:
    """The message with its calls' arguments as objects; templates write them as JSON."""
    if not (calls := _calls(number, message, reader)):
        return message
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _with_mistral_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of nine letters and digits, the only ones Mistral's templates accept, in calls and results alike."""
    made = dict(message)
    if isinstance(name := made.get("tool_call_id"), str):
        made["tool_call_id"] = _mistral_id(name)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "id": _mistral_id(call["id"])} if isinstance(call.get("id"), str) else call for call in calls
        ]
    return made


def _mistral_id(name: str) -> str:
    return name if MISTRAL_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]


def _with_written_calls(message: dict[str, Any], form: CallFormat) -> dict[str, Any]:
    """The message with its calls as text, for a template that has the format and does not write it (Granite 3, Phi-4-mini)."""
    if not (calls := message.get("tool_calls")):
        return message
    records = [{"name": call["function"]["name"], form.key: call["function"]["arguments"]} for call in calls]
    text = f"{form.opening}{json.dumps(records, ensure_ascii=False)}{form.closing}"
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "".join(filter(None, [_plain(message.get("content")), text]))}


def _with_tools(messages: list[dict[str, Any]], given: Tooling) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, from which Phi-4-mini's template reads them."""
    tools = json.dumps([tool["function"] for tool in given.tools], ensure_ascii=False)
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "tools": tools}, *messages[1:]]
    return [{"role": "system", "content": PHI4_SYSTEM, "tools": tools}, *messages]


def _as_text(number: int, message: dict[str, Any], reader: ArgumentsReader) -> dict[str, Any]:
    """For templates without tools: calls and results as tagged text."""
    if message.get("role") == "tool":
        parts = (("text", "<tool_response>"), ("quoted", _plain(message.get("content"))), ("text", "</tool_response>"))
        return {"role": "user", "content": [{"type": kind, "text": text} for kind, text in parts]}
    if not (calls := _calls(number, message, reader)):
        return message
    records = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
    texts = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in records]
    return {"role": message.get("role"), "content": "\n".join(filter(None, [_plain(message.get("content")), *texts]))}


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _calls(number: int, message: dict[str, Any], reader: ArgumentsReader) -> list[dict[str, Any]]:
    """The calls of an assistant's message, with their arguments as objects. Raises ToolError."""
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    made = []
    for call in calls or []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ToolError(f"message {number}: each of its tool_calls needs a function with a name", "messages")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            arguments = reader.read(arguments)
        made.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return made
