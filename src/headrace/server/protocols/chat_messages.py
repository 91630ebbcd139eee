"""Messages of a chat: their valid keys, and one form for what other servers write in several ways."""

from collections.abc import Iterator
from typing import Any

from headrace.data.spelling import did_you_mean
from headrace.server.http.api_error import ApiError, bad

Message = dict[str, Any]
CONTINUE = "continue_final_message"
COMMON_KEYS = frozenset({"role", "content", "name"})
# Keys of assistant messages in the answers of this server, in the types of OpenAI's client (`parsed`: of its parse()), and in
# the answers of reasoning models on other servers.
ASSISTANT_KEYS = COMMON_KEYS | {"refusal", "annotations", "audio", "tool_calls", "function_call", "reasoning_content", "parsed"}
KEYS = {
    "system": COMMON_KEYS,
    "developer": COMMON_KEYS,
    "user": COMMON_KEYS,
    "assistant": ASSISTANT_KEYS,
    "tool": COMMON_KEYS | {"tool_call_id"},
    "function": COMMON_KEYS,  # the earlier name of `tool`
}
# `index`: clients that collect a call from a stream send it back.
CALL = frozenset({"id", "type", "function", "index"})
FUNCTION = frozenset({"name", "arguments", "parsed_arguments"})
PARTS = {
    "text": frozenset({"type", "text", "prompt_cache_breakpoint"}),
    "refusal": frozenset({"type", "refusal"}),
}
# Keys that chat templates read.
TEMPLATE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
AUDIO = frozenset({"id", "data", "expires_at", "transcript"})


def read_messages(messages: list[Message]) -> list[Message]:
    """Messages in the form of chat templates. Raises ApiError that names an unknown role, part or key."""
    result: list[Message] = []
    for number, given in enumerate(messages):
        message = without_nulls(given)
        role = message.get("role")
        if isinstance(role, str):
            if role not in KEYS:
                raise bad(f"message {number} has the role {role[:40]!r}; use {', '.join(list(KEYS)[:-1])}", "messages")
            check_keys(f"message {number}", message, KEYS[role], "messages")
        result.append(_read_message(number, message))
    _pair_functions(result)
    _check_results(result)
    return [{name: message[name] for name in TEMPLATE if name in message} for message in result]


def without_nulls(record: Message) -> Message:
    """A record without its null values, which count as missing."""
    return {name: value for name, value in record.items() if value is not None} if None in record.values() else record


def check_keys(where: str, record: Message, known: frozenset[str], param: str) -> None:
    """Raises ApiError that names the first unknown key."""
    if unknown := record.keys() - known:
        name = min(unknown)
        question = did_you_mean(name[:100], sorted(known), "remove it")
        raise ApiError(400, f"{where} has the unknown key {name[:100]!r}; {question}", param=param, code="unknown_field")


def check_ending(messages: list[Message], continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    """With `continue_final_message` the answer continues the last message, which must be a text of the assistant.

    Raises ApiError.
    """
    if not continue_final_message:
        return
    last = messages[-1] if messages else {}
    if add_generation_prompt:
        raise bad(f"{CONTINUE} begins no new turn; leave add_generation_prompt out, or set it to false", CONTINUE)
    if last.get("role") != "assistant":
        raise bad(f"{CONTINUE}: the last message is not the assistant's; end with one of the assistant", CONTINUE)
    if last.get("tool_calls"):
        raise bad(f"{CONTINUE}: the last message calls tools and has no text to continue; add their results", CONTINUE)


def _read_message(number: int, message: Message) -> Message:
    if isinstance(content := message.get("content"), list):
        message = {**message, "content": [_read_part(number, part) for part in content]}
    if message.get("role") != "assistant":
        return message
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_read_call(number, call) for call in calls]}
    if not calls and "function_call" not in message and message.get("content") in (None, ""):
        return {**message, "content": _text_of(number, message)}
    return message


def _text_of(number: int, message: Message) -> str:
    """The text of an assistant message without content: its refusal, or the transcript of its audio."""
    if isinstance(refusal := message.get("refusal"), str):
        return refusal
    return _transcript(number, message["audio"]) if "audio" in message else ""


def _read_part(number: int, part: Any) -> Any:
    """A content part as text. Raises ApiError for parts of other types."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return part  # the check of the template refuses it
    if kind not in PARTS:
        message = f"message {number} has a part of type {kind[:40]!r}; this model reads text only, send text parts"
        raise bad(message, "messages")
    part = without_nulls(part)
    check_keys(f"a part of message {number}", part, PARTS[kind], "messages")
    return {"type": "text", "text": part.get(kind)}


def _read_call(number: int, call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    call = without_nulls(call)
    if call.get("type", "function") != "function":
        raise bad(f"message {number} has a call of type {str(call['type'])[:40]!r}; this server knows functions", "messages")
    check_keys(f"a call of message {number}", call, CALL, "messages")
    if isinstance(function := call.get("function"), dict):
        function = without_nulls(function)
        check_keys(f"a call of message {number}", function, FUNCTION, "messages")
        call = {**call, "function": {name: function[name] for name in ("name", "arguments") if name in function}}
    return {name: value for name, value in call.items() if name != "index"}


def _transcript(number: int, audio: Any) -> str:
    """The transcript of an audio answer. Raises ApiError if there is only an id."""
    audio = without_nulls(audio) if isinstance(audio, dict) else {}
    check_keys(f"the audio of message {number}", audio, AUDIO, "messages")
    if not isinstance(transcript := audio.get("transcript"), str):
        raise bad(f"message {number} has audio without a transcript; this server reads text only", "messages")
    return transcript


def _pair_functions(messages: list[Message]) -> None:
    """Rewrite the deprecated `function_call` and role `function` as a tool call with an id and its result, in place."""
    name = ""
    for number, message in enumerate(messages):
        if "function_call" in message and message.get("role") == "assistant":
            name = f"call_{number}"
            call = {"id": name, "type": "function", "function": message["function_call"]}
            rest = {key: value for key, value in message.items() if key != "function_call"}
            messages[number] = {**rest, "tool_calls": message.get("tool_calls") or [_read_call(number, call)]}
        elif message.get("role") == "function":
            messages[number] = {**message, "role": "tool", "tool_call_id": name}


def _check_results(messages: list[Message]) -> None:
    """Raises ApiError for a result whose call is in no earlier message."""
    calls: set[str] = set()
    for number, message in enumerate(messages):
        calls.update(_ids(message))
        if message.get("role") != "tool":
            continue
        name = message.get("tool_call_id")
        if not isinstance(name, str):
            raise bad(f"message {number} has the role tool and needs a tool_call_id: the id of the call it answers", "messages")
        if name not in calls:
            why = "no earlier message has such a call in its tool_calls; send the assistant's message that has it"
            raise bad(f"message {number} answers the call {name[:100]!r}: {why}", "messages")


def _ids(message: Message) -> Iterator[str]:
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict) and isinstance(call.get("id"), str):
            yield call["id"]
