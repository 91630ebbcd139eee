"""Invalid requests: each gets a 4xx that names the required change, and the server continues unaffected."""

import gzip
import json
import threading
from typing import Any

import pytest

from tests.server.harness import PATIENCE, Running, in_thread

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "The mill", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
IMAGE = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}],
    }
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]

# field, value, what the message says
BOTH = [
    ("n", 0, "n must be between 1"),
    ("n", 10**9, "n must be 16 or less"),
    ("n", -1, "n must be between 1"),
    ("n", "2", "n: "),
    ("n", 1.5, "n: "),
    ("n", True, "n: "),
    ("max_tokens", -1, "max_tokens must be 1 or more"),
    ("max_tokens", 10**40, "max_tokens: "),
    ("temperature", -0.1, "temperature must be between 0"),
    ("temperature", 1e9, "temperature must be between 0"),
    ("temperature", "hot", "temperature: "),
    ("top_p", 1.1, "top_p must be between 0 and 1"),
    ("top_p", -0.1, "top_p must be between 0 and 1"),
    ("top_k", -2, "top_k must be 0"),
    ("min_p", 2, "min_p must be between 0 and 1"),
    ("typical_p", 0, "typical_p must be above 0"),
    ("repetition_penalty", 0, "repetition_penalty must be between"),
    ("presence_penalty", 3, "presence_penalty must be between -2 and 2"),
    ("frequency_penalty", -3, "frequency_penalty must be between -2 and 2"),
    ("logit_bias", {"a": 1}, "keys of logit_bias are token ids"),
    ("logit_bias", {"-1": 1}, "keys of logit_bias are token ids"),
    ("logit_bias", {"1": 101}, "must be between -100 and 100"),
    ("logit_bias", {"999999": 1}, "names token 999999"),
    ("logit_bias", [1], "logit_bias: "),
    ("stop", [""], "remove the empty one"),
    ("stop", ["a"] * 17, "at most 16 stop strings"),
    ("stop", ["a" * 300], "may have 256 characters"),
    ("stop", [1], "stop."),
    ("seed", 2**64, "seed: "),
    ("min_tokens", 5, "must not exceed max_tokens"),
    ("stop_token_ids", [999999], "names token 999999"),
    ("allowed_token_ids", [], "allowed_token_ids is empty"),
    ("bad_words", [[]], "remove the empty one"),
    ("priority", 2**40, "priority: "),
    ("priority", -1, "priority must be 0 or more"),
    ("cache_salt", "", "cache_salt: "),
    ("stream", "yes", "stream: "),
    ("best_of", 17, "best_of must be 16 or less"),
    ("best_of", 0, "best_of must be between n"),
    ("beam_width", 17, "beam_width must be 16 or less"),
    ("beam_width", 0, "beam_width must be between 1"),
    ("length_penalty", 1.0, "length_penalty goes with beam_width"),
    ("refine_block", 65, "refine_block must be between 1 and 64"),
    ("refine_block", 4, "refine needs a mask token"),
    ("refine_passes", 2, "refine_passes goes with refine_block"),
    ("beam_groups", 2, "groups goes with beam_width"),
    ("dry_multiplier", -1.0, "dry_multiplier must be between 0"),
    ("dry_breakers", ["x"], "dry_breakers.0: "),
    ("xtc_probability", 2.0, "xtc_probability must be between 0"),
    ("top_n_sigma", -1.0, "top_n_sigma must be between 0"),
    ("mirostat_tau", 200.0, "mirostat_tau must be between 0"),
    ("stream_options", {"include_usage": True}, "goes with stream: true"),
    ("stream_options", {"include_obfuscation": True}, "stream_options.include_obfuscation"),
    ("stream_options", {"include_more": True}, "unknown field 'stream_options.include_more'"),
    ("no_such_field", 1, "unknown field 'no_such_field'"),
    ("extra_body", {}, "unknown field 'extra_body'"),
    ("user", 5, "user: "),
]
COMPLETIONS = [
    ("prompt", "", "empty"),
    ("prompt", [], "empty"),
    ("prompt", [""], "empty"),
    ("prompt", [[]], "empty"),
    ("prompt", [-1], "prompt."),
    ("prompt", [999999], "not in the vocabulary"),
    ("prompt", ["a", 1], "prompt."),
    ("prompt", ["a"] * 129, "at most 128 prompts"),
    ("prompt", "a " * 5000, "maximum context length is 256"),
    ("prompt", None, "prompt"),
    ("prompt", NESTED, "prompt."),
    ("logprobs", 21, "logprobs must be 20 or less"),
    ("logprobs", -1, "logprobs must be between 0"),
    ("suffix", "x", "suffix"),
    ("max_tokens", 0, "max_tokens must be 1 or more"),
]
CHATS = [
    ("messages", [], "messages is empty"),
    ("messages", ["hi"], "messages.0"),
    ("messages", [{"content": "hi"}], "message 0 needs a role"),
    ("messages", [{"role": "user"}], "message 0 needs a content"),
    ("messages", [{"role": "wizard", "content": "hi"}], "role 'wizard'; use system, developer, user, assistant, tool"),
    ("messages", [{"role": "user", "content": "hi", "weight": 1}], "message 0 has the unknown key 'weight'"),
    ("messages", [{"role": "user", "content": "hi", "tool_calls": []}], "message 0 has the unknown key 'tool_calls'"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}], "did you mean text?"),
    ("messages", [{"role": "assistant", "tool_calls": [{"id": "a", "cost": 1}]}], "a call of message 0 has the unknown key"),
    ("messages", [{"role": "tool", "content": "4"}], "needs a tool_call_id"),
    ("messages", [{"role": "tool", "content": "4", "tool_call_id": "x"}], "no earlier message has such a call"),
    ("continue_final_message", True, "is not the assistant's"),
    ("messages", [{"role": "user", "content": 5}], "must be text"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "message 0"),
    ("messages", IMAGE, "message 0 has a part of type 'image_url'"),
    ("messages", [{"role": "user", "content": "word " * 300}], "maximum context length is 256"),
    ("tools", [{**TOOL, "type": "x"}], "must be a function"),
    ("functions", [{"name": "f"}], "use tools"),
    ("tool_choice", "required", "there are no tools"),
    ("response_format", {"type": "yaml"}, "text, json_object or json_schema"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format needs"),
    ("modalities", ["audio"], "writes text alone"),
    ("audio", {"voice": "x"}, "writes text alone"),
    ("web_search_options", {}, "does not search"),
    ("top_logprobs", 3, "goes with logprobs: true"),
    ("max_completion_tokens", 9, "differ; give one"),
    ("messages", [{"role": "assistant", "content": "", "function_call": 3}], "needs a function with a name"),
    ("messages", [{"role": "assistant", "content": "", "audio": {"id": "a"}}], "reads text only"),
    ("chat_template_kwargs", {"messages": []}, "may not set messages"),
    ("chat_template_kwargs", {"tools": []}, "may not set tools"),
    ("chat_template_kwargs", {"raise_exception": 1}, "may not set raise_exception"),
    ("chat_template_kwargs", {"range": 1, "namespace": 1}, "may not set namespace, range"),
    ("chat_template_kwargs", {f"v{at}": 1 for at in range(65)}, "at most 64"),
]


