"""Choosing a part of a model that drafts for it: what is measured, what is searched, what is kept."""

from pathlib import Path

import pytest

from headrace import selfdraft
from headrace.kv.pool import KVPool
from headrace.params import SamplingParams
from headrace.runner.parts import ATTENTION, MLP, Part
from headrace.runner.runner import TorchRunner
from headrace.selfdraft import Rated, Trial, search
from tests.tiny import run_alone, tiny_config, tiny_model


@pytest.fixture
def trial() -> Trial:
    model = tiny_model(tiny_config(num_layers=3))
    prompt = [5, 6, 7, 8]
    text = [*prompt, *run_alone(model, prompt, SamplingParams(temperature=0.0, max_tokens=24))]
    return Trial(TorchRunner(model, KVPool(model.config, 16, 16)), [(text, 4)], 16, 3)


def test_the_whole_model_agrees_with_itself_and_a_part_does_not(trial: Trial) -> None:
    assert trial.rate(Part()).alpha == 1.0
    assert trial.rate(Part(layers=3)).alpha == 1.0
    assert trial.rate(Part(layers=1)).alpha < 1.0
    assert trial.rate(Part(skips=(0, ATTENTION | MLP))).alpha < 1.0


def test_the_search_finds_what_pays(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement as if attention of layer 1 and the MLP of layer 2 did nothing, and costs by what is left out."""
    free = {(1, ATTENTION), (2, MLP)}

    def rate(part: Part, repeats: int = 5) -> Rated:
        out = {(layer, bit) for layer in range(3) for bit in (ATTENTION, MLP) if part.skip(layer) & bit}
        alpha = 0.5 if part.layers else 0.98 - 0.3 * len(out - free)
        return trial._judge(part, max(alpha, 0.05), max(1.0 - 0.3 * len(out), 0.4))

    trial.verify = [1.0, 1.05, 1.1, 1.15, 1.2, 1.25]
    monkeypatch.setattr(trial, "rate", rate)
    best = search(trial, 3600)
    assert best.part == Part(skips=(0, ATTENTION, MLP))
    assert best.speedup > 1.3


def test_a_choice_is_kept_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    part = Part(skips=(0, 3, 1))
    kept = selfdraft.save(one, part)
    assert selfdraft.load(one) == part
    with pytest.raises(ValueError, match=r"run: headrace bench self-draft .*other\.gguf"):
        selfdraft.load(other)
    kept.write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        selfdraft.load(one)
