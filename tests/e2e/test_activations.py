"""activations: a scale per row, or with outliers kept, natively and in torch; refused if nothing is rounded."""

from pathlib import Path

import numpy as np
import pytest

from headrace import core
from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.startup.opening import open_files
from headrace.weights.schemes.compressed_tensors import activations_of
from tests.models.gates import program_of
from tests.models.test_compress import write_folder
from tests.tiny_native import Feeder

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1)
TEXTS = [[5, 6, 7, 8, 9, 300, 11, 4], [3, 399], [12, 13, 14]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("activations")
    compress(write_folder(at / "whole", "llama-gqa"), at / "w8a8", Pipeline(format="w8a8", threads=1))
    return at / "w8a8"


@pytest.mark.skipif(not core.available(), reason=core.reason())
def test_a_model_with_one_scale_for_a_token(folder: Path) -> None:
    """Another model than with a scale for 32 inputs, near it; each text as alone; without outliers, and without a threshold,
    the plain one to the bit."""
    source = open_files(folder).source

    def logits(texts: list[list[int]], **options: object) -> list[np.ndarray]:
        return Feeder(program_of(source, **options), texts).whole()

    plain, token = logits(TEXTS), logits(TEXTS, activations="token")
    split, zero = logits(TEXTS, activations="split"), logits(TEXTS, activations="split", threshold=0.0)
    endless = logits(TEXTS, activations="split", threshold=float("inf"))
    spread = float(np.std(np.concatenate(plain)))
    for one, other, out, all_out, none in zip(plain, token, split, zero, endless, strict=True):
        assert np.array_equal(one.view(np.uint32), none.view(np.uint32))
        for apart in (other - one, out - one, all_out - one):
            assert 0 <= np.abs(apart).max() < 0.5 * spread
        assert np.abs(other - one).max() > 0
        assert np.abs(all_out - one).max() > 0
    for name in ("token", "split"):
        whole = logits(TEXTS, activations=name)
        for number, text in enumerate(TEXTS):
            (alone,) = logits([text], activations=name)
            assert np.array_equal(alone.view(np.uint32), whole[number].view(np.uint32))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_w8a8_folder_rounds_activations_by_token(backend: str, folder: Path, tmp_path: Path) -> None:
    """auto is token where config.json says so, and only there; group is what auto is elsewhere."""
    if backend == "native" and not core.available():
        pytest.skip(core.reason())
    compress(write_folder(tmp_path / "whole", "llama-gqa"), tmp_path / "int8", Pipeline(format="int8", threads=1))

    def first(path: Path, activations: str) -> list[float]:
        llm = LLM(str(path), backend=backend, activations=activations, max_model_len=64)
        found = llm.generate([TEXTS[0]], GREEDY)[0].outputs[0].logprobs
        assert found is not None
        assert bool(llm.opened.rounding_summary(activations)) == (path == folder and activations == "auto")
        return [one.logprob for one in found]

    auto, token, group = (first(folder, name) for name in ("auto", "token", "group"))
    assert auto == token != group
    plain = first(tmp_path / "int8", "auto")
    assert plain != first(tmp_path / "int8", "token")
    assert (plain == first(tmp_path / "int8", "group")) == (backend == "native")  # torch's auto rounds nothing


def test_config_settings_select_the_activation_rounding() -> None:
    """Only int8 by token; a scale that is fixed beforehand, floats and nothing are left to the engine."""
    token = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    for asked, found in (
        (token, "token"),
        ({**token, "type": "float"}, "auto"),
        ({**token, "strategy": "tensor"}, "auto"),
        ({**token, "num_bits": 4}, "auto"),
        (None, "auto"),
    ):
        assert activations_of({"config_groups": {"group_0": {"input_activations": asked}}}) == found
    assert activations_of({"config_groups": ["damaged"]}) == activations_of({}) == "auto"


@pytest.mark.parametrize("activations", ["token", "split", "group"])
def test_both_back_ends(activations: str, folder: Path) -> None:
    """Near each other: of what is drawn the log-probabilities."""
    found = []
    for backend in ("native", "torch") if core.available() else ("torch",):
        llm = LLM(str(folder), backend=backend, dtype="auto" if backend == "native" else "float32", activations=activations,
                  max_model_len=64)  # fmt: skip
        output = llm.generate([TEXTS[0]], GREEDY)[0].outputs[0]
        assert output.logprobs is not None
        found.append(output.logprobs[0].logprob)
    assert max(found) - min(found) < 0.05


def test_invalid_activations_are_a_one_line_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="activations must be auto, group, token, split, tensor, not 'row'"):
        LLM(str(folder), activations="row")
    plain = write_folder(tmp_path / "plain", "llama-gqa")
    with pytest.raises(ValueError, match="rounds the inputs of integer weights, and .*plain has floats alone: leave"):
        LLM(str(plain), activations="token")
    if core.available():
        LLM(str(plain), activations="token", quantize="int8", max_model_len=64)