def check(server: Running, path: str, body: dict[str, Any], field: str, says: str) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert "\n" not in error["message"]


@pytest.mark.parametrize(("field", "value", "says"), BOTH + COMPLETIONS)
def test_a_bad_completion_is_refused(server: Running, field: str, value: Any, says: str) -> None:
    check(server, "/v1/completions", COMPLETION | {field: value}, field, says)


def test_limits_of_a_chat_name_the_field_of_the_request(server: Running) -> None:
    talk = {"model": "tiny", "messages": CHAT["messages"]}
    check(
        server,
        "/v1/chat/completions",
        talk | {"max_completion_tokens": 0},
        "max_completion_tokens",
        "max_completion_tokens must",
    )
    check(
        server, "/v1/chat/completions", talk | {"logprobs": True, "top_logprobs": 50}, "top_logprobs", "top_logprobs must be 20"
    )


@pytest.mark.parametrize("path", ["/v1/models?x=1", "/v1/files?prupose=batch", "/v1/batches?order=asc"])
def test_an_unknown_parameter_of_a_query_is_refused(server: Running, path: str) -> None:
    answer = server.http.get(path)
    name = path.partition("?")[2].partition("=")[0]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(("field", "value", "says"), BOTH + CHATS)
def test_a_bad_chat_is_refused(server: Running, field: str, value: Any, says: str) -> None:
    check(server, "/v1/chat/completions", CHAT | {field: value}, field, says)


BEAMS = [
    ({"temperature": 0.7}, "temperature does not go with beam search"),
    ({"logprobs": 2}, "logprobs does not go with beam search"),
    ({"seed": 1, "top_p": 0.9}, "top_p does not go with beam search"),
    ({"stream": True}, "beam_width and stream do not go together"),
    ({"beam_groups": 3}, "must divide beam_width"),
    ({"n": 5}, "n must be between 1 and beam_width"),
    ({"early_stopping": "soon"}, "early_stopping must be"),
    ({"use_beam_search": False}, "use_beam_search is false"),
]


@pytest.mark.parametrize(("more", "says"), BEAMS)
def test_beam_search_refuses_fields_that_it_cannot_apply(server: Running, more: dict[str, Any], says: str) -> None:
    body = {"model": "tiny", "prompt": "The mill", "max_tokens": 4, "beam_width": 4}
    check(server, "/v1/completions", body | more, next(reversed(more)), says)


def test_best_of_is_not_streamed(server: Running) -> None:
    body = {"model": "tiny", "prompt": "The mill", "max_tokens": 4, "best_of": 3, "stream": True}
    check(server, "/v1/completions", body, "stream", "best_of and stream do not go together")


