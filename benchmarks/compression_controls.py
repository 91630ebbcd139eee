"""Each method of compression next to its control and next to itself switched off, on several pairs of texts.

Methods: `rtn` reads no text; `weighted` searches the same scales with the importance of inputs (rtn --calibrate) and is the
control of both `awq` and `gptq`, which are `weighted` if switched off. Prints nats lost on each text to judge by, with the
standard error over windows, and the difference from `weighted` on the same windows.

    python -m benchmarks.compression_controls MODEL -f int3-g64 --calibrate a.txt --judge b.txt c.txt --methods rtn weighted awq
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from headrace.compress.base import Compressor, apply_methods
from headrace.compress.folding import AWQ
from headrace.compress.grids.targets import nearest, target
from headrace.compress.layer_pass import LayerPass
from headrace.compress.rounding import Rounding
from headrace.compress.texts import Texts, check_apart, draw_texts, passage_hashes
from headrace.compress.work_folder import WorkFolder
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.models.layers import Linear
from headrace.startup.opening import open_files
from headrace.training.sequence_forward import run_sequence
from headrace.weights.loader import load_model
from headrace.weights.source import WeightSource

WINDOW, SCORED = 512, 448
STEPS: dict[str, list[Compressor]] = {
    "weighted": [Rounding(False)],
    "awq": [AWQ(), Rounding(False)],
    "gptq": [Rounding(True)],
    "awq,gptq": [AWQ(), Rounding(True)],
}


def compressed(source: WeightSource, method: str, format: str, texts: Texts) -> Model:
    """The model with all matrices of its layers rounded, in memory."""
    model = load_model(source)
    holders = dict(model.holders())
    linears = {name: one for name, one in holders.items() if isinstance(one, Linear) and name.startswith("layers.")}
    if method == "rtn":
        for linear in linears.values():
            for part in linear.weight.split(linear.sizes):
                part.copy_(nearest(part, target(format), None, 1)[1])
        return model
    kinds = {
        ".".join(filter(None, (name, part, "weight"))): format for name, linear in linears.items() for part, _ in linear.parts
    }
    with TemporaryDirectory() as folder:
        for visit in LayerPass(source, texts, WorkFolder(Path(folder)), kinds):
            apply_methods(visit, STEPS[method])
            if not visit.outputs:
                raise ValueError(f"layer {visit.number}: no matrix was rounded")
            for name, holder in visit.holders.items():
                for field in holder.params():
                    getattr(holders[f"layers.{visit.number}.{name}"], field).copy_(getattr(holder, field))
    return model


@torch.inference_mode()
def losses(model: Model, texts: Texts) -> np.ndarray:
    """Mean negative log-likelihood of the last SCORED tokens of each window, in nats."""
    means = []
    for text in texts:
        log_p = model.head(run_sequence(model, text).rows[-SCORED - 1 : -1]).log_softmax(-1)
        means.append(-float(log_p.gather(1, torch.tensor(text[-SCORED:])[:, None]).mean()))
    return np.array(means)


def interval(values: np.ndarray) -> str:
    """Mean ± standard error."""
    return f"{values.mean():.4f} ± {values.std(ddof=1) / len(values) ** 0.5:.4f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-f", "--format", default="int4-g32")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--judge", type=Path, nargs="+", required=True)
    parser.add_argument("--methods", nargs="+", default=["rtn", *STEPS], choices=["rtn", *STEPS])
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--windows", type=int, default=8, help="windows of each text to judge by")
    parser.add_argument("--seed", type=int, default=0, help="of the calibration texts")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    opened, silent = open_files(args.model), Progress()
    read = draw_texts(opened, str(args.calibrate), args.tokens, args.seed, silent)
    judged = {
        path: draw_texts(opened, str(path), args.windows * WINDOW, 0, silent, WINDOW, judging=True) for path in args.judge
    }
    for texts in judged.values():
        check_apart(passage_hashes(read), texts)
    model = load_model(opened.source)
    before = {path: losses(model, texts) for path, texts in judged.items()}
    del model
    control: dict[Path, np.ndarray] = {}
    for method in args.methods:
        start = time.process_time()
        model = compressed(opened.source, method, args.format, read)
        for path, texts in judged.items():
            lost = losses(model, texts) - before[path]
            line = f"{args.format} {method}, {args.calibrate.stem} -> {path.stem}: "
            line += f"lost {interval(lost)} of {before[path].mean():.3f}"
            if method == "weighted":
                control[path] = lost
            elif path in control:
                line += f"; less weighted {interval(lost - control[path])}"
            print(f"{line}; {time.process_time() - start:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
