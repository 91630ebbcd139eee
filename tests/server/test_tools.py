"""Tools: calls that fit their schemas whatever the model, in each family's way of writing, streamed and whole."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from headrace.data.types import Delta
from headrace.decoding.constrained import Grammars
from headrace.decoding.grammar import WHITESPACE
from headrace.decoding.tools import ToolError, conversation, tooling
from headrace.llm import LLM
from headrace.server.protocols.fields import ChatRequest
from headrace.text.chat import ChatTemplate, TemplateError
from headrace.text.dialects.call_formats import HERMES, LLAMA3, MISTRAL, CallFormat, format_of
from headrace.text.dialects.call_parser import CallParser
from headrace.text.tokenizer import Tokenizer
from tests.server.harness import ENGINE, Running
from tests.tiny_files import write_tiny_gguf
from tests.unit.vocabularies import byte_level

TALK: Any = [{"role": "user", "content": "How far does the wheel turn?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"turns": {"type": "integer", "minimum": 0, "maximum": 9}, "way": {"enum": ["left", "right"]}},
    "required": ["turns", "way"],
    "additionalProperties": False,
}
TURN: Any = {"type": "function", "function": {"name": "turn_wheel", "description": "Turns it.", "parameters": PARAMETERS}}
STOP: Any = {"type": "function", "function": {"name": "stop.now"}}


@pytest.fixture(scope="module")
def server(wide: Running) -> Running:
    return wide


def send_chat(server: Running, **more: Any) -> Any:
    settings = {
        "model": "tiny",
        "messages": TALK,
        "temperature": 1.0,
        "seed": 2,
        "max_tokens": 120,
        "tools": [TURN, STOP],
        **more,
    }
    return server.openai.chat.completions.create(**settings)


def check(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.type == "function"
        assert re.fullmatch("[A-Za-z0-9]{9}", call.id)  # what Mistral's templates take
        arguments = json.loads(call.function.arguments)
        if call.function.name == "turn_wheel":
            jsonschema.validate(arguments, PARAMETERS)
        else:
            assert call.function.name == "stop.now"
            assert isinstance(arguments, dict)


@pytest.mark.parametrize("seed", range(4))
def test_a_named_tool_is_called(server: Running, seed: int) -> None:
    choice: Any = {"type": "function", "function": {"name": "turn_wheel"}}
    answer = send_chat(server, tool_choice=choice, seed=seed, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert [call.function.name for call in answer.message.tool_calls] == ["turn_wheel"]
    check(answer.message.tool_calls)


def test_required_and_streamed(server: Running) -> None:
    choice: Any = {"type": "function", "function": {"name": "turn_wheel"}}
    whole = send_chat(server, tool_choice=choice).choices[0].message.tool_calls
    pieces: dict[int, list[Any]] = {}
    reasons = []
    for chunk in send_chat(server, tool_choice=choice, stream=True):
        (one,) = chunk.choices
        assert not one.delta.content
        reasons.append(one.finish_reason)
        for call in one.delta.tool_calls or []:
            pieces.setdefault(call.index, []).append(call)
    assert reasons[-1] in ("tool_calls", "length")
    assert [parts[0].function.name for parts in pieces.values()] == [call.function.name for call in whole]
    texts = ["".join(part.function.arguments for part in parts) for parts in pieces.values()]
    assert texts == [call.function.arguments for call in whole]
    assert all(len(parts) > 3 for parts in pieces.values())


def test_auto_allows_a_text_answer(server: Running) -> None:
    """The tiny model never writes an opening by itself."""
    answer = send_chat(server, tool_choice="auto", max_tokens=12).choices[0]
    free = send_chat(server, tools=None, tool_choice=None, max_tokens=12).choices[0]
    assert answer.message.content
    assert answer.message.tool_calls is None
    assert free.message.content != answer.message.content  # the tools were told of


def test_tool_choice_none_renders_no_tools(server: Running) -> None:
    none = send_chat(server, tool_choice="none", max_tokens=8, temperature=0).choices[0].message.content
    assert none == send_chat(server, tools=None, tool_choice=None, max_tokens=8, temperature=0).choices[0].message.content


def test_results_of_calls_are_rendered(server: Running) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "turn_wheel", "arguments": '{"turns": 1, "way": "left"}'}}
    talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "call-1", "content": "done"})
    assert send_chat(server, messages=talk, max_tokens=4).choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "must be a function"),
        ({"tools": [TURN, TURN]}, "with different names"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "needs a name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/x"}}}]}, "not there"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "nothing"}}}]}, "compiled"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "not among the tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "there are no tools"),
        ({"extra_body": {"guided_regex": "a+"}}, "with tools, the format of an answer must be a JSON schema"),
        ({"functions": [{"name": "a"}]}, "use tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "reads text only"),
        ({"messages": [{"role": "assistant", "tool_calls": [7]}]}, "needs a function"),
    ],
)
def test_refused(server: Running, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        send_chat(server, **fields)


CALLS = [("turn_wheel", {"turns": 3, "way": 'a "}{[ \\ b'}), ("stop.now", {}), ("turn_wheel", {"turns": [1, {"a": 2}]})]


def written(form: CallFormat, calls: list[tuple[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, form.key: arguments}) for name, arguments in calls]
    if form.listed:
        return f"{form.opening}[{form.between.join(bodies)}]"
    opening = form.opening + ("\n" if form.opening else "")
    return form.between.join(f"{opening}{body}{form.closing}" for body in bodies)


def read(form: CallFormat, parts: list[str]) -> tuple[str, list[tuple[str | None, Any]]]:
    text = CallParser(form)
    pieces = [piece for part in parts for piece in text.push(part)] + text.close()
    names = [piece.name for piece in pieces if piece.name is not None]
    arguments = ["".join(p.text for p in pieces if p.call == i) for i in range(len(names))]
    return "".join(p.text for p in pieces if p.call is None), [
        (name, json.loads(each)) for name, each in zip(names, arguments, strict=True)
    ]


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda form: form.name)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_calls_are_parsed_from_pieces_of_any_size(form: CallFormat, count: int, step: int) -> None:
    whole = written(form, CALLS[:count])
    parts = [whole[at : at + step] for at in range(0, len(whole), step)]
    assert read(form, parts) == ("", CALLS[:count])


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "A < b, <tool and <tool_cal; that is all."),
        (LLAMA3, "Not {a call}"),
        (MISTRAL, "[1] says [TOOL"),
        (MISTRAL, '[{"nam'),
    ],
)
def test_text_without_a_call_stays_text(form: CallFormat, text: str, step: int) -> None:
    assert read(form, [text[at : at + step] for at in range(0, len(text), step)]) == (text, [])


def test_text_before_calls() -> None:
    whole = "Let me see.\n" + written(HERMES, CALLS[:2])
    assert read(HERMES, list(whole)) == ("Let me see.", CALLS[:2])


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda form: form.name)
@pytest.mark.parametrize("before", ["", "call"])
def test_long_runs_of_blanks_are_scanned_once(form: CallFormat, before: str) -> None:
    """What is held, and so looked at with every piece that comes, stays short; nothing of the text is lost."""
    text = CallParser(form)
    call = written(form, CALLS[:1]) if before else ""
    pieces = text.push(call)
    for count in range(3000):
        pieces += text.push(" \n")
        assert len(text._held) <= 64, count
    pieces += text.push("so.") + text.close()
    said = "".join(piece.text for piece in pieces if piece.call is None)
    assert (said.strip(), text.calls) == ("so.", 1 if before else 0)
    if not before:
        assert said == " \n" * 3000 + "so."


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL], ids=lambda form: form.name)
def test_a_head_without_an_end_becomes_text(form: CallFormat) -> None:
    text = CallParser(form)
    begin = '[{"name": "' if form.listed else '{"name": "'
    pieces = text.push(form.opening + begin)
    for _ in range(400):
        pieces += text.push("name: ")
        assert len(text._held) <= 1100
    assert "".join(piece.text for piece in pieces + text.close()).removeprefix("[") == '{"name": "' + "name: " * 400


MISTRALS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 or not c.id.isalnum() %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}{% endfor %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that opens calls with a control token, as Mistral's do."""
    file = tmp_path_factory.mktemp("mistral") / "tiny.gguf"
    with Running(write_tiny_gguf(file, context=1024, template=MISTRALS, control=MISTRAL.opening)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_calls_after_a_control_token(mistral: Running, choice: str, stream: bool) -> None:
    """With `auto` the model has the choice, and a bias makes it; what follows is held to the schema all the same."""
    special = mistral.llm.opened.tokenizer.control_id(MISTRAL.opening)
    assert special is not None
    more = {"logit_bias": {str(special): 100}} if choice == "auto" else {}
    answer = send_chat(mistral, tool_choice=choice, tools=[TURN], stream=stream, **more)
    calls: dict[int, list[str]] = {}
    ids: set[str] = set()
    if stream:
        for chunk in answer:
            assert not chunk.choices[0].delta.content
            for call in chunk.choices[0].delta.tool_calls or []:
                calls.setdefault(call.index, []).append(call.function.arguments)
                ids |= {call.id} - {None}
    else:
        message = answer.choices[0].message
        assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
        assert {call.function.name for call in message.tool_calls} == {"turn_wheel"}
        calls = {at: [call.function.arguments] for at, call in enumerate(message.tool_calls)}
        ids = {call.id for call in message.tool_calls}
    assert len(ids) == len(calls) > 0
    for parts in calls.values():
        jsonschema.validate(json.loads("".join(parts)), PARAMETERS)
    for name in ids:  # the template takes the server's own
        talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": [{**CALLED, "id": name}]}]
        assert send_chat(
            mistral, messages=[*talk, {"role": "tool", "tool_call_id": name, "content": "done"}], max_tokens=3
        ).choices
    told = [*TALK, {"role": "assistant", "content": "", "tool_calls": [CALLED]}]
    with pytest.raises(TemplateError, match="length 9"):  # and looks at them
        mistral.llm.opened.template.render(told)
    told.append({"role": "tool", "tool_call_id": CALLED["id"], "content": "done"})
    assert send_chat(mistral, messages=told, max_tokens=3).choices  # those of another server are made such


def test_a_call_and_its_result_keep_one_id_in_mistrals_form() -> None:
    talk: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [CALLED, {**CALLED, "id": "abcdEFG12"}]},
        {"role": "tool", "tool_call_id": CALLED["id"], "content": "done"},
        {"role": "tool", "tool_call_id": "abcdEFG12", "content": "done"},
    ]
    call, *results = conversation(talk, None, MISTRALS)
    ids = [one["id"] for one in call["tool_calls"]]
    assert ids == [result["tool_call_id"] for result in results]
    assert ids[1] == "abcdEFG12"
    assert re.fullmatch("[A-Za-z0-9]{9}", ids[0])
    assert conversation(talk[1:], None, "{{ tools }}<tool_call>") == talk[1:]  # others are told the client's own


