"""Chat templates: the text transformers renders, one clear line for a bad one, and an end to every hostile one."""

import datetime
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.text import rendering
from headrace.text.chat import ChatTemplate, TemplateError, TemplateLimits, validate_messages
from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from tests.unit.vocabularies import byte_level, data_file, model_file, sentence_piece

QUESTION = [{"role": "user", "content": "水往哪里流？ <b>&'\"\n"}]
TALK = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "Hi 🦙."},
    {"role": "user", "content": "Again?  "},
]
CALL = [
    {"role": "user", "content": "Weather in 北京?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "北京", "days": 2}}}],
    },
    {"role": "tool", "name": "weather", "content": '{"sun": true}'},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells <weather>", "parameters": {"type": "object", "properties": {}}},
    }
]

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role not in ['user', 'assistant', 'tool'] %}{{ raise_exception('Unknown role ' ~ m.role) }}{% endif %}
    {%- if loop.first and system is defined %}[{{ system }}]{% endif %}
    {%- generation %}<{{ m.role|upper }}>{{ m.content or '' }}{% endgeneration %}
    {%- for call in m.tool_calls or [] %}{{ call.function|tojson }}{% endfor %}
    {%- if loop.index > 6 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools|tojson(indent=2) }}{% endif %}
{%- for d in documents or [] %}({{ d.title }}: {{ d.text }}){% endfor %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ eos_token }}
{%- macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}{{ thinking|default('on') }}
"""
CASES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    (QUESTION, {}),
    (QUESTION, {"add_generation_prompt": False}),
    (TALK, {}),
    (TALK[:3], {"add_generation_prompt": False}),
    (CALL, {"tools": TOOLS}),
    (QUESTION, {"tools": TOOLS, "documents": [{"title": "磨", "text": "盘"}]}),
    (QUESTION, {"thinking": "off"}),
]


@pytest.fixture(scope="module")
def shared() -> ChatTemplate:
    """One template for the tests that only render."""
    return ChatTemplate("", "<s>", "</s>")


def oracle(source: str, messages: list[dict[str, Any]], bos: str, eos: str, **arguments: Any) -> str:
    settings = {"add_generation_prompt": True, **arguments}
    texts, _ = render_jinja_template([messages], chat_template=source, bos_token=bos, eos_token=eos, **settings)
    return texts[0]


def check(template: ChatTemplate, source: str, bos: str, eos: str) -> None:
    for messages, arguments in CASES:
        template.source = source
        assert template.render(messages, **arguments) == oracle(source, messages, bos, eos, **arguments)


@pytest.mark.parametrize("source", [CHATML, HEADERS], ids=["chatml", "headers"])
def test_equals_transformers(shared: ChatTemplate, source: str) -> None:
    check(shared, source, "<s>", "</s>")


def test_the_cases_distinguish_templates() -> None:
    assert len({oracle(HEADERS, messages, "<s>", "</s>", **arguments) for messages, arguments in CASES}) >= len(CASES) - 2


@pytest.mark.weights
@pytest.mark.parametrize(
    "name",
    [
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    ],
)
def test_the_templates_of_real_models_equal_transformers(name: str) -> None:
    with GGUFFile(model_file(name)) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    assert tokenizer.chat_template is not None
    template = ChatTemplate.of(tokenizer)
    check(template, tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    ids = tokenizer.encode(template.render(QUESTION), add_special=False)
    assert tokenizer.id_of("<|im_end|>") in ids
    assert ids.count(tokenizer.id_of("<|im_start|>") or -1) == 3  # a default system message, the question, the answer


def test_the_template_of_the_qwen2_vocabulary_equals_transformers() -> None:
    with GGUFFile(data_file("tokenizer_vectors/ggml-vocab-qwen2.gguf")) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    assert tokenizer.chat_template is not None
    template = ChatTemplate.of(tokenizer)
    check(template, tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)


def test_of_a_tokenizer() -> None:
    with_template = Tokenizer.from_gguf(sentence_piece(chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"))
    assert ChatTemplate.of(with_template).render(QUESTION[:1]) == f"<s>{QUESTION[0]['content']}</s>"
    assert ChatTemplate.of(with_template, "{{ messages|length }}").render(TALK) == "4"
    with pytest.raises(TemplateError, match="has no chat template: use `generate` or `run --raw`, or pass a template"):
        ChatTemplate.of(Tokenizer.from_gguf(byte_level())).render(QUESTION)


def test_the_date() -> None:
    before = datetime.date.today()
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(QUESTION)
    assert before <= datetime.date.fromisoformat(text) <= datetime.date.today()


# -- hostile templates: (name, source, a part of the message) ----------------------------------------------------------
TIME, MEMORY, REACH, DEEP = "may loop without end", "memory", "which is not allowed", "too deeply"
DOUBLE = "{% set ns = namespace(a=[1], b=[1], s='ab') %}{% for i in range(90) %}"
MUTUAL = "{% macro f(g) %}{{ g(f) }}{% endmacro %}{% macro g(f) %}{{ f(g) }}{% endmacro %}{{ f(g) }}"
HOSTILE = [
    ("nested loops", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
    ("nested loops that write", "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}", TIME),
    ("a long range", "{% for a in range(1000000000) %}x{% endfor %}", "Range too big"),
    ("a loop in a function", "{{ lipsum(n=1000000000) }}", None),
    ("one C call that never ends", "{{ 10 ** (10 ** 10) }}", TIME),
    ("shared lists compared", DOUBLE + "{% set ns.a=[ns.a]*2 %}{% set ns.b=[ns.b]*2 %}{% endfor %}{{ ns.a == ns.b }}", TIME),
    ("shared lists written", DOUBLE + "{% set ns.a=[ns.a,ns.a] %}{% endfor %}{{ ns.a }}", None),
    ("string times number", "{{ 'ab' * 10000000000 }}", MEMORY),
    ("string doubled", DOUBLE + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}", None),
    ("block doubled", DOUBLE + "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}", None),
    ("padding", "{{ 'a'|center(10000000000) }}", MEMORY),
    ("format width", "{{ '%10000000000d' % 1 }}", MEMORY),
    ("format method width", "{{ '{:10000000000}'.format(1) }}", MEMORY),
    ("list times number", "{{ ([1] * 10000000000)|length }}", MEMORY),
    ("endless output", "{% for a in range(99999) %}{{ 'abcdefgh' }}{% endfor %}", "longer than 100000 characters"),
    ("macro that calls itself", "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}", DEEP),
    ("macros that call each other", MUTUAL, DEEP),
    ("recursive loop", "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", DEEP),
    ("brackets", "{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}", DEEP),
    ("nested blocks", "{% if 1 %}" * 5000 + "{% endif %}" * 5000, DEEP),
    ("a long expression", "{{ " + "1+" * 60000 + "1 }}", None),
    ("class", "{{ ''.__class__ }}", REACH),
    ("class, unused", "{% set x = ''.__class__ %}", REACH),
    ("class by subscript", "{{ ''['__class__'] }}", REACH),
    ("class by filter", "{{ ''|attr('__class__') }}", REACH),
    ("class by format", "{{ '{0.__class__}'.format('') }}", REACH),
    ("class by map", "{{ ['']|map(attribute='__class__')|list }}", REACH),
    ("subclasses", "{{ ''.__class__.__mro__[1].__subclasses__() }}", REACH),
    ("globals", "{{ raise_exception.__globals__ }}", REACH),
    ("globals of a class", "{{ cycler.__init__.__globals__.os.popen('id').read() }}", REACH),
    ("code of a macro", "{% macro f() %}{% endmacro %}{{ f._func.__code__ }}", REACH),
    ("self", "{{ self._TemplateReference__context }}", REACH),
    ("changing messages", "{{ messages.clear() }}", REACH),
    ("reading a file", "{% include '/etc/passwd' %}", "no loader"),
    ("importing", "{% import 'os' as os %}", "no loader"),
    ("a syntax error", "hello\n{% for %}", "line 2: "),
    ("an unknown tag", "{% python %}", "unknown tag 'python'"),
    ("an unknown filter", "{{ 1|shell }}", "No filter named 'shell'"),
    ("an unknown variable", "{{ nowhere.to.go }}", "'nowhere' is undefined"),
    ("its own complaint", "{{ raise_exception('only\nuser and\tassistant') }}", "chat template: only user and assistant"),
    ("its own silence", "{{ raise_exception('') }}", "chat template: TemplateError"),
    ("a division", "{{ 1 / 0 }}", "division by zero"),
]  # fmt: skip
LIMITS = TemplateLimits(seconds=0.25, output=100_000, memory=256 << 20)
PATIENT = replace(LIMITS, seconds=60)  # for what meets another limit long before, on however slow a machine


@pytest.fixture(scope="module")
def limited() -> ChatTemplate:
    return ChatTemplate("", limits=LIMITS)


@pytest.fixture(scope="module")
def patient() -> ChatTemplate:
    return ChatTemplate("", limits=PATIENT)


@pytest.mark.parametrize(("source", "message"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_template_ends_in_one_clear_line(
    limited: ChatTemplate, patient: ChatTemplate, source: str, message: str | None
) -> None:
    """`None`: which limit it meets first depends on the machine."""
    template = limited if message in (TIME, None) else patient
    template.source = source
    with pytest.raises(TemplateError) as caught:
        template.render(QUESTION)
    assert (message or "chat template: ") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    template.source = "{{ messages[0].role }}"
    assert template.render(QUESTION) == "user"  # whatever it did, the next one renders


def test_more_is_allowed_where_limits_are_higher() -> None:
    """The control: it is the limit that stops these, nothing else."""
    source = "{% for a in range(99999) %}{{ 'abcdefgh' }}{% endfor %}"
    assert len(ChatTemplate(source, limits=TemplateLimits(seconds=60)).render(QUESTION)) == 8 * 99999
    source = "{{ ('ab' * 150000000)|length }}"
    assert ChatTemplate(source, limits=TemplateLimits(memory=2 << 30, seconds=60)).render(QUESTION) == "300000000"
    with pytest.raises(TemplateError, match=MEMORY):  # another source: what was compiled is kept
        ChatTemplate(f"{source} ", limits=PATIENT).render(QUESTION)


def test_a_template_that_is_too_long_is_refused_unread() -> None:
    template = ChatTemplate("x" * 300_000)
    with pytest.raises(TemplateError, match="it has 300000 characters and 262144 is the most"):
        template.render(QUESTION)


def test_threads_get_their_own_answers() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    answers: dict[int, str] = {}

    def render_message(i: int) -> None:
        answers[i] = template.render([{"role": "user", "content": f"{i}" * 1000}])

    threads = [threading.Thread(target=render_message, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: f"{i}" * 1000 for i in range(8)}


# -- messages ----------------------------------------------------------------------------------------------------------
def test_messages_pass_through() -> None:
    assert validate_messages(CALL) == CALL
    only_call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    assert validate_messages([only_call]) == [only_call]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "水"}, {"type": "text", "text": "轮"}]
    assert validate_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "水\n轮"}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        (["hello"], "message 0 must be"),
        ([*TALK, {"content": "x"}], "message 4 needs a role"),
        ([{"role": "", "content": "x"}], "message 0 needs a role"),
        ([{"role": 3, "content": "x"}], "message 0 needs a role"),
        ([{"role": "user"}], "message 0 needs a content"),
        ([{"role": "user", "content": 5}], "must be text, not int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only parts"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "only parts"),
    ],
)
def test_bad_messages_are_a_one_line_error(messages: Any, message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(CHATML).render(messages)
    assert message in str(caught.value)


def test_values_that_are_not_json_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for value in (object(), float("nan"), circle, {1, 2}):
        with pytest.raises(TemplateError, match="plain JSON values"):
            ChatTemplate(CHATML).render(QUESTION, extra=value)


def test_a_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what one rendering sets is not there in the next."""
    env = rendering.environment()
    sources: list[str] = []

    def counted(source: str) -> Any:
        sources.append(source)
        return type(env).from_string(env, source)

    monkeypatch.setattr(env, "from_string", counted)
    source = "{{ kept is defined }} {{ messages[0].content }}{% set kept = 1 %}{% set ns = namespace(a=1) %}{{ ns.a }}"
    for said in ("a", "b"):
        context = json.dumps({"messages": [{"role": "user", "content": said}]})
        assert rendering.render({"source": source, "context": context, "most": 100}) == {"text": f"False {said}1"}
    assert sources == [source]
    assert rendering.render({"source": "other", "context": context, "most": 100}) == {"text": "other"}
    assert sources == [source, "other"]


@pytest.mark.parametrize("name", ["self", "messages_", "llm", "context", "env", "source", "seconds", "name", "request"])
def test_a_variable_accepts_any_name(name: str) -> None:
    template = ChatTemplate("{{ " + name + " }}" if name != "self" else "{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": "mill"}], **{name: "mill"}) == "mill"
