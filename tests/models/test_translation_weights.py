"""opus-mt-en-fr with its published weights: the native core beside torch in float32, the reference."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.recipe import BLOCK_SIZE
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM
from headrace.training.selfdraft import likeliest
from tests.places import model_file

pytestmark = pytest.mark.weights

GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
BEAMS = BeamSearchParams(beam_width=4, max_tokens=48, early_stopping=False)
TEXTS = (
    "A dog runs on the grass.",
    "The old mill by the river has been closed for ten years.",
    "Could you tell me where the nearest station is, please?",
    "Two women are selling fruit at the market.",
    "It was raining, so we stayed at home and read a book.",
    "The committee will decide on the budget next Thursday.",
    "He has never seen the sea.",
    "In 1969 the first people walked on the moon.",
    "She opened the door, looked around and smiled.",
    "Water boils at a lower temperature in the mountains.",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_file("opus-mt-en-fr")


def opened(folder: Path, backend: str, **settings: Any) -> LLM:
    """Its pool holds nothing that it was not asked for just now."""
    return LLM(
        folder, backend=backend, device="cpu", max_model_len=128, speculate=None, enable_prefix_caching=False, **settings
    )


@pytest.fixture(scope="module")
def torch(folder: Path) -> Iterator[LLM]:
    with opened(folder, "torch") as llm:
        yield llm


def chosen(llm: LLM, source: list[int], answer: list[int]) -> list[bool]:
    """Whether each token of an answer is the one that the model finds likeliest."""
    return likeliest(llm.runner, [llm.model_config.start, *answer], BLOCK_SIZE, source)


@pytest.mark.parametrize(("quantize", "share"), [(None, 0.98), ("int8", 0.97)])
def test_the_native_core_agrees_with_torch(folder: Path, torch: LLM, quantize: str | None, share: float) -> None:
    wanted = torch.generate(list(TEXTS), GREEDY)
    assert "herbe" in wanted[0].outputs[0].text
    with opened(folder, "native", quantize=quantize) as llm:
        answers = [(output.prompt_token_ids, output.outputs[0].token_ids) for output in wanted]
        same = [one for source, answer in answers for one in chosen(llm, source, answer)]
        shifted = [one for (source, _), (_, answer) in pairwise(answers) for one in chosen(llm, source, answer)]
    assert len(same) > 100
    assert sum(same) >= share * len(same)
    assert sum(shifted) < 0.7 * len(shifted), "what is written from another source is no less likely"


def test_beams_are_nearly_torchs(folder: Path, torch: LLM) -> None:
    wanted = torch.generate(list(TEXTS[:4]), BEAMS)
    with opened(folder, "native") as llm:
        made = llm.generate(list(TEXTS[:4]), BEAMS)
    for one, other in zip(made, wanted, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].score == pytest.approx(other.outputs[0].score, abs=0.02)
