"""Mixed traffic for a while: clients that leave, mistakes of every class, bodies that are too large, slow readers, attacks.

Here for a minute on a tiny model, with pauses, as other tests run beside it; `make soak` runs it for 20 minutes on the default
model, as fast as it goes (SOAK_SECONDS: for how long).
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from tests.server.harness import ENGINE, Running
from tests.server.soak import Memory, Soak, clients
from tests.tiny_files import write_tiny_gguf

SHORT, LONG = 45.0, float(os.environ.get("SOAK_SECONDS", "1200"))  # seconds
PAUSE = 0.5  # seconds
SURE = 0.02  # a probability that the smaller of two tiny models reaches now and then
# A small KV pool: all of it has been used by the end of the warm-up, and requests are preempted.
REAL = {**ENGINE, "dtype": "auto", "backend": "auto", "kv_cache_memory": "48MiB"}


def jobs(model: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Requests with the texts that offline generation gives."""
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
    return [{"body": body, "text": text} for body, text in zip(bodies, texts, strict=True)]


def soak(model: Path, settings: dict[str, Any], seconds: float, warm_up: float, **more: Any) -> None:
    report = Soak(str(model), settings, jobs(model, settings), seconds, warm_up, **more).in_a_process()
    seen = report.pop("memory")
    print(json.dumps(report, indent=1))
    print("MiB of the web process, of the engine:", *(f"{web:.0f},{engine:.0f}" for web, engine in seen))
    assert report["wrong"] == []


@pytest.mark.first
def test_a_short_soak(tiny: Path, tmp_path: Path) -> None:
    smaller = write_tiny_gguf(tmp_path / "smaller.gguf", layers=1, seed=3)
    soak(tiny, {**ENGINE, "cascade": str(smaller)}, SHORT, SHORT / 3, pause=PAUSE, tidy=True)


@pytest.mark.slow
@pytest.mark.weights
def test_a_long_soak(default_model: Path) -> None:
    soak(default_model, REAL, LONG, min(180.0, LONG / 3), tidy=True)


def test_the_clients_notice_what_is_wrong(tiny: Path) -> None:
    """The control: with answers that are not the offline ones, and health that is not true, the report says so."""
    expected = [{"body": {"model": "tiny", "prompt": "The mill", "max_tokens": 4, "temperature": 0}, "text": "something else"}]
    with Running(tiny) as server:
        spec = {"seed": 3, "seconds": 1.0, "least": 60, "jobs": expected, "pause": 0.0}
        report = clients(server, spec, 1.0, lambda: None)
        assert {line.split(":")[0] for line in report["wrong"]} == {"another answer", "another stream"}
        server.on_loop(lambda: setattr(server.llm.replica.supervision, "state", "stuck"))
        report = clients(server, spec, 1.0, lambda: None)
        assert any(line.startswith("health: 503") for line in report["wrong"])


def test_memory_that_grows_is_told() -> None:
    """The control: what comes and goes is no growth, what stays is."""
    steady = [[100.0 + 40 * (n % 3), 200.0] for n in range(30)]
    assert Memory([], steady).grown() == []
    leaking = [[web + n, engine] for n, (web, engine) in enumerate(steady)]
    assert Memory([], leaking).grown() == ["the memory of the web process grew from 142.5 to 166.5 MiB"]


def test_books_that_are_out_of_order_are_told(offline: LLM) -> None:
    """The control of `check`: a block that nobody holds and that is not free."""
    from headrace.server.engine_process import EngineLoop

    loop = EngineLoop(offline, channel=None, beat=1.0)  # type: ignore[arg-type]
    assert loop._problem() == ""
    free = offline.engine.blocks.pool._free
    lost = free.pop()
    assert loop._problem() == "idle and held blocks do not add up"
    free.append(lost)
    assert loop._problem() == ""
    loop._open["x"] = None  # type: ignore[assignment]
    assert loop._problem() == "1 requests are open and nothing runs"
