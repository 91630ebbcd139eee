"""Formats of tool calls by family: golden texts of published templates, cut at every character; controls; grammars."""

import json
from functools import partial
from typing import Any

import pytest

from headrace.decoding.constrained import Grammars
from headrace.decoding.tools import CallReader, ToolError, Tooling, conversation, gathered_calls, tooling
from headrace.server.protocols.fields import ChatRequest
from headrace.text.dialects.call_formats import (
    FORMATS,
    GLM4,
    GLM_XML,
    GRANITE,
    HERMES,
    INTERNLM,
    MISTRAL_NAMED,
    OLMO,
    PHI4,
    QWEN_XML,
    SEED,
    CallFormat,
    format_of,
)
from headrace.text.tokenizer import Tokenizer
from tests.unit.vocabularies import byte_level

PARAMETERS = {
    "type": "object",
    "properties": {
        "turns": {"type": "integer", "maximum": 9},
        "way": {"type": "string"},
        "marks": {"type": "array", "items": {"type": "integer"}},
        "slow": {"type": "boolean"},
    },
    "required": ["turns", "way"],
    "additionalProperties": False,
}
TURN: Any = {"type": "function", "function": {"name": "turn_wheel", "description": "Turns it.", "parameters": PARAMETERS}}
STOP: Any = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
TEMPLATES = {
    "granite": "{{ available_tools }} respond only with <|tool_call|> followed by a JSON list of tools used",
    "phi4": "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    "internlm": "{{ tools }}<|action_start|><|plugin|>",
    "mistral_named": "{{ tools }}[TOOL_CALLS]{{ name + '[ARGS]' + arguments }}{{ message.tool_calls }}",
    "glm4": "{{ tools }}<|observation|>{{ m.tool_calls }}",
    "seed": "{{ tools }}<seed:tool_call>\n<function=example>\n<parameter=a>1</parameter>",
    "qwen_xml": "{{ tools }}<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>",
    "glm_xml": "{{ tools }}<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value></tool_call>",
    "olmo": "<functions>{{ tools | tojson }}</functions>{{ '<function_calls>' + message['function_calls'] }}",
    "hermes": "{{ tools }}<tool_call>",
}
ONE = ("turn_wheel", {"turns": 3, "way": 'a "}{[ \\ b'})
JSON = '{"turns": 3, "way": "a \\"}{[ \\\\ b"}'
BODY = f'{{"name": "turn_wheel", "arguments": {JSON}}}'
# Format, a text as its models write it, the plain text of it, and its calls.
GOLDEN: dict[str, tuple[CallFormat, str, str, list[tuple[str, Any]]]] = {
    "granite 3": (GRANITE, f"<|tool_call|>[{BODY}]", "", [ONE]),
    "granite 3.1": (GRANITE, f"<tool_call>[{BODY}]", "", [ONE]),
    "granite 3, the tag a control token": (
        GRANITE,
        f'[{BODY}, {{"name": "stop", "arguments": {{}}}}]',
        "",
        [ONE, ("stop", {})],
    ),
    "phi-4-mini": (PHI4, f"<|tool_call|>[{BODY}]<|/tool_call|>", "", [ONE]),
    "phi-4-mini, another opening": (PHI4, f"functools[{BODY}]", "", [ONE]),
    "internlm 3": (
        INTERNLM,
        f'I turn it.<|action_start|><|plugin|>\n{{"name": "turn_wheel", "parameters": {JSON}}}<|action_end|>\n',
        "I turn it.",
        [ONE],
    ),
    "smollm3, granite 4, exaone 4": (HERMES, f"<tool_call>{BODY}</tool_call>\n<tool_call>{BODY}</tool_call>", "", [ONE, ONE]),
    "ministral 3": (MISTRAL_NAMED, f"[TOOL_CALLS]turn_wheel[ARGS]{JSON}[TOOL_CALLS]stop[ARGS]{{}}", "", [ONE, ("stop", {})]),
    "mistral small 3.2": (MISTRAL_NAMED, f"Well.[TOOL_CALLS]turn_wheel[CALL_ID]a1b2c3d4e[ARGS]{JSON}", "Well.", [ONE]),
    "ministral 3, the tags control tokens": (MISTRAL_NAMED, f"turn_wheel{JSON}stop{{}}", "", [ONE, ("stop", {})]),
    "glm-4": (GLM4, f"turn_wheel\n{JSON}", "", [ONE]),
    "glm-4, text and two calls": (GLM4, f"I turn\nit.\nturn_wheel\n{JSON}\nstop\n{{}}", "I turn\nit.", [ONE, ("stop", {})]),
    "seed-oss": (
        SEED,
        "I turn it.\n<seed:tool_call>\n<function=turn_wheel>\n<parameter=turns>3</parameter>\n"
        '<parameter=way>a "}{[ \\ b</parameter>\n</function>\n</seed:tool_call>',
        "I turn it.",
        [ONE],
    ),
    "seed-oss, values of other types": (
        SEED,
        "<seed:tool_call>\n<function=turn_wheel>\n<parameter=turns>3</parameter>\n<parameter=way>12</parameter>\n"
        "<parameter=marks>[1, 2]</parameter>\n<parameter=slow>True</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=stop>\n</function>\n</seed:tool_call>",
        "",
        [("turn_wheel", {"turns": 3, "way": "12", "marks": [1, 2], "slow": True}), ("stop", {})],
    ),
    "qwen3-coder": (
        QWEN_XML,
        '<tool_call>\n<function=turn_wheel>\n<parameter=turns>\n3\n</parameter>\n<parameter=way>\na "}{[ \\ b\n</parameter>\n'
        "</function>\n</tool_call>",
        "",
        [ONE],
    ),
    "qwen3-coder, several lines": (
        QWEN_XML,
        "<tool_call>\n<function=turn_wheel>\n<parameter=way>\na\n\n  <b>\n</parameter>\n</function>\n</tool_call>",
        "",
        [("turn_wheel", {"way": "a\n\n  <b>"})],
    ),
    "glm-4.5": (
        GLM_XML,
        "I turn it.\n<tool_call>turn_wheel\n<arg_key>turns</arg_key>\n<arg_value>3</arg_value>\n<arg_key>way</arg_key>\n"
        '<arg_value>a "}{[ \\ b</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>',
        "I turn it.",
        [ONE, ("stop", {})],
    ),
    "glm-4.5, on one line": (
        GLM_XML,
        "<tool_call>turn_wheel<arg_key>turns</arg_key><arg_value>3</arg_value><arg_key>way</arg_key><arg_value>12</arg_value>"
        "</tool_call>",
        "",
        [("turn_wheel", {"turns": 3, "way": "12"})],
    ),
    "olmo 3": (
        OLMO,
        f"I turn it.\n<function_calls>turn_wheel(turns=3, way={json.dumps(ONE[1]['way'])})\nstop()</function_calls>",
        "I turn it.",
        [ONE, ("stop", {})],
    ),
    "olmo 3, python literals on several lines": (
        OLMO,
        "<function_calls>\n  turn_wheel(\n    turns=3,\n    way='a \"}{[ \\\\ b',\n  )\n\n"
        "turn_wheel(way='it\\'s (1, 2)', marks=(1, 2,), slow=True, more={'a': [None, 1.5e3], \"b\": 'c'})\n</function_calls>\n",
        "",
        [
            ONE,
            ("turn_wheel", {"way": "it's (1, 2)", "marks": [1, 2], "slow": True, "more": {"a": [None, 1500.0], "b": "c"}}),
        ],
    ),
    "olmo 3, values without a key, and one that is no literal": (
        OLMO,
        "<function_calls>turn_wheel(3, left, [1], slow=false, 9)</function_calls>",
        "",
        [("turn_wheel", {"turns": 3, "way": "left", "marks": [1], "slow": False, "argument5": 9})],
    ),
    "olmo 3, the closing tag missing": (
        OLMO,
        f"<function_calls>turn_wheel(turns=3, way={json.dumps(ONE[1]['way'])})",
        "",
        [ONE],
    ),
}
PLAIN = {
    "granite": "[1] says <|tool",
    "phi4": "functoo [1]",
    "internlm": "<|action_start| is a tag",
    "mistral_named": "[TOOL_CALLS]turn_wheels[ARGS] and\n turn_wheel turns",
    "glm4": "turn_wheel\nis a tool.\n  stop (",
    "seed": "<seed:tool is a tag <function=a>",
    "qwen_xml": "A < b, <tool_cal",
    "glm_xml": "A < b, <arg_key>a</arg_key>",
    "olmo": "A <function_calls>is a tag, turn_wheel(3) is no call <function_ca",
}


