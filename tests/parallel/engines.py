"""Engines of several processes in tests: small settings, outputs of all methods, and the processes that a test leaves."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM

PROMPTS = ["The mill by the river", "a b a b a b a b", "x" * 90]
JSON = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
METHODS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, max_tokens=20, seed=3),
    "several": SamplingParams(n=3, temperature=1.0, max_tokens=12, seed=5),
    "beams": BeamSearchParams(beam_width=3, n=2, max_tokens=12),
    "grammar": SamplingParams(structured_outputs=JSON, temperature=0.7, max_tokens=24, seed=2),
    "contrastive search": SamplingParams(penalty_alpha=0.6, top_k=4, max_tokens=10),
    "prompt scores": SamplingParams(prompt_logprobs=2, logprobs=2, temperature=0.0, max_tokens=4),
}
MARK = "HEADRACE_TEST_PROCESSES"  # an environment variable that the processes of a test inherit


def opened(model: Path, **settings: Any) -> LLM:
    small = {"backend": "native", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 24, "kv_cache_memory": "8MiB"}
    return LLM(model, **small | settings)


def everything(llm: LLM, prompts: Sequence[str] = PROMPTS) -> dict[str, Any]:
    """The outputs of all methods, which run together."""
    each = [(name, prompt, params) for name, params in METHODS.items() for prompt in prompts]
    outputs = llm.generate([prompt for _, prompt, _ in each], [params for *_, params in each])
    found = {}
    for (name, prompt, _), output in zip(each, outputs, strict=True):
        assert output.error is None, (name, output.error)
        scores = [one and one.logprob for one in output.prompt_logprobs or ()]
        found[f"{name} of {prompt}"] = [one.token_ids for one in output.outputs], scores
    found["embedding"] = [list(one.values) for one in llm.embed(prompts)]
    return found


def marked(value: str) -> list[int]:
    """Ids of the running processes, stopped ones included, whose environment has `value` for MARK."""
    wanted, found = f"{MARK}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:  # of another user, or just ended
            continue
    return found


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Every process that the test starts, and every process that these start, has ended soon after the test."""
    value = f"{os.getpid()} {request.node.name}"
    monkeypatch.setenv(MARK, value)
    yield value
    deadline = time.monotonic() + 10
    while marked(value) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(value) == []