def test_a_prompt_that_is_too_long_has_the_code_of_openai(server: Running) -> None:
    long = "water " * 2000
    for path, field in (("completions", "prompt"), ("embeddings", "input"), ("responses", "input")):
        error = server.post(f"/v1/{path}", {"model": "tiny", field: long}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert "This model's maximum context length is 256 tokens" in error["message"]
    error = server.post("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": long}]}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_more_prompts_than_the_queue_holds_are_a_400(server: Running) -> None:
    """The fixture's queue holds three; a 429 would say that they may fit later."""
    check(server, "/v1/completions", COMPLETION | {"prompt": ["a"] * 4}, "prompt", "the queue holds 3 (--max-queued-requests)")


def test_a_bad_stream_is_refused_before_it_begins(server: Running) -> None:
    for body in ({"temperature": -1}, {"prompt": [999999]}, {"prompt": "a " * 5000}):
        assert server.post("/v1/completions", COMPLETION | body | {"stream": True}).status_code == 400


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is missing"),
        (b"{", "not JSON"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'"text"', "body"),
        (b"\xff\xfe\xfd", "is UTF-16"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "not JSON"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature: must be a number nearer to zero"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "not JSON"),
        (b'{"prompt": "a"}', "model is missing"),
        (b'{"model": "tiny"}', "prompt is missing"),
        (b'{"model": "tiny", "prompt": "a", "\\ud800": 1}', "not JSON"),
        (b'{"model": "\\udc00"}', r"the escape \udc00 at byte 11 is a lone surrogate"),
        (b'{"model": NaN}', "NaN at byte 10 is not a number"),
        (b'{"model": -Infinity}', "-Infinity at byte 10 is not a number"),
        (b'{"model": "tiny",}', "trailing comma before byte 17"),
        (b'{"model": "tiny"', "ends at byte 16 inside a value"),
        (b'{"model" "tiny"}', "expected ':' at byte 9"),
        (b'{"model": "\xff"}', "is not UTF-8 at byte 11"),
        (b'\xef\xbb\xbf{"model": "tiny"}', "byte order mark (byte 0)"),
        (gzip.compress(b'{"model": "tiny"}', mtime=0), "compressed with gzip (byte 0)"),
        ('{"model": "tiny"}'.encode("utf-16"), "is UTF-16 (byte 0 is a byte order mark)"),
        ('{"model": "tiny"}'.encode("utf-16-le"), "is UTF-16 (byte 1 is zero)"),
        ('{"model": "tiny"}'.encode("utf-16-be"), "is UTF-16 (byte 0 is zero)"),
        ('{"model": "tiny"}'.encode("utf-32"), "is UTF-32 (byte 0 is a byte order mark)"),
    ],
)
def test_an_invalid_body_is_refused(server: Running, body: bytes, says: str) -> None:
    answer = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "BR", "identity, zstd"])
def test_a_compressed_body_is_refused_by_the_name_of_its_encoding(server: Running, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = server.http.post("/v1/completions", content=b"\x78\x9c", headers=headers)
    assert (answer.status_code, encoding.lower() in answer.json()["error"]["message"]) == (415, True)
    body = json.dumps(COMPLETION | {"max_tokens": 1}).encode()
    assert (
        server.http.post("/v1/completions", content=body, headers=headers | {"Content-Encoding": "identity"}).status_code == 200
    )


def test_an_unknown_model_or_path_or_method(server: Running) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = (COMPLETION if path.endswith("/completions") and "chat" not in path else CHAT) | {"model": "../../etc/passwd"}
        answer = server.post(path, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert server.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert server.http.get("/v1/completions").status_code == 405
    assert server.http.get("/docs").status_code == 404  # a page that loads code from another host


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "either prompt or messages"),
        ("/tokenize", {"messages": []}, "messages is empty"),
        ("/tokenize", {"prompt": 5}, "prompt: "),
        ("/tokenize", {"prompt": "a", "x": 1}, "unknown field 'x'"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [999999]}, "there is no token 999999"),
        ("/detokenize", {"tokens": "a"}, "tokens: "),
    ],
)
def test_bad_tokens_are_refused(server: Running, path: str, body: dict[str, Any], says: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_long_text_is_tokenized_off_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.llm.opened.tokenizer
    encode, began, go_on = tokenizer.encode, threading.Event(), threading.Event()

    def slow(text: str, **options: bool) -> list[int]:
        began.set()
        assert go_on.wait(PATIENCE)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    long = in_thread(lambda: server.post("/tokenize", {"prompt": "a" * 60_000}))
    assert began.wait(PATIENCE)
    assert server.health()["status"] == "ready"  # answered although the text is not done
    go_on.set()
    assert long.result().json()["count"] > 1000


def test_bad_requests_leave_the_server_unchanged(server: Running) -> None:
    before = server.complete().choices[0].text
    for field, value, _ in BOTH:
        server.post("/v1/completions", COMPLETION | {field: value})
    assert server.health() == {"status": "ready", "detail": "", "restarts": 0}
    assert server.complete().choices[0].text == before
