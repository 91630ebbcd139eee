"""Mixed traffic for a while: clients that leave, mistakes of every class, bodies that are too large, slow readers, attacks.

`make test` runs it for a few seconds on a tiny model, with every mistake and attack once. `make soak` runs it for 20 minutes
(SOAK_SECONDS) on the default model and on tiny ones of every kind, and `make test-slow` also for 45 seconds on a tiny model.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from tests.server.harness import ENGINE, Running
from tests.server.soak import Memory, Soak, clients
from tests.server.soak_models import every_kind
from tests.tiny_files import write_tiny_gguf

SHORT, MIDDLE, LONG = 9.0, 45.0, float(os.environ.get("SOAK_SECONDS", "1200"))  # seconds
PAUSE = 0.5  # seconds
SURE = 0.02  # a probability that the smaller of two tiny models reaches now and then
# A small KV pool: all of it has been used by the end of the warm-up, and requests are preempted.
REAL = {**ENGINE, "dtype": "auto", "backend": "auto", "kv_cache_memory": "48MiB"}


def one_model(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A model, and requests with the texts that offline generation gives: fields of a Soak."""
    llm = LLM(model, **settings)
    params = [
        llm.default_params(temperature=0.0, max_tokens=12 + 7 * n)
        if n % 2
        else llm.default_params(temperature=0.9, top_p=0.95, seed=n, max_tokens=40)
        for n in range(12)
    ]
    prompts = [f"The mill {'by the stream ' * n}stands" for n in range(12)]
    if "cascade" in settings:  # a smaller model writes some of the tokens of a third of them
        params = [one.replace(cascade_threshold=SURE) if n % 3 == 2 else one for n, one in enumerate(params)]
    texts = [llm.generate(prompt, one)[0].outputs[0].text for prompt, one in zip(prompts, params, strict=True)]
    llm.close()
    bodies = [
        {"model": "tiny", "prompt": prompt, "temperature": one.temperature, "top_p": one.top_p, "max_tokens": one.max_tokens}
        | {name: value for name in ("seed", "cascade_threshold") if (value := getattr(one, name)) is not None}
        for prompt, one in zip(prompts, params, strict=True)
    ]
    jobs = [
        {"kind": "plain", "path": "/v1/completions", "body": body, "says": text}
        for body, text in zip(bodies, texts, strict=True)
    ]
    return {"models": [("tiny", str(model), settings)], "jobs": jobs}


def soak(seconds: float, warm_up: float, **given: Any) -> None:
    report = Soak(seconds=seconds, warm_up=warm_up, tidy=True, **given).in_a_process()
    seen, processes = report.pop("memory"), report.pop("processes")
    print(json.dumps(report, indent=1))
    for name, looks in zip(processes, zip(*seen, strict=True), strict=True):
        print(f"MiB of {name}:", *(f"{one:.0f}" for one in looks))
    assert report["wrong"] == []


@pytest.mark.first
@pytest.mark.parametrize(
    ("seconds", "least", "again"), [(SHORT, 60, False), pytest.param(MIDDLE, 150, True, marks=pytest.mark.slow)]
)
def test_a_short_soak(tiny: Path, tmp_path: Path, seconds: float, least: int, again: bool) -> None:
    smaller = write_tiny_gguf(tmp_path / "smaller.gguf", layers=1, seed=3)
    models = one_model(tiny, {**ENGINE, "cascade": str(smaller)})
    soak(seconds, seconds / 3, pause=PAUSE, least=least, again=again, **models)


@pytest.mark.slow
@pytest.mark.weights
def test_a_long_soak(default_model: Path) -> None:
    soak(LONG, min(180.0, LONG / 3), **one_model(default_model, REAL))


@pytest.mark.slow
def test_a_long_soak_of_every_kind(tmp_path: Path) -> None:
    """Tokens that leave, both kinds of cascades, an encoder-decoder, classes."""
    soak(LONG, min(180.0, LONG / 3), **every_kind(tmp_path))


def test_the_clients_report_wrong_answers(tiny: Path) -> None:
    """The control: with answers that are not the offline ones, and health that is not true, the report says so."""
    body = {"model": "tiny", "prompt": "The mill", "max_tokens": 4, "temperature": 0}
    expected = [{"kind": "plain", "path": "/v1/completions", "body": body, "says": "something else"}]
    with Running(tiny) as server:
        timing = {"seconds": 1.0, "least": 60, "pause": 0.0, "all": False}
        spec = {"seed": 3, **timing, "jobs": expected, "writers": [{"model": "tiny"}]}
        report = clients(server, spec, 1.0, lambda: None)
        assert {line.split(":")[0] for line in report["wrong"]} == {"another answer", "another stream"}
        server.on_loop(lambda: setattr(server.llm.replica.supervision, "state", "stuck"))
        report = clients(server, spec, 1.0, lambda: None)
        assert any(line.startswith("health: 503") for line in report["wrong"])


def test_growing_memory_is_reported() -> None:
    """The control: what comes and goes is no growth, what stays is."""
    steady = [[100.0 + 40 * (n % 3), 200.0] for n in range(30)]
    processes = {"web": 1, "tiny": 2}
    assert Memory(processes, steady).grown() == []
    leaking = [[web + n, engine] for n, (web, engine) in enumerate(steady)]
    assert Memory(processes, leaking).grown() == ["the memory of the web process grew from 142.5 to 166.5 MiB"]


def test_inconsistent_block_counts_are_reported(offline: LLM) -> None:
    """The control of `check`: a block that nobody holds and that is not free."""
    from headrace.server.engines.engine_process import EngineLoop

    loop = EngineLoop(offline, channel=None, beat=1.0)  # type: ignore[arg-type]
    assert loop._problem() == ""
    free = offline.engine.blocks.pool._free
    lost = free.pop()
    assert loop._problem() == "idle and held blocks do not add up"
    free.append(lost)
    assert loop._problem() == ""
    loop._open["x"] = None  # type: ignore[assignment]
    assert loop._problem() == "1 requests are open and nothing runs"