def tools_of(form: CallFormat, **fields: Any) -> Tooling:
    request = ChatRequest(model="x", messages=[], tools=[TURN, STOP], **fields)
    given = tooling(request, TEMPLATES[form.name], lambda text: None)
    assert given is not None
    assert given.form == form
    return given


def read(tools: Tooling, parts: list[str]) -> tuple[str, list[tuple[str, Any]], CallReader]:
    """Plain text and calls of a text that comes in parts. A candidate of a bare JSON object fits."""
    reader, pieces = CallReader(tools), []
    for number, part in enumerate(parts):
        steps = reader.push(part, final=number == len(parts) - 1)
        try:
            next(steps)
            while True:
                steps.send(True)
        except StopIteration as end:
            pieces += end.value
    text, calls = gathered_calls(pieces)
    return text, [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls], reader


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_text_is_read_however_it_is_cut(name: str) -> None:
    """At every character in two, and in pieces of one character; the plain text has no whitespace of the calls."""
    form, text, plain, calls = GOLDEN[name]
    tools = tools_of(form)
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for parts in cuts:
        found, made, reader = read(tools, parts)
        assert (found.strip(), made) == (plain, calls), parts
        assert reader.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize("name", [name for name, (form, *_) in GOLDEN.items() if form is not HERMES])
