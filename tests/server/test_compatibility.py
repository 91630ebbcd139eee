"""Behaviour that clients of OpenAI and vLLM rely on."""

import socket
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.llm import LLM
from headrace.server.access.queueing import AdmissionQueue, QueueFullError
from tests.server.harness import Running, in_thread, until

TALK: Any = [{"role": "user", "content": "Name a river."}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 6}
FORM: dict[str, Any] = {"schema": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.mark.parametrize(
    ("path", "change", "param", "says"),
    [
        ("chat/completions", {"reasoning_effort": "wild"}, "reasoning_effort", "must be one of none, minimal"),
        ("responses", {"reasoning": {"effort": "wild"}}, "reasoning", "must be one of none, minimal"),
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": FORM}}, "response_format", "a name"),
        ("responses", {"text": {"format": {"type": "json_schema", **FORM}}}, "text", "a name"),
        ("chat/completions", {"max_tokens": 5_000}, "messages", "maximum context length is 256 tokens"),
        ("completions", {"max_tokens": 5_000}, "prompt", "maximum context length is 256 tokens"),
        ("responses", {"max_output_tokens": 5_000}, "input", "maximum context length is 256 tokens"),
    ],
)
def test_requests_that_openai_refuses_are_refused(
    server: Running, path: str, change: dict[str, Any], param: str, says: str
) -> None:
    bodies: dict[str, Any] = {
        "chat/completions": CHAT,
        "completions": {"model": "tiny", "prompt": "a"},
        "responses": {"model": "tiny", "input": "a"},
    }
    answer = server.post(f"/v1/{path}", bodies[path] | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert (error["code"] == "context_length_exceeded") == ("context" in says)


def test_efforts_are_taken(server: Running) -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        assert server.post("/v1/chat/completions", CHAT | {"reasoning_effort": effort, "max_tokens": 1}).status_code == 200


def test_every_answer_has_a_fingerprint_and_details_of_its_prompt(server: Running) -> None:
    chat = server.openai.chat.completions
    whole = chat.create(**CHAT)
    chunks = list(chat.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    completion = server.complete()
    found = {one.system_fingerprint for one in (whole, completion, *chunks)}
    assert len(found) == 1
    assert str(found.pop()).startswith("fp_")
    for one in (whole, completion, chunks[-1]):
        assert one.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("last", [False, True])
def test_usage_in_every_chunk(server: Running, kind: str, last: bool) -> None:
    options: Any = {"continuous_usage_stats": True, **({"include_usage": True} if last else {})}
    if kind == "chat":
        chunks = list(server.openai.chat.completions.create(**CHAT, stream=True, stream_options=options))
    else:
        chunks = list(server.complete(max_tokens=6, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], len(set(counts)) > 3) == (6, True)
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    assert bool(chunks[-1].choices) != last


def test_128_prompts(tiny: Path) -> None:
    prompts = ["a"] * 128
    with Running(tiny) as server:
        assert len(server.complete(prompt=prompts, max_tokens=1).choices) == 128
        with pytest.raises(openai.BadRequestError, match="--limit-prompts"):
            server.complete(prompt=[*prompts, "a"], max_tokens=1)


def test_an_empty_prompt_is_the_beginning_of_a_document(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.BadRequestError, match="no BOS token"):
        server.complete(prompt="")
    bos = server.llm.opened.tokenizer.eos_id
    monkeypatch.setattr(server.llm.opened.tokenizer, "bos_id", bos)
    assert server.complete(prompt="").choices == server.complete(prompt=[bos]).choices
    assert server.complete(prompt=["", "The mill"]).choices[0].text == server.complete(prompt="").choices[0].text


def test_the_smallest_nucleus_is_the_likeliest_token(server: Running, offline: LLM) -> None:
    greedy = server.complete().choices[0].text
    assert server.complete(temperature=1.5, seed=1, top_p=0).choices[0].text == greedy
    (output,) = offline.generate("The mill", offline.default_params(temperature=1.5, seed=1, top_p=0, max_tokens=8))
    assert output.outputs[0].text == greedy


def test_integers_accept_a_decimal_point(server: Running) -> None:
    whole = server.post("/v1/completions", {"model": "tiny", "prompt": [5, 6], "max_tokens": 3, "temperature": 0}).json()
    pointed = {"model": "tiny", "prompt": [5.0, 6], "max_tokens": 3.0, "temperature": 0, "seed": 1.0, "n": 1.0}
    assert server.post("/v1/completions", pointed).json()["choices"] == whole["choices"]
    for path, body in (
        ("chat/completions", CHAT | {"max_tokens": 3.0, "logprobs": True, "top_logprobs": 2.0}),
        ("responses", {"model": "tiny", "input": "a", "max_output_tokens": 3.0}),
        ("embeddings", {"model": "tiny", "input": [[5.0, 6]], "dimensions": 4.0}),
    ):
        assert server.post(f"/v1/{path}", body).status_code == 200
    wrong = server.post("/v1/completions", pointed | {"max_tokens": 3.5}).json()["error"]
    assert (wrong["param"], "an integer" in wrong["message"]) == ("max_tokens", True)


def test_tokens_of_an_input(server: Running) -> None:
    responses = server.openai.responses
    made = responses.create(model="tiny", input="Name a river.", instructions="Be brief.", max_output_tokens=4)
    count = responses.input_tokens.count
    assert count(model="tiny", input="Name a river.", instructions="Be brief.").input_tokens == made.usage.input_tokens
    after = responses.create(model="tiny", input="More.", previous_response_id=made.id, max_output_tokens=1)
    assert count(model="tiny", input="More.", previous_response_id=made.id).input_tokens == after.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="unknown field 'stream'"):
        count(model="tiny", input="a", extra_body={"stream": True})


def test_a_response_cannot_be_cancelled(server: Running) -> None:
    responses = server.openai.responses
    made = responses.create(model="tiny", input="a", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="background"):
        responses.cancel(made.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        responses.cancel("resp_none")


def test_tokens_of_a_chat_with_tools(wide: Running) -> None:
    tool: Any = {"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}}}
    for more in ({"tools": [tool]}, {"tools": [tool], "tool_choice": "none"}, {"chat_template_kwargs": {"a": 1}}):
        body = {"model": "tiny", "messages": TALK, "max_tokens": 1, **more}
        used = wide.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
        assert wide.post("/tokenize", {"messages": TALK, **more}).json()["count"] == used
    open_talk = [*TALK, {"role": "assistant", "content": "It"}]
    body = {"model": "tiny", "messages": open_talk, "max_tokens": 1, "continue_final_message": True}
    used = wide.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    found = wide.post("/tokenize", {"messages": open_talk, "continue_final_message": True}).json()
    assert found["count"] == used
    wrong = wide.post("/tokenize", {"prompt": "a", "tools": [tool]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tools")


def test_tokenizer_info_serves_a_remote_tokenizer(server: Running) -> None:
    info = server.http.get("/tokenizer_info").json()
    opened = server.llm.opened
    assert info["chat_template"] == opened.template.source
    assert info["bos_token"] is None  # this model has none
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert server.post("/tokenize", body).json()["tokens"] == [opened.tokenizer.eos_id]


def test_a_full_queue_names_the_option_that_raises_it(server: Running) -> None:
    """A load generator with more requests at once than the queue holds reads what to change."""
    ask: dict[str, Any] = {"model": "tiny", "prompt": ["a"] * 3, "max_tokens": 1}
    with server.paused():
        waiting = in_thread(lambda: server.post("/v1/completions", ask))
        until(lambda: server.llm.queue.requests == 3)
        full = server.post("/v1/completions", ask)
    error = full.json()["error"]
    assert (full.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert "3 requests are waiting and 3 may (--max-queued-requests)" in error["message"]
    assert int(full.headers["Retry-After"]) >= 1
    assert waiting.result().status_code == 200
    assert server.post("/v1/completions", ask).status_code == 200
    queue = AdmissionQueue(max_requests=8, max_tokens=5)
    queue.enter([5])
    with pytest.raises(QueueFullError, match=r"5 prompt tokens are waiting and 5 may \(--max-queued-tokens\)"):
        queue.enter([1])


def test_methods_that_a_path_has(server: Running) -> None:
    for path, allowed in (("/v1/completions", "POST"), ("/v1/files/x", "DELETE, GET, HEAD"), ("/v1/files", "GET, HEAD, POST")):
        answer = server.http.request("DELETE" if path != "/v1/files/x" else "POST", path, json={})
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_a_trailing_slash_is_a_relative_redirect(server: Running) -> None:
    for path, location in (("/v1/models/", "/v1/models"), ("/v1/batches/?limit=1", "/v1/batches?limit=1")):
        answer = server.http.get(path, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, location)
    assert server.http.post("/v1/completions/", json={"model": "tiny", "prompt": "a"}, follow_redirects=True).is_success
    assert server.http.get("/nothing/", follow_redirects=False).status_code == 404
    assert head_of(server, "//evil.example/").split()[1] == "404"


def head_of(server: Running, target: str, host: str = "localhost") -> str:
    """The first line of the answer to a target that HTTP clients would change."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return client.makefile("rb").readline().decode()


def test_targets_in_absolute_form_and_hosts_in_capitals(server: Running) -> None:
    for target, host in (("http://127.0.0.1/version", "127.0.0.1"), ("/version", "LOCALHOST")):
        assert head_of(server, target, host).split()[1] == "200"


def test_the_host_of_an_absolute_target_is_the_host(server: Running) -> None:
    """RFC 9112, 3.2.2: the Host header is ignored."""
    for target, host, status in (
        ("HTTP://LOCALHOST:8000/version", "elsewhere.example", "200"),
        ("http://[::1]/version", "elsewhere.example", "200"),
        ("http://elsewhere.example/version", "localhost", "403"),
        ("http://localhost:80@elsewhere.example/version", "localhost", "403"),
        ("http://", "localhost", "403"),
    ):
        assert head_of(server, target, host).split()[1] == status, target
