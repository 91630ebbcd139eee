"""Each method of compression next to its control and next to itself switched off, on several pairs of texts.

| method | control: the method switched off |
|---|---|
| `awq`, `gptq`, `awq,gptq` | `weighted`: the same search of scales with the importance of inputs (rtn --calibrate) |
| `gptq,true-sequential`, `gptq,damp` (`--damp`) | `gptq` without the option |
| `smoothquant` (`-f w8a8 --activations token`) | `weighted` with the same rounding of inputs |
| `smoothquant,auto` (alpha chosen in each layer) | `smoothquant` with the default alpha |
| `wanda` (`--sparsity`) | `magnitude`, which knows no inputs |
| `sparsegpt` (`--sparsity`) | `wanda`: a mask by the size of weights and inputs, without compensation |
| a method with a further `--sparsity` | the method with the first one |

`rtn` and `magnitude` read no text. Prints nats lost on each text to judge by, with the standard error over windows, and the
difference from the control on the same windows, if the control is in `--methods` before the method.

    python -m benchmarks.compression_controls MODEL -f int3-g64 --calibrate a.txt --judge b.txt c.txt --methods rtn weighted awq
    python -m benchmarks.compression_controls MODEL -f Q8_0 --sparsity 0.5 --calibrate a.txt --judge b.txt \\
        --methods magnitude wanda sparsegpt
    python -m benchmarks.compression_controls MODEL -f Q8_0 --sparsity 0.5 layer:0.5 global:0.5 --calibrate a.txt \\
        --judge b.txt --methods magnitude
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from headrace.backends.eager.rounded import round_inputs
from headrace.compress.base import Compressor, apply_methods
from headrace.compress.folding import AWQ, SmoothQuant
from headrace.compress.grids.keep import GLOBAL, Sparsity, parse_sparsity
from headrace.compress.grids.targets import nearest, target
from headrace.compress.layer_pass import LayerPass
from headrace.compress.least_squares import DAMPING
from headrace.compress.pruning import PruningSchedule
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
ROUNDS = ("weighted", "awq", "gptq", "awq,gptq", "gptq,true-sequential", "gptq,damp", "smoothquant", "smoothquant,auto")
PRUNES = ("magnitude", "wanda", "sparsegpt")
CONTROLS = {
    **dict.fromkeys(("awq", "gptq", "awq,gptq", "smoothquant"), "weighted"),
    **dict.fromkeys(("gptq,true-sequential", "gptq,damp"), "gptq"),
    "smoothquant,auto": "smoothquant",
    "wanda": "magnitude",
    "sparsegpt": "wanda",
}


def steps(method: str, damp: float) -> list[Compressor]:
    """The compressors of a method of ROUNDS. damp: of `gptq,damp`."""
    found: list[Compressor] = [AWQ()] if method.startswith("awq") else []
    if method.startswith("smoothquant"):
        found.append(SmoothQuant(None) if method.endswith("auto") else SmoothQuant())
    damping = damp if method == "gptq,damp" else DAMPING
    found.append(Rounding("gptq" in method, damping=damping, sequential=method == "gptq,true-sequential"))
    return found


@dataclass(frozen=True, slots=True)
class Setting:
    """What methods share: format of the matrices, share of zeros (of PRUNES), rounding of inputs (empty: none), and damping
    of `gptq,damp`."""

    format: str
    sparsity: Sparsity | None
    activations: str
    damp: float = DAMPING


def compressed(source: WeightSource, method: str, setting: Setting, texts: Texts) -> Model:
    """The model with all matrices of its layers rounded, in memory."""
    model = load_model(source)
    holders = dict(model.holders())
    linears = {name: one for name, one in holders.items() if isinstance(one, Linear) and name.startswith("layers.")}
    if method in ("rtn", "magnitude"):
        parts = [part for linear in linears.values() for part in linear.weight.split(linear.sizes)]
        if setting.sparsity is not None:
            PruningSchedule(setting.sparsity, rounds=1).prune([part.numpy() for part in parts], finished=1)
        for part in parts:
            part.copy_(nearest(part, target(setting.format), None, 1)[1])
    else:
        _pass_layers(source, holders, linears, method, setting, texts)
    if setting.activations:
        round_inputs(model, {name: (True,) * len(one.parts) for name, one in linears.items()}, setting.activations, {})
    return model


def _pass_layers(
    source: WeightSource,
    holders: dict[str, Any],
    linears: dict[str, Linear],
    method: str,
    setting: Setting,
    texts: Texts,
) -> None:
    """Change the weights of `holders` by a method that reads texts."""
    kinds = {
        ".".join(filter(None, (name, part, "weight"))): setting.format
        for name, linear in linears.items()
        for part, _ in linear.parts
    }
    pruned = [Rounding(False, prune=(method, setting.sparsity))] if setting.sparsity is not None else None
    found = pruned or steps(method, setting.damp)
    with TemporaryDirectory() as folder:
        for visit in LayerPass(source, texts, WorkFolder(Path(folder)), kinds):
            apply_methods(visit, found)
            if not visit.outputs:
                raise ValueError(f"layer {visit.number}: no matrix was rounded")
            for name, holder in visit.holders.items():
                for field in holder.params():
                    getattr(holders[f"layers.{visit.number}.{name}"], field).copy_(getattr(holder, field))


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
    parser.add_argument("--methods", nargs="+", default=["rtn", "weighted", "awq", "gptq"], choices=["rtn", *ROUNDS, *PRUNES])
    parser.add_argument(
        "--sparsity", nargs="+", type=parse_sparsity, default=[], help="zeros of magnitude, wanda and sparsegpt: 0.5, 2:4 …"
    )
    parser.add_argument("--damp", type=float, default=0.1, help="of gptq,damp")
    parser.add_argument("--activations", choices=["token", "group"], default="", help="round inputs to int8")
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--windows", type=int, default=8, help="windows of each text to judge by")
    parser.add_argument("--seed", type=int, default=0, help="of the calibration texts")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    if bool(args.sparsity) != all(method in PRUNES for method in args.methods):
        parser.error(f"--sparsity is of {', '.join(PRUNES)}, which need it; run other methods without it")
    if any(one.per == GLOBAL for one in args.sparsity) and args.methods != ["magnitude"]:
        parser.error("--sparsity global: is of magnitude alone")
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
    lost: dict[tuple[str, Path], np.ndarray] = {}
    for at, sparsity in enumerate(args.sparsity or [None]):
        setting = Setting(args.format, sparsity, args.activations, args.damp)
        for method in args.methods:
            start, name, control = time.process_time(), method, CONTROLS.get(method, "")
            if at:
                name, control = f"{method} {sparsity}", method
            model = compressed(opened.source, method, setting, read)
            for path, texts in judged.items():
                lost[name, path] = losses(model, texts) - before[path]
                line = f"{args.format} {name}, {args.calibrate.stem} -> {path.stem}: "
                line += f"lost {interval(lost[name, path])} of {before[path].mean():.3f}"
                if (control, path) in lost:
                    line += f"; less {control} {interval(lost[name, path] - lost[control, path])}"
                print(f"{line}; {time.process_time() - start:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main()