def test_another_format_does_not_read_it(name: str) -> None:
    """Control: a parser of the usual format finds other calls, or other text."""
    _, text, plain, calls = GOLDEN[name]
    found, made, _ = read(tools_of(HERMES), [text])
    assert (found.strip(), made) != (plain, calls)


@pytest.mark.parametrize("name", PLAIN)
def test_text_without_a_call_stays_text(name: str) -> None:
    (form,) = [one for one in FORMATS if one.name == name]
    for parts in ([PLAIN[name]], list(PLAIN[name])):
        assert read(tools_of(form), parts)[:2] == (PLAIN[name], [])


def test_a_tag_at_the_end_of_a_text_stays_text() -> None:
    for text in ("See <function_calls>turn", "See <function_calls>"):
        for parts in ([text], list(text)):
            assert read(tools_of(OLMO), parts)[:2] == (text, [])


@pytest.mark.parametrize("name", ["seed-oss", "qwen3-coder", "glm-4", "ministral 3", "olmo 3"])
def test_an_unfinished_call_is_no_call(name: str) -> None:
    form, text, *_ = GOLDEN[name]
    reader = CallReader(tools_of(form))
    steps = reader.push(text[: text.index("turns") + 8], final=True)
    with pytest.raises(StopIteration):
        next(steps)
    assert reader.finish_reason("stop") == "stop"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_determines_the_format(name: str) -> None:
    form = format_of(TEMPLATES[name])
    assert form is not None
    assert form.name == name


MAY = {
    "granite": f"<|tool_call|>[{BODY}]",
    "phi4": f"<|tool_call|>[{BODY}]<|/tool_call|>",
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "turn_wheel", "parameters": {JSON}}}<|action_end|>',
    "mistral_named": f"[TOOL_CALLS]turn_wheel[ARGS]{JSON}",
    "glm4": f"turn_wheel\n{JSON}",
    "seed": "<seed:tool_call>\n<function=turn_wheel>\n<parameter=turns>3</parameter>\n<parameter=way>left</parameter>\n"
    "</function>\n</seed:tool_call>",
    "qwen_xml": "<tool_call>\n<function=turn_wheel>\n<parameter=turns>\n3\n</parameter>\n<parameter=way>\nleft\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm_xml": "<tool_call>turn_wheel\n<arg_key>turns</arg_key>\n<arg_value>3</arg_value>\n<arg_key>way</arg_key>\n"
    "<arg_value>left</arg_value>\n</tool_call>",
    "olmo": '<function_calls>turn_wheel(turns=3, way="left")</function_calls>',
}


