"""Behaviour that ordinary clients depend on: ids, error codes, conversations that end with an assistant message."""

from pathlib import Path

from tests.server.harness import Running
from tests.tiny_files import write_tiny_gguf


def test_ids_begin_as_clients_expect(server: Running) -> None:
    answer = server.openai.responses.create(model="tiny", input="Name a river.", max_output_tokens=2)
    assert answer.id.startswith("resp_")
    assert answer.output[0].id.startswith("msg_")
    chat = server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert chat.id.startswith("chatcmpl-")
    assert server.complete(max_tokens=1).id.startswith("cmpl-")


OPEN = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The river is "}]


def test_continue_final_message_decides_how_an_assistant_message_is_fed(server: Running) -> None:
    """What the model is fed is the template's text, cut after the final message; or with a new turn behind it."""

    def fed(**more: object) -> str:
        body = {"model": "tiny", "messages": OPEN, "max_tokens": 4, "temperature": 0, **more}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    template = server.llm.opened.template
    closed = template.render(OPEN, add_generation_prompt=False)
    cut = closed[: closed.rindex("The river is ") + len("The river is ")]
    turn = template.render(OPEN, add_generation_prompt=True)
    assert cut != closed != turn

    def continued(text: str) -> str:
        ids = server.llm.opened.tokenizer.encode(text, add_special=False)
        return str(server.complete(prompt=ids, max_tokens=4).choices[0].text)

    assert fed(continue_final_message=True) == continued(cut)
    assert fed(continue_final_message=True, add_generation_prompt=False) == continued(cut)
    parts = [OPEN[0], {"role": "assistant", "content": [{"type": "text", "text": OPEN[1]["content"]}]}]
    assert fed(continue_final_message=True, messages=parts) == continued(cut)
    assert fed(continue_final_message=False) == fed(add_generation_prompt=True) == continued(turn)
    assert fed(add_generation_prompt=False) == continued(closed)


def test_messages_that_cannot_be_continued_are_refused(server: Running) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    last = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {"model": "tiny", "max_tokens": 2, "continue_final_message": True}
    for more, says in (
        ({"messages": [OPEN[0], {"role": "assistant", "content": []}]}, "no text"),
        ({"messages": OPEN, "add_generation_prompt": True}, "no new turn"),
        ({"messages": [OPEN[0], {**last, "content": []}]}, "no text"),
    ):
        error = server.post("/v1/chat/completions", body | more).json()["error"]
        assert says in error["message"]
        assert error["param"] == "continue_final_message"


def test_a_template_that_drops_the_final_message_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content[:5] }}{% endfor %}"
    with Running(write_tiny_gguf(tmp_path / "tiny.gguf", template=template)) as server:
        body = {"model": "tiny", "messages": OPEN, "max_tokens": 1, "continue_final_message": True}
        answer = server.post("/v1/chat/completions", body)
        assert (answer.status_code, "does not let" in answer.text) == (400, True)