CALLED = {"id": "call-1", "type": "function", "function": {"name": "turn_wheel", "arguments": '{"turns": 1, "way": "left"}'}}
UNFIT = '{"name": "turn_wheel", "arguments": {"turns": 99'
LLAMA_UNFIT = UNFIT.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("template", "text", "may"),
    [
        ("{{ tools }}<tool_call>", "Well, <tool_call>\n" + UNFIT[:-1], True),
        ("{{ tools }}<tool_call>", "Well, <tool_call>\n" + UNFIT, False),
        ("{{ tools }}<tool_call>", "<tool_call>\n" + UNFIT, False),
        (MISTRALS, f"[{UNFIT}", False),
        (MISTRALS, f" [ {UNFIT}", False),
        (MISTRALS, f"[TOOL_CALLS][{UNFIT}", False),
        (MISTRALS, f"[TOOL_CALLS][{UNFIT[:-1]}", True),
        (MISTRALS, f"So: [TOOL_CALLS][{UNFIT}", False),
        (MISTRALS, "[1] says [TOOL", True),
        (MISTRALS, "[a](b) {c}", True),
        ("{{ tools }}<|python_tag|>", LLAMA_UNFIT, False),
        ("{{ tools }}<|python_tag|>", LLAMA_UNFIT[:-1], True),
        ("{{ tools }}<|python_tag|>", "\n " + LLAMA_UNFIT, False),
        ("{{ tools }}<|python_tag|>", "<|python_tag|>" + LLAMA_UNFIT, False),
        ("{{ tools }}<|python_tag|>", "So: {", True),
    ],
)
@pytest.mark.parametrize("control", [False, True])
def test_text_that_starts_a_call_follows_the_schema(template: str, text: str, may: bool, control: bool) -> None:
    """Whatever a text begins with, under `auto`: arguments that do not fit (99 turns) cannot come."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    request = ChatRequest(model="x", messages=[], tools=[TURN])
    given = tooling(request, template, lambda text: 401 if control and text else None)
    assert given is not None
    constraint = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).constraint(given.spec)
    for token in tokenizer.encode(text, add_special=False, parse_special=False):
        constraint.push(token)
    assert (not constraint.error) is may, constraint.error


SAID = {
    "type": "object", "properties": {"said": {"type": "string"}}, "required": ["said"], "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "text", "may"),
    [
        ("{{ tools }}<tool_call>", '{"said": "a <tool_call>"}', True),
        ("{{ tools }}<tool_call>", '{"said": 1', False),
        ("{{ tools }}<tool_call>", "Well", False),
        ("{{ tools }}<tool_call>", "<tool_call>\n" + UNFIT[:-1], True),
        ("{{ tools }}<tool_call>", "<tool_call>\n" + UNFIT, False),
        (MISTRALS, '{"said": "[TOOL_CALLS]"}', True),
        (MISTRALS, "[TOOL_CALLS][" + UNFIT[:-1], True),
        (MISTRALS, "[TOOL_CALLS][" + UNFIT, False),
        (MISTRALS, "[{", False),
    ],
)
def test_with_tools_a_text_follows_its_format(template: str, text: str, may: bool) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level())
    request = ChatRequest(model="x", messages=[], tools=[TURN])
    given = tooling(request, template, lambda text: None, None, SAID)
    assert given is not None
    constraint = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).constraint(given.spec)
    for token in tokenizer.encode(text, add_special=False, parse_special=False):
        constraint.push(token)
    assert (not constraint.error) is may, constraint.error
    if may and not text.startswith(given.form.opening):  # and nothing in it reads as a call, however it is cut
        for size in (1, 3, 100):
            reader = CallParser(given.form, held=True)
            pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])]
            assert [piece.call for piece in pieces] == [None] * len(pieces)
            assert "".join(piece.text for piece in [*pieces, *reader.close()]) == text
        free = CallParser(given.form)
        free.push(text)
        assert free._state != "text"  # without a format it would be one


def test_calls_that_read_like_the_format_are_refused(server: Running) -> None:
    request = ChatRequest(model="x", messages=[], tools=[TURN])
    for template, schema in (("{{ tools }}<|python_tag|>", SAID), (MISTRALS, {"type": "array"})):
        with pytest.raises(ToolError, match="cannot be distinguished from an answer of this format"):
            tooling(request, template, lambda text: None, None, schema)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_a_format_go_together(server: Running, stream: bool) -> None:
    """The tiny model calls nothing by itself; under `required` it must."""
    schema = {name: value for name, value in SAID.items() if name != "x-guidance"}
    schema["properties"] = {"said": {"enum": ["yes", "no"]}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    bias = {str(server.llm.opened.tokenizer.encode("<", add_special=False)[0]): -100}
    more: dict[str, Any] = {"response_format": form, "logit_bias": bias, "max_tokens": 100, "temperature": 0}
    answer = send_chat(server, stream=stream, tool_choice="auto", **more)
    if stream:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        said = answer.choices[0].message.content
        assert answer.choices[0].message.tool_calls is None
    jsonschema.validate(json.loads(said), schema)
    assert send_chat(server, tool_choice="required", response_format=form).choices[0].message.tool_calls


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }}<tool_call>", HERMES),
        ("{{ tools }}<|python_tag|>", LLAMA3),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("", None),
    ],
)
def test_the_template_determines_the_call_format(template: str, form: CallFormat | None) -> None:
    assert format_of(template) == form


def test_templates_get_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"b": 1}'}}
    (message,) = conversation([{"role": "assistant", "tool_calls": [call]}], None, "{{ tools }}")
    assert message["tool_calls"][0]["function"]["arguments"] == {"b": 1}
    assert message["content"] == ""


def test_strict_tools_follow_the_whole_schema_or_are_refused() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    assert tooling(ChatRequest(model="x", messages=[], tools=[tool]), None, lambda _: None) is not None
    tool["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(ToolError, match="uniqueItems"):
        tooling(ChatRequest(model="x", messages=[], tools=[tool]), None, lambda _: None)


@pytest.mark.parametrize("choice", ["required", "auto", {"type": "function", "function": {"name": "turn_wheel"}}])
def test_llm_chat_equals_the_server(server: Running, choice: Any) -> None:
    """The same prompt, the same grammar, the same calls."""
    asked = {"tools": [TURN, STOP], "tool_choice": choice, "parallel_tool_calls": False}
    drawn = {"seed": 3, "max_tokens": 90}
    body = {"model": "tiny", "messages": TALK, **asked, **drawn}
    said = server.post("/v1/chat/completions", body).json()
    expected = said["choices"][0]
    with LLM(server.llm.model, **ENGINE) as llm:
        (output,) = llm.chat(TALK, **asked, **drawn)
        (plain,) = llm.chat(TALK, **drawn)
        with pytest.raises(ToolError, match="tool_choice names a function that is not among the tools"):
            llm.chat(TALK, tools=[TURN], tool_choice={"type": "function", "function": {"name": "fly"}})
        with pytest.raises(ToolError, match="cannot be held to a format too"):
            llm.chat(TALK, tools=[TURN], structured_outputs={"regex": "a"})
    (one,) = output.outputs
    assert len(output.prompt_token_ids) == said["usage"]["prompt_tokens"] > len(plain.prompt_token_ids)
    assert one.finish_reason == expected["finish_reason"]
    assert [call["function"] for call in one.tool_calls] == [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in expected["message"].get("tool_calls") or []
    ]
    assert (one.text or None) == (expected["message"]["content"] or None)
    assert bool(one.tool_calls) or choice == "auto"
    assert plain.outputs[0].tool_calls == []


ONLY = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
ONE_WAY: Any = {"type": "function", "function": {"name": "f", "parameters": ONLY}}


def of_stream(chunks: Any) -> tuple[list[str], list[str], str | None]:
    """Names and arguments of the calls of a stream, and its finish_reason."""
    names: list[str] = []
    arguments: list[str] = []
    reason = None
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    names.append(call.function.name)
                    arguments.append("")
                arguments[call.index] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return names, arguments, reason


def test_a_repeated_call_ends_the_answer(server: Running) -> None:
    """There is one call that can be made. A seed under which the model makes it again ends with the first."""
    asked: dict[str, Any] = {"tools": [ONE_WAY], "tool_choice": "required", "max_tokens": 300}
    allowed = {"extra_body": {"allow_repeated_tool_calls": True}}
    seed = next(
        seed for seed in range(40) if len(send_chat(server, **asked, **allowed, seed=seed).choices[0].message.tool_calls) > 1
    )
    longer = send_chat(server, **asked, **allowed, seed=seed)
    for n in (1, 2):
        whole = send_chat(server, **asked, seed=seed, n=n)
        for choice in whole.choices:
            assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"a": 1}]
            assert choice.finish_reason == "tool_calls"
        assert n > 1 or whole.usage.completion_tokens <= longer.usage.completion_tokens
    first = send_chat(server, **asked, seed=seed).choices[0].message.tool_calls[0].function.arguments
    assert of_stream(send_chat(server, **asked, seed=seed, stream=True)) == (["f"], [first], "tool_calls")


@pytest.mark.parametrize("seed", range(4))
def test_a_named_tool_is_called_once(server: Running, seed: int) -> None:
    choice: Any = {"type": "function", "function": {"name": "turn_wheel"}}
    answer = send_chat(server, tool_choice=choice, seed=seed, max_tokens=300).choices[0]
    assert len(answer.message.tool_calls) == 1
    check(answer.message.tool_calls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_call_keeps_its_finish_reason_and_is_accepted_as_history(server: Running, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "turn_wheel"}}
    answer = send_chat(server, tool_choice=choice)
    whole, tokens = answer.choices[0].message.tool_calls[0].function.arguments, answer.usage.completion_tokens
    for more, expected in (({"stop": ['"way']}, "stop"), ({"max_tokens": tokens - 16}, "length")):
        made = send_chat(server, tool_choice=choice, stream=stream, **more)
        if stream:
            names, texts, reason = of_stream(made)
        else:
            calls = made.choices[0].message.tool_calls
            names, texts, reason = [calls[0].function.name], [calls[0].function.arguments], made.choices[0].finish_reason
        assert (names, reason) == (["turn_wheel"], expected)
        assert whole.startswith(texts[0])
        assert whole != texts[0]
        call = {"id": "a", "type": "function", "function": {"name": names[0], "arguments": texts[0]}}
        talk = [*TALK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "no"}]
        assert send_chat(server, messages=talk, max_tokens=1).usage.prompt_tokens > 0


@pytest.mark.parametrize("arguments", ['{"city": "Paris', "", "{", "Paris", "[1, 2", "5"])
def test_templates_render_arguments_that_were_cut(arguments: str) -> None:
    """Templates write arguments as JSON, or go through their items."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    for shown in (
        "{{ c.function.arguments | tojson }}",
        "{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}",
    ):
        source = "{# tools #}{% for m in messages %}{% for c in m.tool_calls or [] %}" + shown + "{% endfor %}{% endfor %}"
        if arguments == "5" and "items" in shown:
            continue  # JSON, but of another kind: as it is
        ChatTemplate(source).render(conversation(talk, None, source))


