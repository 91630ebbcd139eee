"""Early exit over HTTP: exit layers of each token, metrics, and the exit in the model object."""

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
from headrace.startup.opening import open_files
from tests.early_exits import write_exits
from tests.server.browser import opened
from tests.server.harness import Running
from tests.tiny_files import write_tiny_gguf

AFTER, LAYERS = 1, 2
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0, "exit_threshold": 0.02, "return_exits": True}
RULE = thresholds.CalibratedThreshold("max_prob", 0.5, 0.0, 8, "text", 0.1, 0.05, 100, 0.01, 6.0, 0.5, "0" * 64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("leaving")
    model = write_tiny_gguf(place / "tiny.gguf", context=512)
    return model, write_exits(place / "exits", model, AFTER)


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[Running]:
    model, exits = folders
    with Running(model, exits=str(exits)) as running:
        yield running


def test_every_token_has_its_exit_layer(server: Running, folders: tuple[Path, Path]) -> None:
    model, exits = folders
    with LLM(model, exits=exits, threads=1, device="cpu", backend="native") as llm:
        (right,) = llm.generate("The mill", SamplingParams(max_tokens=12, temperature=0.0, exit_threshold=0.02))
    (choice,) = server.post("/v1/completions", {**ASKED, "prompt": "The mill"}).json()["choices"]
    assert choice["text"] == right.outputs[0].text
    assert [one["layers"] for one in choice["exits"]] == [one.layers for one in right.outputs[0].exits or ()]
    assert {one["layers"] for one in choice["exits"]} == {AFTER, LAYERS}
    assert choice["exits"][0] == {"layers": LAYERS}
    assert all(0 <= one["confidence"] <= 1 for one in choice["exits"][1:])
    plain = {"model": "tiny", "max_tokens": 4, "prompt": "The mill"}
    assert "exits" not in server.post("/v1/completions", plain).json()["choices"][0]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_exit_layer_of_each_token(server: Running, route: str) -> None:
    talk = {"messages": [{"role": "user", "content": "The mill"}]} if "chat" in route else {"prompt": "The mill"}
    body = {**ASKED, **talk, "exit_audit": True}
    (whole,) = server.post(route, body).json()["choices"]
    lines = server.post(route, {**body, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [one for event in events for choice in event["choices"] for one in choice.get("exits", [])]
    assert streamed == whole["exits"]
    assert len(streamed) == 12
    assert all(len(one["votes"]) == 2 for one in streamed[1:])


def test_the_model_entry_lists_its_exit(server: Running) -> None:
    assert server.http.get("/v1/models/tiny").json()["exit"] == {"after": AFTER, "layers": LAYERS}


def test_figures_count_them(server: Running) -> None:
    def tokens() -> tuple[float, float]:
        text = server.http.get("/metrics").text
        found = {name: float(re.findall(rf"headrace:exit_layer_{name}{{[^}}]*}} (\S+)", text)[0]) for name in ("count", "sum")}
        return found["count"], found["sum"]

    before = tokens()
    (choice,) = server.post("/v1/completions", {**ASKED, "prompt": "A wheel"}).json()["choices"]
    after = tokens()
    assert after[0] - before[0] == 12
    assert after[1] - before[1] == sum(one["layers"] for one in choice["exits"])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"exit_threshold": None}, "return_exits goes with exit_threshold"),
        ({"exit_threshold": 3}, "exit_threshold must be between 0 and 1.01"),
        ({"exit_criterion": "entropy"}, "exit_criterion must be one of"),
        ({"exit_criterion": "saturation"}, "this exit is after the first one"),
        ({"exit_criterion": "classifier"}, "these exits have no classifier"),
        ({"exit_threshold": None, "return_exits": False, "exit_decay": 2}, "exit_decay goes with exit_threshold"),
        ({"beam_width": 2}, "exit_threshold does not go with beam search"),
        ({"best_of": 3}, "leave exit_threshold or best_of out"),
    ],
)
def test_invalid_exit_fields_are_refused(server: Running, fields: dict[str, Any], why: str) -> None:
    answer = server.post("/v1/completions", {**ASKED, "prompt": "The mill", **fields})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_a_slowdown_is_seen() -> None:
    """The alarm's figure: the last answers' layers a token less the calibrated mean, in its standard deviations."""
    figures = ServerMetrics()
    metrics = ModelMetrics(figures, "m")
    metrics.begin(Loaded(64, 4, 100, 10, 16, "", exit=4, layers=12, rule=RULE))

    def above() -> float:
        text = figures.text(Principal()).decode()
        return float(re.findall(r"headrace:exit_layers_above_calibration{[^}]*} (\S+)", text)[0])

    def write(name: str, *depths: int) -> None:
        deltas = [Delta(name, 0, [1], exits=(Exited(depth),)) for depth in depths]
        metrics.step(Deltas([*deltas, Delta(name, 0, finish_reason="stop")], stats=Stats(1, 0, 0, 0)), {})

    write("a", 4, 4, 12, 4)
    assert above() == pytest.approx(0.0)
    write("b", 12, 12)
    assert above() == pytest.approx(6.0)
    for number in range(32):
        write(f"c{number}", 4, 8)
    assert above() == pytest.approx(0.0)
    metrics.end({})
    metrics.begin(Loaded(64, 4, 100, 10, 16, ""))
    write("d", 12)
    assert above() == pytest.approx(0.0)


