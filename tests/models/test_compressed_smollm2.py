"""What compressing SmolLM2 loses on wikitext-2, as likelihood: its file has 4 bits already, so orders of methods, no sizes."""

from functools import cache
from pathlib import Path

import pytest

from headrace.compress.base import Compressor
from headrace.compress.folding import AWQ
from headrace.compress.grids.keep import parse_sparsity
from headrace.compress.rounding import Rounding
from headrace.compress.texts import draw_texts
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.startup.opening import Opened, open_files
from headrace.weights.loader import load_model
from tests.models.lossy import likelihood, predictions, rounded, walked
from tests.places import data_path, model_file

pytestmark = [pytest.mark.weights, pytest.mark.slow]

MEASURED = 6144  # tokens: four for each of the 1,536 inputs of the widest matrix
WINDOWS, WINDOW, SCORED = 23, 512, 448  # 10,304 tokens count
TRAIN = 900_000  # bytes of the text to measure on; the others are to judge by


class SmolLM2:
    """The open file, texts, and what methods lose; each is made once. Only rtn searches scales without importance; weighted is
    the control of awq and gptq, which search them with it."""

    def __init__(self, folder: Path) -> None:
        self.opened: Opened = open_files(model_file("SmolLM2-135M-Instruct.Q4_1.gguf"))
        whole = data_path("wikitext2/valid.txt").read_bytes()
        train, rest = folder / "train.txt", folder / "rest.txt"
        train.write_text(whole[:TRAIN].decode(errors="ignore"))
        rest.write_text(whole[TRAIN:].decode(errors="ignore"))
        self.read = draw_texts(self.opened, str(train), MEASURED, 0, Progress())
        self.judged = draw_texts(self.opened, str(rest), WINDOWS * WINDOW, 0, Progress(), WINDOW, judging=True)
        self.before = self.cost(load_model(self.opened.source))
        self.lost = cache(self._lost)

    def cost(self, model: Model) -> float:
        """Nats a token."""
        found = [likelihood(predictions(model, text, SCORED), text).mean().item() for text in self.judged]
        return -sum(found) / len(found)

    def _lost(self, method: str, format: str, sparsity: str = "") -> float:
        source = self.opened.source
        if method in ("rtn", "magnitude"):
            model = rounded(source, format, sparsity or None)
        else:
            prune = (method, parse_sparsity(sparsity)) if sparsity else None
            steps: list[Compressor] = [Rounding(method == "gptq", prune=prune)]
            model = walked(source, self.read, [AWQ(), *steps] if method == "awq" else steps, format).model
        lost = self.cost(model) - self.before
        print(f"{method} {format} {sparsity}: {lost:.4f} of {self.before:.4f}", flush=True)
        return lost


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> SmolLM2:
    return SmolLM2(tmp_path_factory.mktemp("wikitext2"))


def test_four_bits(smollm2: SmolLM2) -> None:
    assert len(smollm2.judged) == WINDOWS
    weighted = smollm2.lost("weighted", "int4-g32")
    assert weighted <= 0.6 * smollm2.lost("rtn", "int4-g32")
    assert smollm2.lost("gptq", "int4-g32") <= 1.3 * weighted  # no better than its control


def test_three_bits(smollm2: SmolLM2) -> None:
    weighted = smollm2.lost("weighted", "int3-g64")
    assert weighted <= 0.6 * smollm2.lost("rtn", "int3-g64")
    assert smollm2.lost("gptq", "int3-g64") <= 0.85 * weighted
    assert smollm2.lost("awq", "int3-g64") <= 1.15 * weighted  # no better than its control


def test_two_of_four(smollm2: SmolLM2) -> None:
    wanda = smollm2.lost("wanda", "Q8_0", "2:4")
    assert smollm2.lost("sparsegpt", "Q8_0", "2:4") <= 0.85 * wanda
    assert wanda <= 0.6 * smollm2.lost("magnitude", "Q8_0", "2:4")


def test_rounding_to_the_stored_kind_loses_nothing(smollm2: SmolLM2) -> None:
    """Fitted anew to the numbers that the file's blocks say."""
    assert abs(smollm2.lost("rtn", "Q4_1")) <= 0.001
