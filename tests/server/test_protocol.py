"""The endpoints through the `openai` client: a streamed answer equals the complete one and the offline one."""

import math
from typing import Any

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM
from tests.server.harness import Running, until
from tests.ulps import rounded_once

TALK: Any = [{"role": "user", "content": "Name a river."}]
DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 24, "n": 2}


def joined(chunks: Any, part: Any) -> dict[int, str]:
    """The texts of a stream by choice."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (part(choice) or "")
    return texts


def test_models(server: Running) -> None:
    (listed,) = server.openai.models.list().data
    assert listed.id == "tiny"
    assert listed == server.openai.models.retrieve("tiny")
    Model.model_validate(server.http.get("/v1/models/tiny").json())
    with pytest.raises(openai.NotFoundError, match="use 'tiny'"):
        server.openai.models.retrieve("gpt-99")


def test_a_completion_equals_generate_streamed_or_not(server: Running, offline: LLM) -> None:
    (expected,) = offline.generate("The mill", offline.default_params(**DRAWN))
    whole = server.complete(**DRAWN)
    assert [choice.text for choice in whole.choices] == [output.text for output in expected.outputs]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.usage.completion_tokens == 48
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    chunks = list(server.complete(**DRAWN, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks, lambda choice: choice.text) == {i: o.text for i, o in enumerate(expected.outputs)}
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 48
    assert len(chunks) > 20
    other = server.complete(**{**DRAWN, "seed": 8})
    assert other.choices[0].text != whole.choices[0].text  # else the seed would do nothing


def test_beams_and_best_of_equal_generate(server: Running, offline: LLM) -> None:
    (expected,) = offline.generate("The mill", BeamSearchParams(beam_width=4, n=3, max_tokens=9, length_penalty=0.5))
    asked = {"beam_width": 4, "n": 3, "length_penalty": 0.5}
    whole = server.complete(max_tokens=9, temperature=openai.NOT_GIVEN, extra_body=asked, n=3)
    assert [choice.text for choice in whole.choices] == [output.text for output in expected.outputs]
    twin = server.complete(max_tokens=9, n=3, extra_body={"use_beam_search": True, "length_penalty": 0.5})
    assert [choice.text for choice in twin.choices] == [choice.text for choice in whole.choices]
    drawn = {"temperature": 0.9, "seed": 7, "max_tokens": 12, "logprobs": 1}
    (best,) = offline.generate("The mill", offline.default_params(**drawn, n=2, best_of=5))
    found = server.complete(**drawn, n=2, best_of=5).choices
    assert [choice.text for choice in found] == [output.text for output in best.outputs]
    assert [c.logprobs.token_logprobs for c in found] == [[e.logprob for e in o.logprobs or []] for o in best.outputs]


def test_prompts_are_texts_or_token_ids_one_or_many(server: Running, offline: LLM) -> None:
    ids = offline.tokenizer.encode("The mill")
    one = server.complete().choices[0].text
    assert server.complete(prompt=ids).choices[0].text == one
    for prompts in (["The mill", "A river", "The mill"], [ids, offline.tokenizer.encode("A river"), ids]):
        choices = server.complete(prompt=prompts).choices
        assert [choice.index for choice in choices] == [0, 1, 2]
        assert choices[0].text == choices[2].text == one != choices[1].text
        streamed = joined(server.complete(prompt=prompts, stream=True), lambda choice: choice.text)
        assert streamed == {choice.index: choice.text for choice in choices}


def test_echo_and_logprobs_score_a_prompt(server: Running, offline: LLM) -> None:
    (score,) = offline.score("The mill stands")
    scored = server.complete(prompt="The mill stands", max_tokens=0, echo=True, logprobs=2)
    (choice,) = scored.choices
    assert choice.text == "The mill stands"
    assert choice.logprobs.token_logprobs[0] is None
    assert rounded_once(choice.logprobs.token_logprobs[1:], score.logprobs)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert scored.usage.completion_tokens == 0
    both = server.complete(prompt="The mill stands", max_tokens=3, echo=True, logprobs=2).choices[0]
    offsets, tokens = both.logprobs.text_offset, both.logprobs.tokens
    assert [both.text[at : at + len(token)] for at, token in zip(offsets, tokens, strict=True)] == tokens
    assert all(len(best) in (2, 3) for best in both.logprobs.top_logprobs[1:])
    streamed = list(server.complete(prompt="The mill stands", max_tokens=3, echo=True, logprobs=2, stream=True))
    assert joined(streamed, lambda choice: choice.text) == {0: both.text}
    assert [at for chunk in streamed for at in chunk.choices[0].logprobs.text_offset] == offsets


def test_a_chat_equals_llm_chat_streamed_or_not(server: Running, offline: LLM) -> None:
    (expected,) = offline.chat(TALK, **DRAWN)
    whole = server.openai.chat.completions.create(model="tiny", messages=TALK, **DRAWN)
    assert [choice.message.content for choice in whole.choices] == [output.text for output in expected.outputs]
    assert whole.choices[0].message.role == "assistant"
    chunks = list(
        server.openai.chat.completions.create(
            model="tiny", messages=TALK, **DRAWN, stream=True, stream_options={"include_usage": True}
        )
    )
    assert joined(chunks, lambda choice: choice.delta.content) == {i: o.text for i, o in enumerate(expected.outputs)}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 48
    assert {choice.finish_reason for chunk in chunks for choice in chunk.choices} == {None, "length"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_answers_have_the_shapes_of_the_protocol(server: Running) -> None:
    body = {"model": "tiny", "messages": TALK, "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    ChatCompletion.model_validate(server.post("/v1/chat/completions", body).json())
    Completion.model_validate(server.post("/v1/completions", {"model": "tiny", "prompt": "a", "logprobs": 1}).json())
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        ChatCompletionChunk.model_validate_json(event)


def test_chat_logprobs(server: Running) -> None:
    ask: Any = {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    (choice,) = server.openai.chat.completions.create(**ask).choices
    entries = choice.logprobs.content
    assert len(entries) == 6
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    for entry in entries:
        values = [best.logprob for best in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] < 0  # greedy: the likeliest was drawn
        assert sum(map(math.exp, values)) <= 1
    streamed = [
        entry
        for chunk in server.openai.chat.completions.create(**ask, stream=True)
        for one in chunk.choices
        for entry in (one.logprobs.content if one.logprobs else [])
    ]
    assert streamed == entries


def test_stop_logit_bias_and_limits_of_length(server: Running, offline: LLM) -> None:
    text = server.complete(max_tokens=12).choices[0].text
    (choice,) = server.complete(max_tokens=12, stop=[text[6:9]]).choices
    assert (choice.text, choice.finish_reason) == (text[: text.index(text[6:9])], "stop")
    first = offline.tokenizer.encode("The mill" + text, add_special=False)[len(offline.tokenizer.encode("The mill"))]
    assert server.complete(logit_bias={str(first): -100}).choices[0].text[:3] != text[:3]
    for name in ("max_tokens", "max_completion_tokens"):
        answer = server.openai.chat.completions.create(model="tiny", messages=TALK, seed=1, **{name: 3})
        assert answer.usage.completion_tokens == 3
    (long,) = server.openai.chat.completions.create(model="tiny", messages=TALK, extra_body={"ignore_eos": True}).choices
    assert long.finish_reason == "length"  # where the context ends


def test_fields_of_other_servers_work(server: Running, offline: LLM) -> None:
    greedy = server.complete().choices[0].text
    hot = {"temperature": 5, "seed": 3}
    wild = server.complete(**hot).choices[0].text
    assert wild != greedy
    for field in ({"top_k": 1}, {"min_p": 1.0}, {"typical_p": 1e-9, "top_k": 1}):
        assert server.complete(**hot, extra_body=field).choices[0].text == greedy
    every = server.complete(**hot, extra_body={"top_k": 0}).choices[0].text
    assert server.complete(**hot, extra_body={"top_k": -1}).choices[0].text == every != wild
    fields = {"repetition_penalty": 1.8, "no_repeat_ngram": 2, "min_tokens": 4}
    (expected,) = offline.generate("The mill mill mill", SamplingParams(temperature=0, max_tokens=20, **fields))
    given = server.complete(prompt="The mill mill mill", max_tokens=20, extra_body=fields)
    assert given.choices[0].text == expected.outputs[0].text
    token = offline.tokenizer.encode(" the", add_special=False)[0]
    only = server.complete(max_tokens=3, extra_body={"allowed_token_ids": [token]}).choices[0].text
    assert only == offline.tokenizer.decode([token] * 3)


def test_fields_without_a_meaning_change_nothing(server: Running) -> None:
    plain = server.openai.chat.completions.create(model="tiny", messages=TALK, temperature=0, max_tokens=8)
    more: Any = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
        "prompt_cache_key": "y", "verbosity": "low", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "tool_choice": "none", "modalities": ["text"],
    }  # fmt: skip
    given = server.openai.chat.completions.create(model="tiny", messages=TALK, temperature=0, max_tokens=8, **more)
    assert given.choices[0].message.content == plain.choices[0].message.content
    null = dict.fromkeys(more) | {"model": "tiny", "messages": TALK, "temperature": 0, "max_tokens": 8}
    answer = server.post("/v1/chat/completions", null).json()
    assert answer["choices"][0]["message"]["content"] == plain.choices[0].message.content


def test_choices_of_several_prompts_with_several_answers_have_indexes_of_their_own(server: Running, offline: LLM) -> None:
    """Choice i of prompt p is number p * n + i, streamed or not."""
    prompts = ["The mill", "A river"]
    expected = [output.text for whole in offline.generate(prompts, offline.default_params(**DRAWN)) for output in whole.outputs]
    assert len(set(expected)) == 4  # else an exchange would not be seen
    whole = server.complete(prompt=prompts, **DRAWN)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == expected
    streamed = joined(server.complete(prompt=prompts, **DRAWN, stream=True), lambda choice: choice.text)
    assert streamed == dict(enumerate(expected))


def test_a_negative_seed_is_a_distinct_seed(server: Running, offline: LLM) -> None:
    drawn = {**DRAWN, "n": 1}
    said = {seed: server.complete(**{**drawn, "seed": seed}).choices[0].text for seed in (-7, 7, 2**64 - 7)}
    assert said[-7] == said[2**64 - 7] != said[7]
    (expected,) = offline.generate("The mill", offline.default_params(**{**drawn, "seed": 2**64 - 7}))
    assert said[-7] == expected.outputs[0].text


@pytest.mark.parametrize("name", ["llm", "self", "messages_", "variables", "request"])
def test_a_variable_of_the_template_accepts_any_name(server: Running, name: str) -> None:
    body = {"model": "tiny", "messages": TALK, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_a_cached_prefix_is_shared_only_under_the_same_salt(server: Running) -> None:
    def cached(salt: str) -> int:
        found: int = server.complete(
            prompt="water " * 20, extra_body={"cache_salt": salt}
        ).usage.prompt_tokens_details.cached_tokens
        return found

    assert cached("mine") == 0
    assert cached("mine") > 0
    assert cached("yours") == 0


def test_without_a_salt_no_cached_tokens_are_reported(server: Running) -> None:
    """It would tell who asks what others have asked."""
    asked: dict[str, Any] = {"prompt": "others water " * 9, "max_tokens": 2}
    usages = [server.complete(**asked).usage for _ in range(2)]
    assert [usage.prompt_tokens_details.cached_tokens for usage in usages] == [0, 0]
    talk = [{"role": "user", "content": "others water " * 9}]
    for _ in range(2):
        chunks = server.openai.chat.completions.create(
            model="tiny", messages=talk, max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
        assert list(chunks)[-1].usage.prompt_tokens_details.cached_tokens == 0
        response = server.openai.responses.create(model="tiny", input=talk, max_output_tokens=2)
        assert response.usage.input_tokens_details.cached_tokens == 0


def test_tokenize_and_detokenize(server: Running, offline: LLM) -> None:
    found = server.post("/tokenize", {"prompt": "The mill", "return_token_strs": True}).json()
    assert found["tokens"] == offline.tokenizer.encode("The mill")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "The mill"}
    assert server.post("/tokenize", {"messages": TALK}).json()["tokens"] == offline.render(TALK)


def test_figures(server: Running) -> None:
    names = (
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "generation_tokens_total",
        "request_success_total",
    )
    before = [server.figure(name) for name in names]
    server.complete(max_tokens=5, n=2, temperature=1, seed=1, extra_body={"ignore_eos": True})
    assert [server.figure(name) - then for name, then in zip(names, before, strict=True)] == [1, 8, 10, 1]
    until(lambda: server.figure("num_requests_running") == server.figure("kv_cache_usage_perc") == 0)
