"""stories15M, a real model whose weights were never rounded: its texts, and what models made of it lose on them."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from torch.nn.functional import kl_div

from headrace.compress.stages import cut_model
from headrace.compress.structure import Cut
from headrace.compress.work_folder import WorkFolder
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.models.registry import read_config
from headrace.startup.opening import Opened
from headrace.weights.loader import load_model
from tests.models.llama2c import read_checkpoint
from tests.models.lossy import likelihood, predictions
from tests.models.zoo import MemorySource
from tests.places import model_file

TEXTS = Path(__file__).parents[1] / "data" / "stories15M.u16"  # what tools/sample_stories.py drew
COUNT, WINDOW = 128, 256
MEASURED = 12  # texts: four tokens for each of the 768 inputs of the widest matrix
JUDGED, SCORED = 12, 192  # other texts, and the tokens of each that count, its last


def read_source() -> MemorySource:
    return read_checkpoint(model_file("stories15M.bin"))


def texts(first: int, count: int) -> list[list[int]]:
    """Some of the texts, WINDOW tokens each."""
    every: list[list[int]] = np.fromfile(TEXTS, "<u2").reshape(COUNT, WINDOW).tolist()
    return every[first : first + count]


class Loss(NamedTuple):
    """Means over tokens, in nats: KL(original ‖ model) of the next one, and how much less likely the model finds it."""

    kl: float
    nll: float


class Judge:
    """What the original foretells of some texts, to hold models to."""

    def __init__(self, original: Model, judged: Sequence[list[int]]) -> None:
        self.texts = judged
        self.truth = [predictions(original, text, SCORED) for text in judged]

    def lost(self, model: Model) -> Loss:
        kl = nll = 0.0
        for text, truth in zip(self.texts, self.truth, strict=True):
            made = predictions(model, text, SCORED)
            kl += kl_div(made, truth, reduction="sum", log_target=True).item()
            nll += (likelihood(truth, text) - likelihood(made, text)).sum().item()
        count = SCORED * len(self.texts)
        return Loss(kl / count, nll / count)


def cut(source: MemorySource, wanted: Cut) -> Model:
    """Made smaller, as the file that holds it."""
    opened = Opened("stories15M", source.path, source, read_config(source))  # type: ignore[arg-type]  # it is in memory
    with TemporaryDirectory() as folder:
        work = WorkFolder(Path(folder) / "work")
        work.begin({})
        left = cut_model(opened, [wanted], work, texts(0, MEASURED), Progress(), 1, vocabulary=False)
        model = load_model(left.opened.source)
        left.opened.source.close()
    return model
