"""Reasoning in a chat: its own field, streamed and whole; other answers have no such field."""

from collections.abc import Iterator
from typing import Any

import pytest

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
