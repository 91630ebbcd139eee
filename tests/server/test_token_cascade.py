"""Token cascades over HTTP: the model of each token, the cascade in the model object, the page, the slowdown alarm."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.data.params import SamplingParams
from headrace.data.plan import Exited
from headrace.data.types import Delta
from headrace.llm import LLM
from headrace.server.access.principals import Principal
from headrace.server.engines.messages import Deltas, Loaded, Stats
from headrace.server.engines.metrics import ModelMetrics, ServerMetrics
from headrace.startup import thresholds
from tests.server.browser import opened
from tests.server.harness import Running
from tests.tiny_files import write_tiny_gguf

LAYERS = 2
SURE = 0.02
RULE = thresholds.CalibratedThreshold("margin", 0.4, 0.0, 8, "token", 0.1, 0.05, 100, 0.01, 1.0, 0.25, "0" * 64)
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "The mill", "max_tokens": 12, "temperature": 0, "cascade_threshold": SURE}


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("cascade") / "smaller.gguf", layers=1, seed=3)


@pytest.fixture(scope="module")
def server(tiny: Path, smaller: Path) -> Iterator[Running]:
    with Running(tiny, cascade=str(smaller)) as running:
        yield running


def test_each_token_has_its_model(tiny: Path, smaller: Path, server: Running) -> None:
    with LLM(tiny, cascade=smaller, threads=1, device="cpu", backend="native") as llm:
        (right,) = llm.generate("The mill", SamplingParams(max_tokens=12, temperature=0.0, cascade_threshold=SURE))
    told = [one.layers for one in right.outputs[0].exits or ()]
    assert set(told) == {0, LAYERS}
    before = by_smaller(server)
    (choice,) = server.post("/v1/completions", {**ASKED, "return_exits": True}).json()["choices"]
    assert choice["text"] == right.outputs[0].text
    assert [one["layers"] for one in choice["exits"]] == told
    body = {**ASKED, "return_exits": True, "cascade_audit": True, "stream": True}
    lines = server.post("/v1/completions", body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [one for event in events for made in event["choices"] for one in made.get("exits", [])]
    assert [one["layers"] for one in streamed] == told
    assert all(len(one["votes"]) == 2 for one in streamed[1:])
    assert by_smaller(server) - before == 2 * told.count(0)
    plain = {name: value for name, value in ASKED.items() if name != "cascade_threshold"}
    assert "exits" not in server.post("/v1/completions", plain).json()["choices"][0]


def by_smaller(server: Running) -> float:
    """Tokens that the smaller model has written, as the dashboard counts them."""
    return float(re.findall(r'headrace:exit_layer_bucket{le="0.0"[^}]*} (\S+)', server.http.get("/metrics").text)[0])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cascade_threshold": 3}, "cascade_threshold must be between 0 and 1.01"),
        ({"beam_width": 2}, "cascade_threshold does not go with beam search"),
        ({"exit_threshold": 0.5}, "leave exit_threshold or cascade_threshold out"),
    ],
)
def test_invalid_cascade_fields_are_refused(server: Running, fields: dict[str, Any], why: str) -> None:
    answer = server.post("/v1/completions", {**ASKED, **fields})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_the_model_entry_lists_the_smaller_model_and_its_rule(
    server: Running, tiny: Path, smaller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name without its path; and with the threshold that was calibrated for these two, which nobody else gets."""
    card = {"smaller": "smaller", "layers": LAYERS}
    assert server.http.get("/v1/models/tiny").json()["cascade"] == card
    assert "exit" not in server.http.get("/v1/models/tiny").json()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    thresholds.save(thresholds.cascade_folder(tiny, smaller), RULE)
    thresholds.save(thresholds.cascade_folder(smaller, tiny), msgspec.structs.replace(RULE, threshold=0.9))
    with Running(tiny, cascade=str(smaller)) as running:
        assert running.llm.loaded is not None
        assert running.llm.loaded.rule == RULE
        assert RULE.summary() in running.llm.loaded.note
        told = {"criterion": "margin", "threshold": 0.4, "decay": 0.0, "promise": RULE.summary()}
        assert running.http.get("/v1/models/tiny").json()["cascade"] == {**card, "calibrated": told}
    with Running(tiny) as running:
        assert "cascade" not in running.http.get("/v1/models/tiny").json()


def test_a_slowdown_is_seen() -> None:
    """Answers of which the smaller model writes less than in the calibration: by so many standard deviations."""
    figures = ServerMetrics()
    metrics = ModelMetrics(figures, "m")
    metrics.begin(Loaded(64, 4, 100, 10, 16, "", layers=LAYERS, rule=RULE))
    for name, depths in (("usual", (0, LAYERS)), ("slow", (LAYERS, LAYERS))):
        deltas = [Delta(name, 0, [1], exits=(Exited(depth),)) for depth in depths]
        metrics.step(Deltas([*deltas, Delta(name, 0, finish_reason="stop")], stats=Stats(1, 0, 0, 0)), {})
        text = figures.text(Principal()).decode()
        above = float(re.findall(r"headrace:exit_layers_above_calibration{[^}]*} (\S+)", text)[0])
        assert above == pytest.approx({"usual": 0.0, "slow": 2.0}[name])  # of the mean of all so far


def test_the_page_marks_tokens_of_the_smaller_model(chromium: Any, server: Running) -> None:
    """The setting is there as the model has a smaller one beside it; its tokens are marked, and their share is told."""
    for page in opened(chromium, server):
        page.wait_for_selector("#status[data-state=ready]")
        page.keyboard.press("Alt+S")
        assert page.locator("#set-exit_threshold").count() == 0
        page.fill("#set-cascade_threshold", str(SURE))
        page.fill("#set-temperature", "0")
        page.fill("#prompt", "The mill")
        with page.expect_request("**/v1/chat/completions") as caught:
            page.press("#prompt", "Enter")
        asked = caught.value.post_data_json
        assert (asked["cascade_threshold"], asked["return_exits"]) == (SURE, True)
        page.wait_for_selector("#send:not([hidden])")
        (choice,) = server.post(
            "/v1/chat/completions", {**asked, "stream": False, "stream_options": None, "max_completion_tokens": None}
        ).json()["choices"]
        layers = [one["layers"] for one in choice["exits"]]
        page.click("[aria-pressed]")
        marked = page.evaluate("[...document.querySelectorAll('.tokens .token')].map((one) => one.classList.contains('left'))")
        assert marked == [one == 0 for one in layers]
        assert 0 < sum(marked) < len(marked)
        told = page.locator(".exits").inner_text()
        assert "by the smaller model" in told
        assert f"{100 * sum(marked) / len(marked):.0f} % of the tokens" in told
        page.hover(".tokens .left >> nth=0")
        assert "by the smaller model" in page.locator("#tip").inner_text()
        page.hover(".tokens .token:not(.left) >> nth=0")
        assert "by the model itself" in page.locator("#tip").inner_text()