def call_of(form: CallFormat, name: str, **values: str) -> str:
    """A call as XML."""
    tags = form.tags
    parts = [f"{tags.key}{k}{tags.key_end}{tags.wrap}{v}{tags.wrap}{tags.value_end}\n" for k, v in values.items()]
    between = "\n" if tags.head else ""
    return f"{form.opening}{between}{tags.head}{name}{tags.head_end}\n{''.join(parts)}{tags.end}{form.closing}"


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", MAY)
def test_calls_follow_their_schema(name: str, choice: str) -> None:
    """The grammar takes the call of the golden text, and none with 99 turns; text only if calls are not required."""
    (form,) = [one for one in FORMATS if one.name == name]
    tokenizer = Tokenizer.from_gguf(byte_level())
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    given = tools_of(form, tool_choice=choice)

    def takes(text: str) -> bool:
        constraint = grammars.constraint(given.spec)
        for token in tokenizer.encode(text, add_special=False, parse_special=False):
            constraint.push(token)
        return not constraint.error

    assert takes(MAY[name])
    wrong = MAY[name].replace('"turns": 3', '"turns": 99').replace("turns=3", "turns=99")
    wrong = wrong if form.xml is None else call_of(form, "turn_wheel", turns="99", way="a")
    assert not takes(wrong)
    assert takes("The wheel turns.") is (choice == "auto")


XML = (SEED, QWEN_XML, GLM_XML)
BOX = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
VALUES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "box": {"$ref": "#/$defs/Box"},
        "side": {"enum": ["left", "größer als 1"], "type": "string"},
        "code": {"type": "string", "minLength": 2, "maxLength": 4},
        "count": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "day": {"type": "string", "format": "date"},
    },
    "required": ["box", "side"],
    "additionalProperties": False,
    "$defs": {"Box": BOX},
}
SET: Any = {"type": "function", "function": {"name": "set", "parameters": VALUES}}
GOOD = {"box": '{"a": 1}', "side": "größer als 1", "code": "a</b", "count": "null", "either": "12", "day": "today"}