def test_a_calibrated_rule_is_loaded_and_listed(folders: tuple[Path, Path]) -> None:
    """Of this model and these exits: one of others is nobody's promise here."""
    model, exits = folders
    rule = msgspec.structs.replace(RULE, fits=thresholds.exits_fingerprint(open_files(model), exits))
    thresholds.save(exits, rule)
    thresholds.save(exits, msgspec.structs.replace(RULE, threshold=0.1, fits="another"))
    with Running(model, exits=str(exits)) as running:
        assert running.llm.loaded is not None
        assert running.llm.loaded.rule == rule
        told = running.http.get("/v1/models/tiny").json()["exit"]
    assert told["calibrated"] == {"criterion": "max_prob", "threshold": 0.5, "decay": 0.0, "promise": RULE.summary()}
    (exits / thresholds.CALIBRATION).unlink()


def test_the_page_marks_early_exits(chromium: Any, server: Running) -> None:
    """The setting is there as the model has an exit; tokens that left are marked, and their sum is told."""
    for page in opened(chromium, server):
        page.wait_for_selector("#status[data-state=ready]")
        page.keyboard.press("Alt+S")
        page.fill("#set-exit_threshold", "0.02")
        page.fill("#set-temperature", "0")
        page.fill("#prompt", "The mill")
        with page.expect_request("**/v1/chat/completions") as caught:
            page.press("#prompt", "Enter")
        asked = caught.value.post_data_json
        assert (asked["exit_threshold"], asked["return_exits"]) == (0.02, True)
        page.wait_for_selector("#send:not([hidden])")
        again = {**asked, "stream": False, "stream_options": None, "max_completion_tokens": None}
        answer = server.post("/v1/chat/completions", again).json()
        (choice,) = answer["choices"]
        layers = [one["layers"] for one in choice["exits"]]
        page.click("[aria-pressed]")
        marked = page.evaluate("[...document.querySelectorAll('.tokens .token')].map((one) => one.classList.contains('left'))")
        assert marked == [one < LAYERS for one in layers]
        assert 0 < sum(marked) < len(marked)
        told = f"{sum(layers) / len(layers):.1f} of {LAYERS} layers on average"
        assert told in page.locator(".exits").inner_text()
        outline = page.locator(".strip path").get_attribute("d")
        assert outline == f"M0 {LAYERS}" + "".join(f"V{LAYERS - one}H{at}" for at, one in enumerate(layers, 1)) + f"V{LAYERS}Z"
        assert page.locator(".strip .depths").inner_text().split() == [str(LAYERS), str(AFTER)]
        box = page.locator(".strip svg").bounding_box()
        page.mouse.click(box["x"] + box["width"] * (layers.index(AFTER) + 0.5) / len(layers), box["y"] + 5)
        focused = "[...document.querySelectorAll('.tokens .token')].indexOf(document.activeElement)"
        assert page.evaluate(focused) == layers.index(AFTER)
        page.hover(".tokens .left >> nth=0")
        assert f"after {AFTER} layers" in page.locator("#tip").inner_text()
