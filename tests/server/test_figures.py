"""Metrics: vLLM's names, all on the dashboard; the log contains no texts of requests."""

import io
import json
import logging
import re
from pathlib import Path

from headrace.data.params import SamplingParams
from headrace.data.types import Delta, RequestMetrics
from headrace.server.access.principals import Principal
from headrace.server.access.queueing import AdmissionQueue
from headrace.server.engines.inflight import InflightRequest, WakeupEvent
from headrace.server.engines.messages import Deltas, Loaded, Stats
from headrace.server.engines.metrics import ModelMetrics, ServerMetrics
from headrace.server.logs import REQUESTS, JsonLines
from tests.server.harness import ROOT, Running

# What vLLM calls them, after its prefix; `_total` and `_bucket` as Prometheus adds them.
VLLM = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total "
    "num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total iteration_tokens_total_bucket "
    "time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket "
    "e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_inference_time_seconds_bucket "
    "request_prefill_time_seconds_bucket request_decode_time_seconds_bucket request_prompt_tokens_bucket "
    "request_generation_tokens_bucket request_params_n_bucket request_params_max_tokens_bucket "
    "spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total"
).split()


def exposed(text: str) -> set[str]:
    return set(re.findall(r"^headrace:(\w+)\{", text, re.MULTILINE))


def test_the_metrics_include_those_of_vllm_and_of_the_dashboard(server: Running) -> None:
    server.complete()
    there = exposed(server.http.get("/metrics").text)
    assert set(VLLM) - there == set()
    asked = on_the_dashboard()
    assert {name for name in asked - there if not name.startswith("cascade_")} == set()  # those need a cascade of models
    assert len(asked) > 20


def on_the_dashboard() -> set[str]:
    """The figures that it asks for; its panels have numbers of their own."""
    board = json.loads((ROOT / "examples/grafana.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return {name for query in queries for name in re.findall(r"headrace:(\w+)", query)}


def test_figures_of_a_request() -> None:
    """Numbers that are known beforehand."""
    figures = ServerMetrics()
    metrics = ModelMetrics(figures, "m")
    metrics.begin(Loaded(64, 4, 100, num_blocks=10, block_size=16, note=""))
    submitted = InflightRequest("r", [1, 2, 3, 4], SamplingParams(max_tokens=3), AdmissionQueue(1, 100), WakeupEvent())
    submitted.generated = 3
    times = RequestMetrics(
        arrival=10.0, scheduled=10.5, first_token=11.0, last_token=15.0, cached_tokens=2, drafts=3, drafted=8, preemptions=1
    )
    for count in (3, 0, 3):
        times.accept(count)
    for token in range(3):
        metrics.step(Deltas([Delta("r", 0, [token], "ab")], stats=Stats(1, 2, 5, 1, fed=7)), {"r": submitted})
    last = Deltas([Delta("r", 0, finish_reason="stop", finished=True)], {"r": times}, stats=Stats(0, 0, 0, 1))
    metrics.step(last, {"r": submitted})
    text = figures.text(Principal()).decode()

    def value(name: str) -> float:
        return float(re.findall(rf"^headrace:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[0])

    expected = {
        "generation_tokens_total": 3, "generation_chars_total": 6, "prompt_tokens_total": 4, "prefix_cache_queries_total": 4,
        "prefix_cache_hits_total": 2, "num_preemptions_total": 1, "spec_decode_num_draft_tokens_total": 8,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_accepted_tokens_total": 6, "request_queue_time_seconds_sum": 0.5,
        "request_prefill_time_seconds_sum": 0.5,
        "request_decode_time_seconds_sum": 4, "request_inference_time_seconds_sum": 4.5, "inter_token_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_sum": 2, "iteration_tokens_total_sum": 21, "iteration_tokens_total_count": 3,
        "iteration_requests_count": 4, "time_to_first_token_seconds_count": 1, "request_success_total": 1,
    }  # fmt: skip
    assert {name: value(name) for name in expected} == expected
    places = re.findall(
        r"^headrace:spec_decode_num_accepted_tokens_per_pos_total{.*position=\"(\d)\".*} (\S+)$", text, re.MULTILINE
    )
    assert places == [("0", "2.0"), ("1", "2.0"), ("2", "2.0")]


def test_drafted_and_accepted_tokens_are_counted(tiny: Path) -> None:
    """What drafts were verified on the way is told, and the answer is that of a server that does not speculate."""
    repeats = "rain sun wind snow " * 12
    with Running(tiny, speculate="ngram", draft_tokens=3) as running:
        assert running.figure("spec_decode_num_draft_tokens_total") == 0
        answers = [running.complete(prompt=repeats, max_tokens=60, temperature=heat, seed=5) for heat in (0, 0.5)]
        drafted, accepted = (running.figure(f"spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted"))
        assert 0 < accepted < drafted
        drafts = running.figure("spec_decode_num_drafts_total")
        assert drafted / 3 <= drafts <= drafted
        assert running.figure("spec_decode_num_accepted_tokens_per_pos_total") == accepted
        assert accepted < running.figure("generation_tokens_total") == 120
    with Running(tiny, speculate="off") as running:
        plain = [running.complete(prompt=repeats, max_tokens=60, temperature=heat, seed=5) for heat in (0, 0.5)]
        assert running.figure("spec_decode_num_draft_tokens_total") == 0
    assert [answer.choices[0].text for answer in answers] == [answer.choices[0].text for answer in plain]


def test_a_request_selects_the_verification_rule(tiny: Path) -> None:
    """A seed still says the same again; a rule that nobody has is refused."""
    with Running(tiny, speculate="ngram", draft_tokens=3) as running:
        ask = {"model": "tiny", "prompt": "rain sun " * 12, "max_tokens": 40, "temperature": 0.5, "seed": 3}
        texts = [running.post("/v1/completions", {**ask, "verification": "block"}).json()["choices"] for _ in range(2)]
        assert texts[0] == texts[1]
        wrong = running.post("/v1/completions", {**ask, "verification": "guess"})
        assert (wrong.status_code, "noise, rejection, block" in wrong.text) == (400, True)


def test_the_log_has_counts_and_no_text(server: Running) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    root = logging.getLogger("headrace")
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        answer = server.complete(prompt="A secret about the mill", max_tokens=4)
        REQUESTS.error("it went wrong", exc_info=ValueError("why"))
    finally:
        root.removeHandler(handler)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (line,) = [line for line in lines if line.get("generated_tokens") == 4]
    assert (line["logger"], line["level"], line["model"]) == ("headrace.requests", "info", "tiny")
    assert line["finish_reason"] == "length"
    (told,) = [line for line in lines if line.get("path") == "/v1/completions"]
    assert line["http_request"] == told["http_request"] == answer._request_id
    assert (told["method"], told["status"]) == ("POST", 200)
    assert line["prompt_tokens"] == answer.usage.prompt_tokens
    assert "secret" not in stream.getvalue()
    assert answer.choices[0].text.strip() not in stream.getvalue()
    assert "ValueError: why" in lines[-1]["exception"]


def test_the_pages_name_the_path_of_the_dashboard() -> None:
    assert "examples/grafana.json" in Path(ROOT / "docs/en/reference/http.md").read_text("utf-8")
