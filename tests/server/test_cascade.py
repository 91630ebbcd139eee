"""A cascade as a model of the server: same answers as offline, usage of every tier, and refusal of fields without a score."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import serve as command
from headrace.cli.app import main
from headrace.cli.cascade_files import read_cascade
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.server.access.queueing import QueueFullError
from headrace.server.engines.async_llm import RequestFailedError
from headrace.server.engines.inflight import DeadlineError, EngineDownError, EngineLostError
from headrace.server.engines.supervision import State
from headrace.server.http.api_error import MODEL_UNUSABLE, ApiError
from headrace.server.http.errors import ENGINE_LOST, UNFIT
from headrace.server.protocols import cascade as module
from headrace.server.protocols import chat
from headrace.server.protocols.fields import ChatRequest
from headrace.server.serving import ModelSpec, open_models
from headrace.server.settings import NEVER, CascadeSettings, ServerSettings, SettingsError
from headrace.workflows.cascade import CascadeOutput, Tier, answer
from tests.server.browser import answers as shown
from tests.server.browser import opened, send_message
from tests.server.harness import ENGINE, PATIENT, Running
from tests.server.test_figures import exposed, on_the_dashboard
from tests.tiny_files import write_tiny_gguf

PROMPTS = ["The mill", "stands by a river", "wheels", "of water and of stone", "so"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ASK = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
COSTS = {"small": 0.25, "large": 2.0}
CONTEXT = 64  # of the small one
LLAMA3 = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<|python_tag|>{% endif %}"
CALLS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiers")
    templates = {"small": CALLS, "large": CALLS, "other": LLAMA3}
    return {
        name: write_tiny_gguf(folder / f"{name}.gguf", seed=seed, template=template)
        for seed, (name, template) in enumerate(templates.items(), 1)
    }


@pytest.fixture(scope="module")
def offline(files: dict[str, Path]) -> Iterator[dict[str, LLM]]:
    llms = {name: LLM(files[name], **ENGINE) for name in ("small", "large")}
    yield llms
    for llm in llms.values():
        llm.close()


def settle(offline: dict[str, LLM], threshold: float, score: Any = "min") -> list[CascadeOutput]:
    tiers = [Tier(offline["small"], threshold, score, COSTS["small"]), Tier(offline["large"], cost=COSTS["large"])]
    return answer(tiers, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def middle(offline: dict[str, LLM]) -> float:
    """A threshold that some answers reach."""
    return sorted(one.scores[0] for one in settle(offline, 0.0))[len(PROMPTS) // 2]


@pytest.fixture(scope="module")
def server(files: dict[str, Path], middle: float) -> Iterator[Running]:
    settings = ServerSettings("small", port=0, limits=PATIENT)
    more = {"small": {"max_model_len": CONTEXT}}
    chosen = [ModelSpec(name, str(file), {**ENGINE, **more.get(name, {})}) for name, file in files.items()]
    pair = ("small", "large")
    cascades = [
        CascadeSettings("always", pair, (0.0,)),
        CascadeSettings("never", pair, (NEVER,)),
        CascadeSettings("both", pair, (middle,)),
        CascadeSettings("mean", pair, (middle,), "mean"),
        CascadeSettings("mixed", ("small", "other"), (0.0,)),
    ]
    with Running.of(open_models(chosen, settings, None, cascades), settings) as running:
        yield running


def billed(usage: dict[str, Any], tiers: list[dict[str, Any]] | None = None) -> float:
    """What the tiers' tokens cost."""
    each = usage["tiers"] if tiers is None else tiers
    return sum(COSTS[one["model"]] * (one["prompt_tokens"] + one["completion_tokens"]) for one in each)


