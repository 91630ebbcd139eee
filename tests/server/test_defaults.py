"""Sampling defaults of requests that set none."""

from pathlib import Path

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.weights.defaults import FALLBACK
from tests.server.harness import Running


def test_the_server_lists_its_defaults_and_samples_with_them(server: Running, offline: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["defaults"] == {name: {"value": value, "origin": "default", "of": ""} for name, value in FALLBACK.items()}
    body = {"model": "tiny", "messages": talk, "seed": 4, "max_tokens": 12}
    said = server.http.post("/v1/chat/completions", json=body).json()
    (expected,) = offline.chat(talk, seed=4, max_tokens=12)
    (neutral,) = offline.generate(offline.render(talk), SamplingParams(seed=4, max_tokens=12))
    assert said["choices"][0]["message"]["content"] == expected.outputs[0].text != neutral.outputs[0].text


def test_neutral_defaults_of_a_server(tiny: Path, offline: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    with Running(tiny, sampling_defaults="neutral") as server:
        (model,) = server.http.get("/v1/models").json()["data"]
        assert model["defaults"] == {}
        body = {"model": "tiny", "messages": talk, "seed": 4, "max_tokens": 12}
        said = server.http.post("/v1/chat/completions", json=body).json()
    (neutral,) = offline.generate(offline.render(talk), SamplingParams(seed=4, max_tokens=12))
    assert said["choices"][0]["message"]["content"] == neutral.outputs[0].text
