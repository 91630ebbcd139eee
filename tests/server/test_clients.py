"""What ordinary clients lean on: names, codes, conversations that end with the assistant."""

from tests.server.harness import Running


def test_ids_begin_as_clients_expect(server: Running) -> None:
    answer = server.openai.responses.create(model="tiny", input="Name a river.", max_output_tokens=2)
    assert answer.id.startswith("resp_")
    assert answer.output[0].id.startswith("msg_")
    chat = server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert chat.id.startswith("chatcmpl-")
    assert server.complete(max_tokens=1).id.startswith("cmpl-")