def taken(form: CallFormat, text: str, **fields: Any) -> bool:
    """Whether the grammar of a request that must call `set` takes the text as a complete answer."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    given = tooling(ChatRequest(model="x", messages=[], tools=[SET], **fields), TEMPLATES[form.name], lambda text: None)
    assert given is not None
    constraint = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids).constraint(given.spec)
    for token in tokenizer.encode(text, add_special=False, parse_special=False):
        if constraint.done:
            return False
        constraint.push(token)
    return constraint.whole


@pytest.mark.parametrize("form", XML, ids=lambda form: form.name)
def test_the_values_of_a_call_as_xml_follow_their_schemas(form: CallFormat) -> None:
    """JSON by its schema, texts by enum and lengths; each control breaks one of them. The reader finds the same values."""
    must: dict[str, Any] = {"tool_choice": "required"}
    assert taken(form, call_of(form, "set", **GOOD), **must)
    assert taken(form, call_of(form, "set", box='{"a": 1}', side="left"), **must)
    given = tooling(ChatRequest(model="x", messages=[], tools=[SET]), TEMPLATES[form.name], lambda text: None)
    assert given is not None
    expected = {"box": {"a": 1}, "side": "größer als 1", "code": "a</b", "count": None, "either": "12", "day": "today"}
    assert read(given, list(call_of(form, "set", **GOOD)))[1] == [("set", expected)]
    broken = {"box": '{"a": "x"}', "side": "right", "code": "abcde", "count": "1.5"}
    for key, value in broken.items():
        assert not taken(form, call_of(form, "set", **{**GOOD, key: value}), **must), key
    assert not taken(form, call_of(form, "set", **{**GOOD, "code": "a"}), **must)
    for missing in ("box", "side"):
        assert not taken(form, call_of(form, "set", **{k: v for k, v in GOOD.items() if k != missing}), **must), missing
    assert not taken(form, call_of(form, "set", **GOOD, other="1"), **must)
    assert not taken(form, call_of(form, "unset", **GOOD), **must)
    end = form.tags.value_end
    assert not taken(form, call_of(form, "set", **{**GOOD, "day": f"a{end}b"}), **must)


@pytest.mark.parametrize("form", XML, ids=lambda form: form.name)
def test_several_calls_as_xml_one_call_and_none(form: CallFormat) -> None:
    call = call_of(form, "set", box='{"a": 1}', side="left")
    assert taken(form, f"{call}\n{call}", tool_choice="required")
    assert not taken(form, f"{call}\n{call}", tool_choice="required", parallel_tool_calls=False)
    assert taken(form, f"Well.\n{call}")
    assert not taken(form, f"Well.\n{call.replace('left', 'right')}")
    assert not taken(form, "Well.", tool_choice="required")
    assert taken(form, "Well.")


@pytest.mark.parametrize("form", XML, ids=lambda form: form.name)
def test_a_format_may_stand_in_place_of_calls_as_xml(form: CallFormat) -> None:
    request = ChatRequest(model="x", messages=[], tools=[TURN])
    given = tooling(request, TEMPLATES[form.name], lambda text: None, None, BOX)
    assert given is not None
    tokenizer = Tokenizer.from_gguf(byte_level())
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    for text, fits in ((MAY[form.name], True), ('{"a": 1}', True), ("Well.", False), ('{"a": "b"}', False)):
        constraint = grammars.constraint(given.spec)
        for token in tokenizer.encode(text, add_special=False, parse_special=False):
            constraint.push(token)
        assert bool(constraint.error) is not fits, text


def python_call(**values: str) -> str:
    return f"set({', '.join(f'{key}={value}' for key, value in values.items())})"


def block(*calls: str) -> str:
    return f"<function_calls>{chr(10).join(calls)}</function_calls>"


def test_the_values_of_a_call_as_python_follow_their_schemas() -> None:
    """JSON by its schema, formats of texts too; optional arguments may be left out; each control breaks one of them."""
    must: dict[str, Any] = {"tool_choice": "required"}
    good = {"box": '{"a": 1}', "side": '"größer als 1"', "code": '"a)b"', "count": "null", "day": '"2026-11-28"'}
    assert taken(OLMO, block(python_call(**good)), **must)
    given = tooling(ChatRequest(model="x", messages=[], tools=[SET]), TEMPLATES["olmo"], lambda text: None)
    assert given is not None
    expected = {key: json.loads(value) for key, value in good.items()}
    assert read(given, list(block(python_call(**good))))[1] == [("set", expected)]
    few = {"box": '{"a": 1}', "side": '"left"'}
    assert taken(OLMO, block(python_call(**few)), **must)
    assert taken(OLMO, block(python_call(**few, day='"2026-11-28"')), **must)
    broken = {"box": '{"a": "x"}', "side": '"right"', "code": '"abcde"', "count": "1.5", "day": '"today"'}
    for key, value in broken.items():
        assert not taken(OLMO, block(python_call(**{**good, key: value})), **must), key
    for missing in few:
        assert not taken(OLMO, block(python_call(**{k: v for k, v in good.items() if k != missing})), **must), missing
    assert not taken(OLMO, block(python_call(**good, other="1")), **must)
    assert not taken(OLMO, block(python_call(**few).replace(", ", " ")), **must)
    assert not taken(OLMO, block(python_call(**few).replace("set", "unset")), **must)


def test_several_calls_as_python_one_call_and_none() -> None:
    call = python_call(box='{"a": 1}', side='"left"')
    assert taken(OLMO, block(call, call), tool_choice="required")
    assert not taken(OLMO, block(call, call), tool_choice="required", parallel_tool_calls=False)
    assert taken(OLMO, f"Well.\n{block(call)}")
    assert not taken(OLMO, f"Well.\n{block(call.replace('left', 'right'))}")
    assert not taken(OLMO, "Well.", tool_choice="required")
    assert taken(OLMO, "Well.")


def test_optional_arguments_alone_and_open_objects_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    optional = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    for schema, texts in (
        (
            {**optional, "additionalProperties": False},
            {"set()": True, "set(b=1)": True, "set(a=1, b=2)": True, "set(c=1)": False},
        ),
        (
            {**optional, "additionalProperties": True},
            {"set()": True, "set(c=1)": True, "set(b=1, c=[2])": True, "set(a=x)": False},
        ),
        ({"type": "object"}, {"set()": True, 'set(c="d", e=1)': True, "set(=1)": False, "set(, c=1)": False}),
    ):
        monkeypatch.setitem(SET["function"], "parameters", schema)
        for text, fits in texts.items():
            assert taken(OLMO, block(text), tool_choice="required", open_objects=True) is fits, (schema, text)


def ask_tool(template: str, parameters: dict[str, Any], **more: Any) -> None:
    """Admit a request with one tool."""
    tool = {"type": "function", "function": {"name": "a", "parameters": parameters, **more}}
    tooling(ChatRequest(model="x", messages=[], tools=[tool]), template, lambda text: None)


def test_parameters_that_python_cannot_hold_are_refused() -> None:
    ask = partial(ask_tool, TEMPLATES["olmo"])
    with pytest.raises(ToolError, match="calls as Python, and 'a b' is no name there; rename it"):
        ask({"type": "object", "properties": {"a b": {}}})
    dated = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    ask(dated, strict=True)
    with pytest.raises(ToolError, match="tool 0: parameters without properties cannot be held to; leave strict out"):
        ask({"$defs": {"A": dated}, "$ref": "#/$defs/A"}, strict=True)


def test_parameters_that_xml_cannot_hold_are_refused() -> None:
    ask = partial(ask_tool, TEMPLATES["qwen_xml"])
    with pytest.raises(ToolError, match="'a>b' is no name there; rename it"):
        ask({"type": "object", "properties": {"a>b": {}}})
    dated = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    ask(dated)
    with pytest.raises(ToolError, match="tool 0: format of texts in XML cannot be held to; leave strict out"):
        ask(dated, strict=True)
    ask({"type": "object", "properties": {"day": {"type": "string"}}}, strict=True)


def test_an_open_object_takes_other_parameters() -> None:
    """Also parameters without a list of properties."""
    call = call_of(QWEN_XML, "set", **GOOD, other="1")
    assert taken(QWEN_XML, call, tool_choice="required", open_objects=True) is False  # additionalProperties is false
    SET["function"]["parameters"] = {"type": "object"}
    try:
        assert taken(QWEN_XML, call, tool_choice="required")
        assert not taken(QWEN_XML, call.replace("<parameter=other>", "<parameter=>"), tool_choice="required")
    finally:
        SET["function"]["parameters"] = VALUES


CALLED = {"id": "1", "type": "function", "function": {"name": "turn_wheel", "arguments": '{"turns": 1, "way": "left"}'}}


def test_the_tools_have_the_names_that_a_template_reads() -> None:
    given = tools_of(HERMES)
    assert given.template_variables("{{ tools }}") == {"tools": given.tools}
    assert given.template_variables("{{ xml_tools }}") == {"tools": given.tools, "xml_tools": given.tools}


def test_templates_that_write_no_calls_get_them_as_text() -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    talk.append({"role": "assistant", "content": None, "tool_calls": [CALLED]})
    *_, granite = conversation(talk, tools_of(GRANITE), TEMPLATES["granite"])
    written = '[{"name": "turn_wheel", "arguments": {"turns": 1, "way": "left"}}]'
    assert granite == {"role": "assistant", "content": f"<|tool_call|>{written}"}
    system, _, phi = conversation(talk, tools_of(PHI4), TEMPLATES["phi4"])
    assert phi["content"] == f"<|tool_call|>{written}<|/tool_call|>"
    assert [one["name"] for one in json.loads(system["tools"])] == ["turn_wheel", "stop"]