@pytest.mark.parametrize(("name", "score"), [("always", "min"), ("never", "min"), ("both", "min"), ("mean", "mean")])
def test_the_server_answers_as_the_offline_cascade(
    server: Running, offline: dict[str, LLM], middle: float, name: str, score: str
) -> None:
    """Text, who answered, score and cost; a bill that forgets the small model is another one."""
    expected = settle(offline, {"always": 0.0, "never": NEVER}.get(name, middle), score)
    for prompt, right in zip(PROMPTS, expected, strict=True):
        said = server.post("/v1/completions", {"model": name, "prompt": prompt, **ASK}).json()
        assert said["model"] == name
        assert said["choices"][0]["text"] == right.output.outputs[0].text
        assert said["choices"][0]["logprobs"] is None, "what was not asked for"
        usage = said["usage"]
        assert [one["model"] for one in usage["tiers"]] == ["small", "large"][: right.tier + 1]
        assert usage["tiers"][0]["score"] == right.scores[0]
        assert right.tier == 0 or usage["tiers"][1]["score"] is None
        assert billed(usage) == right.cost
        assert usage["total_tokens"] == sum(one["prompt_tokens"] + one["completion_tokens"] for one in usage["tiers"])
        if right.tier == 1:
            assert billed(usage, usage["tiers"][1:]) != right.cost
    if name == "both":
        assert {one.tier for one in expected} == {0, 1}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_equals_the_complete_answer(server: Running, path: str) -> None:
    """One piece of an early tier, whose answer is scored first; of the last one as it comes."""
    for name, pieces in (("always", 1), ("never", 6)):
        body = {"model": name, **ASK, "logprobs": 2 if path == "completions" else True}
        body |= {"prompt": "The mill"} if path == "completions" else {"messages": [{"role": "user", "content": "The mill"}]}
        whole = server.post(f"/v1/{path}", body).json()
        streamed = server.post(f"/v1/{path}", {**body, "stream": True, "stream_options": {"include_usage": True}}).text
        events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
        said = [event["choices"][0] for event in events if event["choices"]]
        texts = [one["text"] if path == "completions" else one["delta"].get("content", "") for one in said]
        choice = whole["choices"][0]
        assert "".join(texts) == (choice["text"] if path == "completions" else choice["message"]["content"])
        tokens = [one["logprobs"] for one in said if one["logprobs"]]
        assert len(tokens) == pieces
        parts = "token_logprobs" if path == "completions" else "content"
        assert [entry for one in tokens for entry in one[parts]] == choice["logprobs"][parts]
        assert said[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert events[-1]["usage"] == whole["usage"]
        assert {event["model"] for event in events} == {name}


def test_chats_and_responses(server: Running, offline: dict[str, LLM]) -> None:
    talk = [{"role": "user", "content": "The mill"}]
    for name, model in (("always", "small"), ("never", "large")):
        (right,) = offline[model].chat([talk], PARAMS)
        said = server.post("/v1/chat/completions", {"model": name, "messages": talk, **ASK}).json()
        assert said["choices"][0]["message"]["content"] == right.outputs[0].text
        asked = {"model": name, "input": "The mill", "temperature": 0, "max_output_tokens": 6}
        kept = server.post("/v1/responses", asked).json()
        assert kept["model"] == name
        plain = server.post("/v1/responses", {**asked, "model": model}).json()
        assert kept["output"][0]["content"] == plain["output"][0]["content"]
        assert [one["model"] for one in kept["usage"]["tiers"]] == ["small", "large"][: 1 + (name == "never")]
        assert "tiers" not in plain["usage"]


def test_a_rejected_tier_leaves_no_inflight_request(server: Running) -> None:
    """Its inflight are through, so that an orderly end does not wait for them; figures say who answered."""
    before = {name: server.figure(name) for name in ("cascade_answers_total", "cascade_score_count")}
    for name in ("always", "never"):
        assert server.post("/v1/completions", {"model": name, "prompt": "The mill", **ASK}).status_code == 200
    for service in server.models.services:
        assert (service.llm.inflight, service.llm._undelivered) == ({}, set())
    assert server.figure("cascade_answers_total") == before["cascade_answers_total"] + 2
    assert server.figure("cascade_score_count") == before["cascade_score_count"] + 2
    found = server.http.get("/metrics").text
    assert 'cascade_answers_total{model_name="never",tier="large"}' in found
    assert {name for name in on_the_dashboard() if name.startswith("cascade_")} - exposed(found) == set()


def test_a_prompt_beyond_the_context_goes_to_the_next_tier(server: Running) -> None:
    long = "wheel " * CONTEXT
    assert server.post("/v1/completions", {"model": "small", "prompt": long, **ASK}).status_code == 400
    said = server.post("/v1/completions", {"model": "always", "prompt": long, **ASK}).json()
    assert [one["model"] for one in said["usage"]["tiers"]] == ["large"]
    too_long = server.post("/v1/completions", {"model": "always", "prompt": long * 4, **ASK})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_a_failed_tier_scores_zero(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    collect_answer = module.collect_answer

    async def failing(submitted: Any) -> Any:
        await collect_answer(submitted)
        raise RequestFailedError("broken")

    monkeypatch.setattr(module, "collect_answer", failing)
    said = server.post("/v1/completions", {"model": "always", "prompt": "The mill", **ASK}).json()
    assert [(one["model"], one["score"]) for one in said["usage"]["tiers"]] == [("small", 0.0), ("large", None)]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_tier_without_an_engine_is_skipped(server: Running, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The next one answers, which a figure says; without the last one there is no answer. Under whose request an engine ended
    is told so: it may be why, and is not handed on. The control: a cascade that takes no absence for one."""
    body = {"model": "always", **ASK, "prompt": "The mill"}
    if path == "chat/completions":
        body = {"model": "always", **ASK, "messages": [{"role": "user", "content": "The mill"}], "tools": [TOOL]}
    before = server.figure("cascade_absences_total")
    small, large = (server.models.find(name).llm for name in ("small", "large"))
    with monkeypatch.context() as patch:
        patch.setattr(small.replica.supervision, "state", State.DEAD)
        patch.setattr(small, "_opened", None)
        said = server.post(f"/v1/{path}", body)
        assert [one["model"] for one in said.json()["usage"]["tiers"]] == ["large"]
        assert server.figure("cascade_absences_total") == before + 1
        with monkeypatch.context() as control:
            control.setattr(module, "is_absent", lambda error: False)
            assert server.post(f"/v1/{path}", body).status_code == 503
        patch.setattr(large.replica.supervision, "state", State.DEAD)
        assert server.post(f"/v1/{path}", body).status_code == 503
    assert [one["model"] for one in server.post(f"/v1/{path}", body).json()["usage"]["tiers"]] == ["small"]

    async def lost(submitted: Any) -> Any:
        raise EngineLostError("the engine ended")

    monkeypatch.setattr(module, "collect_answer", lost)
    said = server.post(f"/v1/{path}", body)
    assert (said.status_code, said.json()["error"]["code"]) == (503, ENGINE_LOST)


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (EngineDownError("it is being loaded"), True),
        (ApiError(503, "no room for it", code=MODEL_UNUSABLE), True),
        (EngineLostError("it ended"), False),
        (DeadlineError("too late"), False),
        (QueueFullError("8 wait", 1), False),
        (ApiError(400, "wrong"), False),
        (RuntimeError("a mistake of ours"), False),
    ],
)
def test_errors_that_count_as_an_absence(error: Exception, absent: bool) -> None:
    """A queue that is full is none: the larger model is not where a crowd goes."""
    assert module.is_absent(error) is absent


def test_an_answer_truncated_by_the_context_goes_to_the_next_tier(
    server: Running, offline: dict[str, LLM], files: dict[str, Path]
) -> None:
    """The next tier answers if a tier's context cannot hold the prompt and `max_tokens`: offline after the cut, on the server
    before the first token. An answer that ends at `max_tokens` stands."""
    prompt = "wheel " * 4
    send_message = {"model": "always", "prompt": prompt, "temperature": 0, "ignore_eos": True}
    tokens = len(offline["small"].tokenizer.encode(prompt))
    for most, tiers, last in ((CONTEXT - tokens, ["small"], 0), (CONTEXT - tokens + 1, ["large"], 1)):
        said = server.post("/v1/completions", {**send_message, "max_tokens": most}).json()
        assert [one["model"] for one in said["usage"]["tiers"]] == tiers
        assert said["usage"]["tiers"][-1]["completion_tokens"] == most
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most)
        with LLM(files["small"], **ENGINE, max_model_len=CONTEXT) as short:
            found = answer([Tier(short), Tier(offline["large"])], [prompt, "wheel " * CONTEXT], params)
        assert [one.tier for one in found] == [last, 1]
        assert [len(one.scores) for one in found] == [1, 0]
        assert found[0].output.outputs[0].text == said["choices"][0]["text"]


def test_an_answer_outside_its_format_goes_to_the_next_tier(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a next one: a form that no mask can hold answers to is looked at when they are whole."""
    right = module.answer
    unfit: list[str] = []

    async def answered(generation: Any, write: Any, http: Any) -> Any:
        if generation.attempt.model in unfit:
            generation.abort()
            raise ApiError(422, "not of its form", code=UNFIT)
        return await right(generation, write, http)

    monkeypatch.setattr(module, "answer", answered)
    body = {"model": "always", "prompt": "The mill", **ASK}
    unfit.append("small")
    assert [one["model"] for one in server.post("/v1/completions", body).json()["usage"]["tiers"]] == ["small", "large"]
    unfit.append("large")
    assert server.post("/v1/completions", body).json()["error"]["code"] == UNFIT


def test_tiers_share_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    request = chat.read(ChatRequest(model="both", messages=[], deadline=10.0))
    monkeypatch.setattr(module.time, "monotonic", lambda: 107.0)
    assert module._within(request, 110.0).sampling.deadline == 3.0
    assert module._within(request, None) is request
    with pytest.raises(DeadlineError):
        module._within(request, 107.0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"beam_width": 2}, "beam_width"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "penalty_alpha"),
        ({"refine_block": 8}, "refine_block"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": [[5]]}, "bad_words"),
        ({"echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [5, 6]}, "prompt"),
    ],
)
def test_requests_without_a_score_are_refused(server: Running, change: dict[str, Any], param: str) -> None:
    found = server.post("/v1/completions", {"model": "both", "prompt": "a", **change})
    error = found.json()["error"]
    assert (found.status_code, error["param"]) == (400, param)
    assert "\n" not in error["message"]


def test_tiers_with_different_call_formats_refuse_tools(server: Running) -> None:
    talk = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "tools": [TOOL]}
    assert server.post("/v1/chat/completions", {"model": "both", **talk}).status_code == 200
    error = server.post("/v1/chat/completions", {"model": "mixed", **talk}).json()["error"]
    assert error["param"] == "tools"
    assert "small: hermes, other: llama3_json" in error["message"]
    without = {**talk, "tool_choice": "none"}
    assert server.post("/v1/chat/completions", {"model": "mixed", **without}).status_code == 200


def test_a_cascade_is_listed_and_answers_only_texts(server: Running) -> None:
    found = {one["id"]: one for one in server.http.get("/v1/models").json()["data"]}
    assert list(found) == ["small", "large", "other", "always", "never", "both", "mean", "mixed"]
    assert found["both"] == server.http.get("/v1/models/both").json()
    assert (found["both"]["tiers"], found["both"]["status"]) == (["small", "large"], "ready")
    assert found["both"]["max_model_len"] == found["large"]["max_model_len"] > CONTEXT
    assert "defaults" not in found["both"]
    assert "tiers" not in found["small"]
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/classify", {"input": "a"}), ("/tokenize", {"prompt": "a"})):
        error = server.post(path, {"model": "both", **body}).json()["error"]
        assert (error["param"], "use one of its models: small, large" in error["message"]) == ("model", True)
    assert "'both'" in server.post("/v1/completions", {"model": "x", "prompt": "a"}).json()["error"]["message"]


def test_the_page_can_choose_it(chromium: Any, server: Running) -> None:
    for page in opened(chromium, server):
        page.wait_for_selector("#status[data-state=ready]")
        page.select_option("#models", "never")
        send_message(page, "The mill")
        assert "answered by large" in page.locator(".figures").inner_text()
        first = shown(page)
        page.click("[aria-pressed]")  # its tokens are those of the model that answered
        page.wait_for_selector(".token")
        assert page.locator(".token").count() == 8
        page.click("[aria-pressed]")
        assert shown(page) == first


FILE = """
[[models]]
model = "MODEL"
name = "small"
[[models]]
model = "OTHER"
name = "large"
[[cascades]]
name = "auto"
tiers = ["small", "large"]
"""


def served(monkeypatch: pytest.MonkeyPatch, file: Path, text: str, files: dict[str, Path]) -> tuple[int, list[Any]]:
    calls: list[Any] = []
    monkeypatch.setattr(command, "_run", lambda *arguments: calls.append(arguments) or 0)
    file.write_text(text.replace("MODEL", str(files["small"])).replace("OTHER", str(files["large"])))
    return main(["serve", "--config", str(file)]), calls


def calibrated(threshold: float | None, score: str = "mean", **more: Any) -> str:
    made = {"threshold": threshold, "delta": 0.05, "epsilon": 0.05, "n": 250}
    return json.dumps({"score": score, "calibration": made, **more})


def test_a_file_of_settings_has_cascades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    told = tmp_path / "told.json"
    told.write_text(calibrated(0.62, models=["s.gguf", "l.gguf"]))
    expected = {
        'threshold = 0.4\nscore = "low"': CascadeSettings("auto", ("small", "large"), (0.4,), "low"),
        "threshold = [1]": CascadeSettings("auto", ("small", "large"), (1.0,)),
        f'calibration = "{told}"': CascadeSettings(
            "auto",
            ("small", "large"),
            (0.62,),
            "mean",
            f"loses at most 0.05 with probability 0.95, on inputs like the 250 of {told} and of s.gguf before l.gguf",
        ),
    }
    for lines, right in expected.items():
        code, ((*_, cascades, _),) = served(monkeypatch, tmp_path / "a.toml", FILE + lines, files)
        assert (code, cascades) == (0, [right])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "needs either threshold or calibration"),
        ({"threshold": 0.5, "calibration": "x"}, "needs either threshold or calibration"),
        ({"threshold": 1.5}, "a threshold from 0 to 1 for each tier but the last"),
        ({"threshold": [0.5, 0.5]}, "a threshold from 0 to 1 for each tier but the last"),
        ({"threshold": float("nan")}, "a threshold from 0 to 1 for each tier but the last"),
        ({"threshold": 10**400}, "a threshold from 0 to 1 for each tier but the last"),
        ({"threshold": "high"}, "threshold is a number"),
        ({"threshold": True}, "threshold is a number"),
        ({"threshold": 0.5, "score": "vote"}, "the score is min, mean, low, not 'vote'"),
        ({"threshold": 0.5, "tiers": ["small"]}, "two or more different models"),
        ({"threshold": 0.5, "tiers": ["small", "small"]}, "two or more different models"),
        ({"threshold": 0.5, "tiers": "small"}, "tiers is a list"),
        ({"threshold": 0.5, "name": "small"}, "a unique name"),
        ({"threshold": 0.5, "delta": 1}, "there is no setting 'delta'"),
        ({"calibration": "nowhere.json"}, "nowhere.json is not what bench cascade --json writes"),
        ({"calibration": "NONE"}, "found no threshold"),
        ({"calibration": "HUGE"}, "a threshold from 0 to 1 for each tier but the last"),
        ({"calibration": "DEEP"}, "is not what bench cascade --json writes"),
        ({"calibration": "MEAN", "score": "min"}, "was calibrated with the score 'mean', not 'min'"),
        ({"calibration": ["MEAN", "MIN"]}, r"its files were calibrated with different scores \(mean, min\); use one"),
    ],
)
def test_an_invalid_table_is_a_one_line_error(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    for name, threshold in (("NONE", None), ("MEAN", 0.5), ("MIN", 0.5)):
        (tmp_path / name).write_text(calibrated(threshold, "min" if name == "MIN" else "mean"))
    (tmp_path / "HUGE").write_text(calibrated(10**400))
    (tmp_path / "DEEP").write_text("[" * 100_000)
    if isinstance(named := change.get("calibration", []), str):
        named = [named]
    if there := [str(tmp_path / name) for name in named if (tmp_path / name).exists()]:
        change = {**change, "calibration": there}
    with pytest.raises(SettingsError, match=says):
        read_cascade({"name": "auto", "tiers": ["small", "large"], **change})


def test_a_cascade_names_models_that_are_served(files: dict[str, Path]) -> None:
    settings, chosen = ServerSettings("small", port=0), [ModelSpec("small", str(files["small"]), ENGINE)]
    with pytest.raises(SettingsError, match="names 'large'; choose from small"):
        open_models(chosen, settings, None, [CascadeSettings("auto", ("small", "large"), (0.5,))])
    twice = CascadeSettings("small", ("a", "b"), (0.5,))
    with pytest.raises(SettingsError, match="two models have one name"):
        open_models(chosen, settings, None, [twice])
