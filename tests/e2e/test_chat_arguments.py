"""`LLM.chat`: no keyword is dropped, and an assistant's last message is continued or answered as on the server."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.data.explicit import CHAT
from headrace.llm import LLM
from headrace.text.chat import ChatTemplate, TemplateError
from tests.cli_shell import Shell
from tests.tiny_files import TEMPLATE, write_tiny_gguf

GREEDY = {"temperature": 0, "max_tokens": 4}
OPEN = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "The river is "}]
THINKS = "{# system #}{% set style = tone or 'plain' %}{% if not enable_thinking %}{{ style }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_gguf(tmp_path_factory.mktemp("model") / "t.gguf", template=THINKS), dtype="float64", threads=1)


def test_a_keyword_is_a_setting_or_a_variable_that_the_template_reads(llm: LLM) -> None:
    """A word of the template's text, a variable that it sets itself, and a function of jinja are none."""
    (plain,) = llm.chat("hello", **GREEDY)
    (other,) = llm.chat("hello", enable_thinking=True, tone="grave", **GREEDY)
    assert plain.prompt_token_ids != other.prompt_token_ids
    for name in ("response_format", "guided_json", "system", "style", "message", "range", "messages_"):
        with pytest.raises(TypeError, match=f"'{name}' is neither a setting nor a variable of the template"):
            llm.chat("hello", **{name: "x"}, **GREEDY)  # type: ignore[arg-type]


def test_the_nearest_name_may_be_any_keyword_of_chat() -> None:
    assert set(CHAT) == set(inspect.signature(LLM.chat).parameters) - {"self", "more"}


def test_chat_template_kwargs_as_on_the_server(llm: LLM) -> None:
    """They reach the template; a variable that this template does not read does no harm."""
    (found,) = llm.chat("hello", chat_template_kwargs={"enable_thinking": True, "unknown": 1}, **GREEDY)
    (same,) = llm.chat("hello", enable_thinking=True, **GREEDY)
    assert found.prompt_token_ids == same.prompt_token_ids


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message", "range"])
def test_chat_template_kwargs_set_no_field_of_the_request(shell: Shell, llm: LLM, tmp_path: Path, name: str) -> None:
    says = f"chat_template_kwargs may not set {name}"
    for ask in (llm.chat, llm.render):
        with pytest.raises(TemplateError, match=says):
            ask(OPEN, chat_template_kwargs={name: True})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {"messages": OPEN, "chat_template_kwargs": {name: True}}
    lines = [asked, {"custom_id": "api", "url": "/v1/chat/completions", "body": asked}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shell("generate", llm.opened.path, "-i", source, "-o", target, "--dtype", "float64", "-m", 1)
    errors = [json.loads(line)["error"] for line in target.read_text().splitlines()]
    assert [says in error for error in errors] == [True, True]


def test_render_drops_no_keyword(llm: LLM) -> None:
    grave = llm.render(OPEN, tone="grave", add_generation_prompt=False)
    assert grave == llm.render(OPEN, chat_template_kwargs={"tone": "grave", "unknown": 1}, add_generation_prompt=False)
    assert grave != llm.render(OPEN, add_generation_prompt=False)
    with pytest.raises(TypeError, match="'add_generation_promt' is not a variable of the template; did you mean add_gen"):
        llm.render(OPEN, add_generation_promt=False)
    for name in ("max_tokens", "system", "style", "tools"):
        with pytest.raises(TypeError, match=f"'{name}' is not a variable of the template"):
            llm.render(OPEN, **{name: 1})


def test_a_template_that_cannot_be_parsed_is_named_and_not_the_keyword() -> None:
    assert ChatTemplate("{% for %}").reads("anything")
    assert ChatTemplate(None).reads("anything")
    assert not ChatTemplate(TEMPLATE).reads("anything")
    assert ChatTemplate(TEMPLATE).reads("add_generation_prompt")


def test_continue_final_message_continues_the_last_assistant_message(llm: LLM) -> None:
    closed = llm.opened.template.render(OPEN, add_generation_prompt=False)
    cut = closed[: closed.rindex("The river is ") + len("The river is ")]

    def prompt(**more: Any) -> str:
        (output,) = llm.chat(OPEN, **more, **GREEDY)
        return llm.tokenizer.decode(output.prompt_token_ids, skip_special=False)

    assert prompt() == prompt(continue_final_message=False) == llm.opened.template.render(OPEN)
    assert prompt(continue_final_message=True) == prompt(continue_final_message=True, add_generation_prompt=False) == cut
    assert prompt(add_generation_prompt=False) == closed


def test_conversations_that_cannot_be_continued_are_refused(llm: LLM) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages, more, says in (
        (OPEN[:1], {}, "the last message is not the assistant's"),
        (OPEN, {"add_generation_prompt": True}, "opens no new turn"),
        ([OPEN[0], {"role": "assistant", "content": None, "tool_calls": [call]}], {}, "calls tools and has no text"),
    ):
        with pytest.raises(TemplateError, match=says):
            llm.chat(messages, continue_final_message=True, **more, **GREEDY)
    silent = ChatTemplate("{{ messages[0].content }}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(llm.opened), "template", silent)
        with pytest.raises(TemplateError, match="the model's template does not allow it"):
            llm.chat(OPEN, continue_final_message=True, **GREEDY)


def test_lines_of_generate_follow_the_same_rule(shell: Shell, llm: LLM, tmp_path: Path) -> None:
    lines = [
        {"messages": OPEN},
        {"messages": OPEN, "continue_final_message": True},
        {"messages": OPEN, "add_generation_prompt": False},
        {"messages": OPEN, "chat_template_kwargs": {"enable_thinking": True}},
        {"custom_id": "api", "url": "/v1/chat/completions", "body": {"messages": OPEN, "continue_final_message": True}},
        {"prompt": "hi", "continue_final_message": True},
        {"messages": OPEN, "continue_final_message": "yes"},
        {"messages": OPEN[:1], "continue_final_message": True},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shell("generate", llm.opened.path, "-i", source, "-o", target, "--dtype", "float64", "-t", 0, "-m", 4)
    found = {record["id"]: record for record in map(json.loads, target.read_text().splitlines())}
    wanted = {
        "line-1": llm.chat(OPEN, **GREEDY),
        "line-2": llm.chat(OPEN, continue_final_message=True, **GREEDY),
        "line-3": llm.chat(OPEN, add_generation_prompt=False, **GREEDY),
        "line-4": llm.chat(OPEN, enable_thinking=True, **GREEDY),
        "api": llm.chat(OPEN, continue_final_message=True, **GREEDY),
    }
    for name, (output,) in wanted.items():
        assert found[name]["error"] is None
        assert found[name]["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
        assert found[name]["outputs"][0]["text"] == output.outputs[0].text
    assert "continue_final_message goes with messages" in found["line-6"]["error"]
    assert "continue_final_message must be true or false, not 'yes'" in found["line-7"]["error"]
    assert "the last message is not the assistant's" in found["line-8"]["error"]