@pytest.mark.parametrize("stream", [False, True])
def test_json_in_the_text_is_a_call(server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model writes what it is made to write here: a fenced object, with arguments that fit or do not."""
    for arguments, is_call in (('{"turns": 3, "way": "left"}', True), ('{"turns": 30, "way": "left"}', False)):
        text = f'Well.\n```json\n{{"name": "turn_wheel", "arguments": {arguments}}}\n```'

        async def scripted(inflight: Any, text: str = text) -> Any:
            for at in range(0, len(text), 7):
                last = at + 7 >= len(text)
                yield 0, Delta(inflight[0].request_id, 0, [at], text[at : at + 7], finish_reason="stop" if last else None)

        monkeypatch.setattr("headrace.server.protocols.generation.stream_deltas", scripted)
        made = send_chat(server, stream=stream)
        if stream:
            chunks = list(made)
            names, texts, reason = of_stream(chunks)
            content = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        else:
            message, reason = made.choices[0].message, made.choices[0].finish_reason
            names = [call.function.name for call in message.tool_calls or []]
            texts = [call.function.arguments for call in message.tool_calls or []]
            content = message.content
        if is_call:
            assert (names, texts, content, reason) == (["turn_wheel"], [arguments], "Well.\n", "tool_calls")
        else:
            assert (names, texts, content, reason) == ([], [], text, "stop")
