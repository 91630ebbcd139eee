"""/v1/embeddings through the `openai` client: what `LLM.embed` gives, in both encodings."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import CreateEmbeddingResponse

from headrace.llm import LLM
from tests.server.harness import TORCH, Running, until
from tests.tiny_bert import CONTEXT, write_tiny_bert
from tests.ulps import rounded_once

TEXTS = ["The mill", "A river turns the wheel<|im_end|>", "water"]


def test_embeddings_of_a_decoder_equal_embed(server: Running, offline: LLM) -> None:
    for pooling in ("last", "mean"):
        expected = [one.values for one in offline.embed(TEXTS, pooling=pooling)]
        made = server.openai.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling})  # base64 by itself
        assert [one.index for one in made.data] == [0, 1, 2]
        for one, values in zip(made.data, expected, strict=True):
            assert rounded_once(one.embedding, values)
        floats = server.openai.embeddings.create(
            model="tiny", input=TEXTS, encoding_format="float", extra_body={"pooling": pooling}
        )
        assert floats.data[1].embedding == pytest.approx(expected[1], abs=1e-12)
    tokens = [offline.tokenizer.encode(text, parse_special=False) for text in TEXTS]
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, tokens))
    by_ids = server.openai.embeddings.create(model="tiny", input=tokens, extra_body={"pooling": "mean"})
    assert by_ids.data[2].embedding == made.data[2].embedding
    one = server.openai.embeddings.create(model="tiny", input=tokens[0], dimensions=4, user="me")
    assert rounded_once(one.data[0].embedding, offline.embed(TEXTS[0], dimensions=4)[0].values)  # type: ignore[attr-defined]
    many = server.openai.embeddings.create(model="tiny", input=["water"] * 70)
    assert len({tuple(one.embedding) for one in many.data}) == 1
    assert server.figure("kv_cache_usage_perc") == 0


def test_the_answer_has_the_shape_of_the_protocol(server: Running) -> None:
    answer = server.post("/v1/embeddings", {"model": "tiny", "input": "a", "encoding_format": "float"}).json()
    CreateEmbeddingResponse.model_validate(answer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": []}, "input is empty"),
        ({"input": ""}, "an input is empty"),
        ({"input": ["a", ""]}, "an input is empty"),
        ({"input": [[]]}, "an input is empty"),
        ({"input": [[10**9]]}, "is not in the vocabulary"),
        ({"input": [[5]] * 100 + [[5, 99_999]]}, "token 99999 is not in the vocabulary (0 to"),
        ({"input": [[5, 99_999]]}, "another model's tokenizer? send texts"),
        ({"input": "mill " * 600}, "shorten the text"),
        ({"input": ["a"] * 2049}, "at most 2048 inputs"),
        ({"encoding_format": "int8"}, "float or base64"),
        ({"priority": -1}, "priority must be 0 or more"),
        ({"dimensions": 0}, "dimensions must be 1 to 32"),
        ({"dimensions": 33}, "dimensions must be 1 to 32"),
        ({"pooling": "most"}, "unknown pooling"),
        ({"pooling": "first"}, "pool mean or last"),
        ({"temperature": 1}, "unknown field 'temperature'"),
        ({"model": "gpt-99"}, "is not served here"),
    ],
)
def test_a_bad_request_is_refused(server: Running, change: dict[str, object], says: str) -> None:
    answer = server.post("/v1/embeddings", {"model": "tiny", "input": "a", **change})
    assert answer.status_code in (400, 404)
    assert says in answer.json()["error"]["message"]


def test_an_encoder_is_served(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "bert")
    llm = LLM(folder, **TORCH)
    with Running(folder, **TORCH) as running:
        made = running.openai.embeddings.create(model="tiny", input=["the mill", "a wheel"], encoding_format="float")
        for one, expected in zip(made.data, llm.embed(["the mill", "a wheel"]), strict=True):
            assert one.embedding == pytest.approx(expected.values, abs=1e-9)
        full = [2, *[5] * (CONTEXT - 2), 3]
        assert len(running.openai.embeddings.create(model="tiny", input=full).data) == 1
        with pytest.raises(openai.BadRequestError, match="shorten"):
            running.openai.embeddings.create(model="tiny", input=[*full, 3])
        with pytest.raises(openai.BadRequestError, match="request embeddings or classes"):
            running.complete()


def test_the_rest_of_a_request_waits_for_queue_space(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others fill the queue between two parts of one request: it goes on when they are gone."""
    llm, filled, room_comes = server.llm, [], True
    submit, waiting = llm.submit, llm.queue

    def leave() -> None:
        waiting.requests -= waiting.max_requests

    def fill(*given: Any, **more: Any) -> Any:
        inflight = submit(*given, **more)
        if not filled:
            waiting.requests += waiting.max_requests
            filled.append(asyncio.get_running_loop().call_later(0.1, leave) if room_comes else None)
        return inflight

    monkeypatch.setattr(llm, "submit", fill)
    made = server.openai.embeddings.create(model="tiny", input=["water"] * 7)
    assert len(made.data) == 7
    assert filled
    filled.clear()
    room_comes = False
    answer = server.post("/v1/embeddings", {"model": "tiny", "input": ["water"] * 7, "deadline": 0.05})
    assert answer.status_code == 408
    server.on_loop(leave)
    until(lambda: waiting.requests == 0)
