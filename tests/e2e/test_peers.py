"""Each installed engine computes the same model as Headrace (`benchmarks.peers --install`)."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.peers.engines import ENGINES
from headrace.bench.competitors import OURS, load_competitors
from headrace.bench.interleave import Cell
from headrace.startup.loading import open_model
from tests.places import STORE

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of one hundred degrees",
    "Once upon a time there was a little girl who lived in a",
    "import numpy as",
    "1, 2, 3, 4, 5, 6,",
    "Monday, Tuesday, Wednesday, Thursday,",
)
AGREE = 4  # of the six: engines round weights and activations in their own ways (ONNX Runtime the output head to 4 bits)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.weights
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_predicts_the_same_first_tokens(name: str, default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first greedy token of every prompt with every setting, and both kinds of cells."""
    monkeypatch.setenv("HEADRACE_HOME", str(STORE.root.parent))
    engine = ENGINES[name]
    if not engine.installed:
        pytest.skip(f"{name} is not installed under {engine.folder} (python -m benchmarks.peers … --engines {name} --install)")
    encode = open_model(default_model).tokenizer.encode
    prompts = [encode(prompt) for prompt in PROMPTS]
    with ExitStack() as stack:
        competitors = load_competitors(stack, default_model, [engine], {}, {"threads": 1, "kv_bytes": 5e8}, print)
        assert competitors.left_out == {}
        assert [variant.engine for variant in competitors.variants] == [OURS, *[name] * len(engine.settings)]
        first = [
            [variant.worker.ask(cell="pp", prompts=[one], new_tokens=0)["first"][0] for one in prompts]
            for variant in competitors.variants
        ]
        for variant, theirs in zip(competitors.variants, first, strict=True):
            assert sum(mine == other for mine, other in zip(first[0], theirs, strict=True)) >= AGREE, variant.name
            decode = variant.worker.ask(cell="b2", prompts=Cell("b2", 2, 8, 3).prompts(1000, 0), new_tokens=3)
            assert decode["tokens"] == 6
            assert decode["tokens_per_s"] > 0
            json.dumps(decode)
