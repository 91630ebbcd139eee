"""Items of /v1/responses: input items to messages of a chat, and answers to output items."""

from typing import Any

from headrace.server.http.api_error import ApiError, bad
from headrace.server.protocols.chat_messages import check_keys, without_nulls
from headrace.server.protocols.openai_types import ToolCall, new_id

ROLES = ("user", "assistant", "system", "developer")
Item = dict[str, Any]
# Valid keys by type: of the API, of this server's items, and of the types of OpenAI's client (`parsed`: of its parse(), and
# `async_`, its name of `async`).
CALL = frozenset({"type", "id", "call_id", "name", "status", "caller", "namespace", "created_by"})
KEYS = {
    "message": frozenset({"type", "id", "role", "content", "status", "phase"}),
    "function_call": CALL | {"arguments", "parsed_arguments", "async", "async_"},
    "function_call_output": CALL | {"output"},
    "reasoning": frozenset({"type", "id", "summary", "content", "encrypted_content", "status"}),
}
INPUT_TEXT = frozenset({"type", "text", "prompt_cache_breakpoint"})
PARTS = {
    "input_text": INPUT_TEXT,
    "output_text": frozenset({"type", "text", "annotations", "logprobs", "parsed"}),
    "text": INPUT_TEXT,
    "refusal": frozenset({"type", "refusal"}),
}
REASONING_PARTS = {"reasoning_text": frozenset({"type", "text"})}


def as_items(given: str | list[Item]) -> list[Item]:
    """The input of a request as items without null values. Raises ApiError that names an unknown type, part or key."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [_read_item(number, item) for number, item in enumerate(given)]


def _read_item(number: int, item: Item) -> Item:
    where, item = f"item {number} of input", without_nulls(item)
    kind = item.get("type", "message")
    if kind not in KEYS:
        raise bad(f"{where} has the type {str(kind)[:40]!r}, which this server does not read", "input")
    check_keys(where, item, KEYS[kind], "input")
    known = REASONING_PARTS if kind == "reasoning" else PARTS
    for name in ("content", "output"):
        if isinstance(parts := item.get(name), list):
            item = {**item, name: [_read_part(where, part, known) for part in parts]}
    return item


def _read_part(where: str, part: Any, known: dict[str, frozenset[str]]) -> Any:
    if not isinstance(part, dict):
        raise bad(f"{where} must have content: text, or a list of parts", "input")
    part = without_nulls(part)
    kind = part.get("type")
    if kind not in known:
        raise bad(f"{where} has a part of type {str(kind)[:40]!r}; this model reads text only", "input")
    check_keys(f"a part of {where}", part, known[kind], "input")
    return part


def messages(items: list[Item], instructions: str | None) -> list[Item]:
    """Items as messages of a chat. Raises ApiError.

    The text of a reasoning item is the `reasoning_content` of the assistant's message or call after it; summaries and
    encrypted content have no text of the model and are left out.
    """
    result: list[Item] = [] if instructions is None else [{"role": "system", "content": instructions}]
    calls: set[str] = set()
    reasoning = ""
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += "".join(_parts(number, item.get("content", [])))
            continue
        if kind == "message":
            result.append(_message(number, item))
        elif kind == "function_call":
            _add_call(result, number, item)
            calls.add(item["call_id"])
        elif (name := _text(number, item, "call_id")) not in calls:
            why = "no earlier item is such a function_call; send that item, or previous_response_id"
            raise bad(f"item {number} of input answers the call {name[:100]!r}: {why}", "input")
        else:
            result.append({"role": "tool", "tool_call_id": name, "content": _output(number, item)})
        if reasoning and result[-1]["role"] == "assistant":
            result[-1].setdefault("reasoning_content", reasoning)
        reasoning = ""
    return result


def _message(number: int, item: Item) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise bad(f"item {number} of input must have one of the roles {', '.join(ROLES)}", "input")
    role = "system" if role == "developer" else role
    if isinstance(content, str):
        return {"role": role, "content": content}
    return {"role": role, "content": "".join(_parts(number, content))}


def _parts(number: int, content: Any) -> list[str]:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad(f"item {number} of input must have content: text, or a list of parts", "input")
    return [_text(number, part, "refusal" if part.get("type") == "refusal" else "text") for part in content]


def _output(number: int, item: Item) -> str:
    output = item.get("output")
    return output if isinstance(output, str) else "".join(_parts(number, output))


def _add_call(result: list[Item], number: int, item: Item) -> None:
    """Add a call to the messages. Consecutive calls become one message."""
    function = {"name": _text(number, item, "name"), "arguments": _text(number, item, "arguments")}
    call = {"id": _text(number, item, "call_id"), "type": "function", "function": function}
    if result and result[-1].get("tool_calls"):
        result[-1]["tool_calls"].append(call)
    elif result and result[-1]["role"] == "assistant":
        result[-1]["tool_calls"] = [call]
    else:
        result.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _text(number: int, item: Item, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad(f"item {number} of input must have {name} as text", "input")
    return value


def chat_tools(tools: list[Item] | None) -> list[Item] | None:
    """Tools in the format of a chat. Raises ApiError for tools that are not functions."""
    for tool in tools or []:
        if tool.get("type") != "function":
            message = f"tools of type {str(tool.get('type'))[:40]!r} do not exist here; use functions"
            raise ApiError(400, message, param="tools", code="unsupported")
    names = ("name", "description", "parameters", "strict")
    for tool in tools or []:
        if unknown := {name for name, value in tool.items() if value is not None} - {"type", *names}:
            raise ApiError(
                400, f"unknown field {min(unknown)[:40]!r} of a tool; remove it", param="tools", code="unknown_field"
            )
    result = [{"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}} for tool in tools or []]
    return result or None


def chat_choice(choice: Any) -> Any:
    """A tool_choice in the format of a chat."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {"type": "allowed_tools", "allowed_tools": {**choice, "tools": list(map(chat_choice, choice["tools"]))}}
    return choice


def chat_format(text: Item | None) -> Any:
    """The field `text.format` as the response_format of a chat. Raises ApiError."""
    if unknown := without_nulls(text or {}).keys() - {"format", "verbosity"}:
        raise bad(f"unknown field text.{min(unknown)[:40]}", "text")
    wanted = (text or {}).get("format")
    if wanted is None or not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}


def message_item(text: str, logprobs: Any, status: str = "completed") -> Item:
    """The text of an answer. `logprobs`: a list of entries, or its JSON."""
    part = text_part(text, logprobs)
    return {"id": new_id("msg"), "type": "message", "status": status, "role": "assistant", "content": [part]}


def text_part(text: str, logprobs: Any) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_item(text: str, status: str = "completed") -> Item:
    """The reasoning before an answer. The model's own text is its content; no summary is made."""
    return {"id": new_id("rs"), "type": "reasoning", "status": status, "summary": [], "content": [reasoning_part(text)]}


def reasoning_part(text: str) -> Item:
    return {"type": "reasoning_text", "text": text}


def call_item(call: ToolCall, status: str = "completed") -> Item:
    return {
        "id": new_id("fc"), "type": "function_call", "status": status, "call_id": call.id,
        "name": call.function.name, "arguments": call.function.arguments,
    }  # fmt: skip
