"""Writes tests/data/stories15M.u16: texts that stories15M wrote, drawn at temperature 1 from BOS, as uint16 tokens one after
the other.

    python tools/sample_stories.py [OUT]        stories15M.bin lies in HEADRACE_TEST_MODELS
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np

from headrace.data.params import SamplingParams
from headrace.weights.loader import load_model
from tests.models.stories import COUNT, TEXTS, WINDOW, read_source
from tests.tiny import tiny_engine

BOS, BLOCK, TOGETHER = 1, 16, 32
SEED = 0


def main(out: Path) -> None:
    model = load_model(read_source())
    made: list[list[int]] = []
    for first in range(0, COUNT, TOGETHER):
        engine = tiny_engine(model, budget=2 * WINDOW, blocks=2 * TOGETHER * WINDOW // BLOCK, block_size=BLOCK, seqs=TOGETHER)
        requests = [
            engine.add([BOS], SamplingParams(temperature=1.0, seed=SEED + at, max_tokens=WINDOW - 1, ignore_eos=True))
            for at in range(first, first + TOGETHER)
        ]
        while engine.busy:
            engine.step()
        made += [[BOS, *request.finished[0].output] for request in requests]
        print(f"{len(made)} of {COUNT} texts", flush=True)
    np.array(made, "<u2").tofile(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TEXTS)
