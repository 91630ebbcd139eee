"""Reasoning in a chat and in a response: its own field or item, streamed and whole; other answers have none."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response

from headrace.server.protocols import generation
from headrace.text.dialects.reasoning import ReasoningFormat
from tests.server.harness import Running
from tests.tiny_files import TEMPLATE, write_tiny_gguf

TALK = [{"role": "user", "content": "How far does the wheel turn?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose prompts end with an opening tag."""
    template = TEMPLATE + "{% if add_generation_prompt and not plain %}<think>\n{% endif %}"
    with Running(write_tiny_gguf(tmp_path_factory.mktemp("thinks") / "tiny.gguf", context=512, template=template)) as running:
        yield running


def ask(server: Running, **more: Any) -> Any:
    body = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 12, "seed": 1, **more}
    return server.post("/v1/chat/completions", body)


def test_an_answer_inside_of_reasoning_has_no_content(server: Running) -> None:
    message = ask(server).json()["choices"][0]["message"]
    assert message["reasoning_content"].strip()
    assert message["content"] == ""
    lines = [line for line in ask(server, stream=True).text.splitlines() if '"delta"' in line]
    assert any("reasoning_content" in line for line in lines)
    assert '"content":"' not in "".join(lines).replace('"content":""', "").replace('"reasoning_content":"', "")


def test_a_format_and_a_prompt_without_the_tag_have_no_reasoning(server: Running) -> None:
    """Control: the same model without the tag in its prompt, and with a grammar, which leaves no room for reasoning."""
    plain = ask(server, chat_template_kwargs={"plain": True}).json()["choices"][0]["message"]
    assert plain["content"]
    assert "reasoning_content" not in plain
    held = ask(server, guided_choice=["left", "right"]).json()["choices"][0]["message"]
    assert held["content"] in ("left", "right")
    assert "reasoning_content" not in held


RESPONSE: dict[str, Any] = {"model": "tiny", "input": TALK[0]["content"], "temperature": 0, "max_output_tokens": 12}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 0}


def respond(server: Running, **more: Any) -> Any:
    return server.post("/v1/responses", {**RESPONSE, **more}).json()


def text_of(server: Running) -> str:
    """The answer, which is reasoning to its end."""
    return str(ask(server).json()["choices"][0]["message"]["reasoning_content"])


@pytest.fixture
def closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Reasoning and answer, if a character in the middle of the model's output closes the reasoning."""
    text = text_of(server)
    mark = next(char for char in text[len(text) // 3 :] if not char.isspace() and text.index(char) > 2)
    monkeypatch.setattr(generation, "reasoning_of", lambda template: ReasoningFormat("<think>", mark))
    before, _, after = text.partition(mark)
    return before.strip(), after.lstrip()


def test_a_response_has_an_item_of_reasoning(server: Running, closed: tuple[str, str]) -> None:
    made = respond(server)
    Response.model_validate(made, strict=False)
    thought, message = made["output"]
    assert (thought["type"], thought["summary"], message["type"]) == ("reasoning", [], "message")
    assert thought["content"] == [{"type": "reasoning_text", "text": closed[0]}]
    assert message["content"][0]["text"] == closed[1]
    assert 0 < made["usage"]["output_tokens_details"]["reasoning_tokens"] < made["usage"]["output_tokens"]


def test_a_streamed_response_equals_the_whole_one(server: Running, closed: tuple[str, str]) -> None:
    whole = respond(server, **LOGPROBS)
    events = list(server.openai.responses.create(**RESPONSE, **LOGPROBS, stream=True))
    made = events[-1].response.to_dict()
    shown = [[(item["type"], item["content"]) for item in one["output"]] for one in (whole, made)]
    assert shown[0] == shown[1]
    assert made["usage"] == whole["usage"]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == closed[0]
    kinds = [event.type for event in events]
    done = kinds.index("response.reasoning_text.done")
    assert kinds[2:4] == ["response.output_item.added", "response.content_part.added"]
    assert kinds[done : done + 4] == [
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    reasoned = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert len(whole["output"][1]["content"][0]["logprobs"]) == whole["usage"]["output_tokens"] - reasoned


def test_reasoning_to_the_end_has_no_message(server: Running) -> None:
    """Control: a prompt without the tag has a message alone."""
    (thought,) = respond(server)["output"]
    assert thought["content"][0]["text"] == text_of(server)
    made = respond(server, chat_template_kwargs={"plain": True})
    assert [item["type"] for item in made["output"]] == ["message"]
    assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stored_reasoning_is_part_of_the_next_turn(server: Running, closed: tuple[str, str]) -> None:
    first = respond(server)
    after = respond(server, previous_response_id=first["id"], input="And then?")
    same = respond(server, input=[*[{"role": "user", "content": RESPONSE["input"]}], *first["output"],
                                  {"role": "user", "content": "And then?"}])  # fmt: skip
    assert after["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    assert [item["content"] for item in after["output"]] == [item["content"] for item in same["output"]]
