"""Three real models and memory for two: 200 random requests have the texts of each model alone, and nothing is left over."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace import host
from headrace.llm import LLM
from headrace.server.serving import ModelSpec, open_models, plan_bytes
from headrace.server.settings import Mode, ServerSettings
from tests.places import model_file
from tests.server.harness import PATIENT, Running, until

pytestmark = [pytest.mark.slow, pytest.mark.weights]

FILES = {
    "smol": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen-0.5b": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "qwen-1.5b": "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
}
SETTINGS: dict[str, Any] = {"kv_cache_memory": "256MiB", "max_model_len": 1024, "backend": "native", "device": "cpu"}
PROMPTS = ["The mill stands by", "def mean(values):", "A river is", "# Sort a list\n"]
REQUESTS, CLIENTS, TOKENS = 200, 16, 8


def sampling(number: int) -> dict[str, Any]:
    """Greedy, or drawn with a seed."""
    return {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": number}


def test_two_hundred_requests_over_three_models(record_property: Any) -> None:
    files = {name: str(model_file(file)) for name, file in FILES.items()}
    expected = {name: texts_alone(file) for name, file in files.items()}
    plans = {name: plan_bytes(file, SETTINGS, 1 << 40).total for name, file in files.items()}
    settings = ServerSettings("smol", port=0, limits=PATIENT)
    chosen = [
        ModelSpec(name, file, SETTINGS, preload=False, mode=Mode.PINNED if name == "smol" else None)
        for name, file in files.items()
    ]
    budget = plans["smol"] + plans["qwen-1.5b"] + plans["qwen-0.5b"] // 2
    with Running.of(open_models(chosen, settings, budget), settings) as server:
        until(lambda: server.health()["status"] == "ready")
        drawn = random.Random(36)
        asked = [(drawn.choice(list(files)), drawn.randrange(len(PROMPTS)), drawn.randrange(2)) for _ in range(REQUESTS)]
        texts = [expected[name][prompt, how] for name, prompt, how in asked]
        begun = time.monotonic()
        assert answer_all(server.openai, asked) == texts
        seconds = time.monotonic() - begun
        # By now the K/V of the pinned model has touched its memory.
        before = held_alone(server)
        assert answer_all(server.openai, asked) == texts
        after = held_alone(server)
        figures = {"seconds": seconds, "before": before, "after": after, "loads": server.figure("model_load_seconds_count")}
        print(figures)
        record_property("figures", str(figures))
        # This process also has the clients and has had the models alone, so only the engine's memory is judged.
        assert after[1] <= before[1] * 1.05, "memory is left over"
    assert not children()


def texts_alone(file: str) -> dict[tuple[int, int], str]:
    made = {}
    with LLM(file, preset="online", **SETTINGS) as llm:
        for how in range(2):
            params = llm.default_params(max_tokens=TOKENS, top_p=1.0, top_k=0, repetition_penalty=1.0, **sampling(how))
            for number, prompt in enumerate(PROMPTS):
                (output,) = llm.generate(prompt, params)
                made[number, how] = output.outputs[0].text
    return made


def answer_all(client: openai.OpenAI, asked: list[tuple[str, int, int]]) -> list[str]:
    def ask(one: tuple[str, int, int]) -> str:
        name, prompt, how = one
        more = {"top_k": 0, "repetition_penalty": 1.0}
        made = client.completions.create(
            model=name, prompt=PROMPTS[prompt], max_tokens=TOKENS, top_p=1.0, extra_body=more, **sampling(how)
        )
        return str(made.choices[0].text)

    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(ask, asked))


def held_alone(server: Running) -> tuple[int, int]:
    """Resident bytes of this process and of the pinned engine, when all other models are unloaded."""
    for name in ("qwen-0.5b", "qwen-1.5b"):
        assert server.post("/models/unload", {"model": name}).json()["state"] == "unloaded"
    pids = children()
    assert len(pids) == 1, "only the pinned model has a process"
    return host.held_memory(os.getpid()), host.held_memory(pids[0])


def children() -> list[int]:
    """Engine processes of this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == os.getpid() and b"engine_process" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
