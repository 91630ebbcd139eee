"""Cascades by token over HTTP: what the engine gives, and who wrote each token."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from tests.server.harness import Running
from tests.tiny_files import write_tiny_gguf

LAYERS = 2
SURE = 0.02
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "The mill", "max_tokens": 12, "temperature": 0, "cascade_threshold": SURE}


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("cascade") / "smaller.gguf", layers=1, seed=3)


def test_who_wrote_each_token(tiny: Path, smaller: Path) -> None:
    with LLM(tiny, cascade=smaller, threads=1, device="cpu", backend="native") as llm:
        (right,) = llm.generate("The mill", SamplingParams(max_tokens=12, temperature=0.0, cascade_threshold=SURE))
    told = [one.layers for one in right.outputs[0].exits or ()]
    assert set(told) == {0, LAYERS}
    with Running(tiny, cascade=str(smaller)) as server:
        (choice,) = server.post("/v1/completions", {**ASKED, "return_exits": True}).json()["choices"]
        assert choice["text"] == right.outputs[0].text
        assert [one["layers"] for one in choice["exits"]] == told
        body = {**ASKED, "return_exits": True, "cascade_audit": True, "stream": True}
        lines = server.post("/v1/completions", body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        streamed = [one for event in events for made in event["choices"] for one in made.get("exits", [])]
        assert [one["layers"] for one in streamed] == told
        assert all(len(one["votes"]) == 2 for one in streamed[1:])
        found = server.http.get("/metrics").text
        (line,) = [one for one in found.splitlines() if one.startswith("headrace:exit_layer_bucket") and 'le="0.0"' in one]
        assert float(line.split()[-1]) == 2 * told.count(0)
        plain = {name: value for name, value in ASKED.items() if name != "cascade_threshold"}
        assert "exits" not in server.post("/v1/completions", plain).json()["choices"][0]
        for fields, why in (
            ({"cascade_threshold": 3}, "cascade_threshold must be between 0 and 1.01"),
            ({"beam_width": 2}, "cascade_threshold does not go with beam search"),
            ({"exit_threshold": 0.5}, "leave exit_threshold or cascade_threshold out"),
        ):
            answer = server.post("/v1/completions", {**ASKED, **fields})
            assert answer.status_code == 400
            assert why in answer.json()["error"]["message"]
