"""How often a calibrated threshold of early exits, or of a token cascade, loses more than delta on prompts that did not
choose it.

Answers of all prompts are written once with each threshold. Each redraw calibrates on some of the prompts and judges the
chosen threshold on the others; the control takes the lowest threshold with a small mean loss. A redraw that can show no
threshold chooses none and loses nothing, so the share of redraws that chose one is printed first. Then one calibration: the
threshold of the first prompts, with its loss and layers on the others. Several `--exit-state` are compared prompt by prompt
with the first one.

    python -m benchmarks.exit_guarantee smollm2-135m exits prompts.jsonl --exit-layers all --prompts 400 -n 200
    python -m benchmarks.exit_guarantee LARGER SMALLER prompts.jsonl --cascade --prompts 60 -n 40
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.llm import LLM
from headrace.stats.calibration import Redraws, calibrate, minimum_n, redraw
from headrace.training.early_exit_calibration import CalibrationConfig, measure_losses
from headrace.training.heads import prompt_tokens
from headrace.workflows.prompts import read_prompts, read_references

GRID = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)

EPSILON, REDRAWS = 0.05, 500


def summary(found: Redraws, n: int, delta: float) -> str:
    """One line: how many redraws chose a threshold, and how many were above delta, next to the control."""
    line = f"delta {delta:g}: {found.chosen:.3f} of {REDRAWS} redraws chose a threshold"
    if n < (needed := minimum_n(delta, EPSILON)):
        line += f" ({n} prompts are fewer than the {needed} that can show one: no test of the guarantee)"
    return f"{line}, {found.tested:.3f} above, naive {found.naive:.3f}, mean loss {found.risk:.4f}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Losses and mean layers (of a cascade: share of tokens of the larger model) of all prompts [prompts], by threshold."""

    losses: dict[float, np.ndarray]
    layers: dict[float, np.ndarray]


def interval(values: np.ndarray) -> str:
    """Mean ± standard error."""
    return f"{values.mean():.4f} ± {values.std(ddof=1) / len(values) ** 0.5:.4f}"


def on_fresh(found: Measured, n: int, delta: float) -> str:
    """One line: the threshold of the first n prompts, its loss on them, and its loss and layers on the others."""
    first = {threshold: values[:n] for threshold, values in found.losses.items()}
    chosen = calibrate(first.__getitem__, [*first], delta=delta, epsilon=EPSILON).threshold
    if chosen is None:
        return f"delta {delta:g}: the first {n} prompts choose no threshold"
    own, others, layers = first[chosen], found.losses[chosen][n:], found.layers[chosen][n:]
    return (
        f"delta {delta:g}: the first {n} prompts choose {chosen:g} ({own.mean():.4f} lost), "
        f"the {len(others)} others lose {interval(others)} at {layers.mean():.2f}"
    )


def measured(args: argparse.Namespace, state: str) -> Measured:
    """Write all answers with each threshold, and print a line each, up to one that loses much more than every delta."""
    found, most = Measured({}, {}), max(args.delta)
    settings: dict[str, Any] = {"exits": args.exits, "exit_layers": args.exit_layers, "exit_state": state}
    if args.cascade:
        settings = {"cascade": args.exits}
    with LLM(args.model, threads=args.threads, max_model_len=args.max_model_len, **settings) as llm:
        prompts = read_prompts(args.source)[: args.prompts]
        ids = [prompt_tokens(llm, prompt) for prompt in prompts]
        references = None
        if args.loss == "risk":
            texts = read_references(args.source)[: args.prompts]
            references = [llm.tokenizer.encode(text, add_special=False) for text in texts]
        config = CalibrationConfig(args.criterion, args.decay, args.slope, args.max_tokens, args.loss, cascade=args.cascade)
        measure = measure_losses(llm, ids, config, references)
        for threshold in GRID:
            losses, layers = measure(threshold)
            # A token of the smaller model of a cascade has 0 layers.
            depth = llm.model_config.num_layers if args.cascade else 1
            found.losses[threshold], found.layers[threshold] = losses, np.array(layers) / depth
            unit = "of the tokens by the larger model" if args.cascade else "layers"
            mean = found.layers[threshold].mean()
            print(f"{state}, {threshold:g}: {interval(losses)} lost, {mean:.2f} {unit}", flush=True)
            if losses.mean() > most + 4 * losses.std(ddof=1) / len(ids) ** 0.5:
                break
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("exits", help="folder of exits, or with --cascade the smaller model")
    parser.add_argument("source", type=Path)
    parser.add_argument("--cascade", action="store_true", help="a token cascade in the place of exits")
    parser.add_argument("--exit-layers")
    parser.add_argument("--exit-state", nargs="+", choices=["deferred", "propagate"], default=["deferred"])
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("-n", type=int, default=200, help="prompts of each calibration")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--criterion", default="max_prob")
    parser.add_argument("--loss", default="text")
    parser.add_argument("--slope", type=float, default=0.0)
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--delta", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    first: Measured | None = None
    for state in args.exit_state:
        found = measured(args, state)
        for delta in args.delta:
            print(summary(redraw(found.losses, args.n, delta=delta, epsilon=EPSILON, redraws=REDRAWS), args.n, delta))
            print(on_fresh(found, args.n, delta))
        first = first or found
        for threshold in [one for one in found.losses if found is not first and one in first.losses]:
            more = found.losses[threshold] - first.losses[threshold]
            layers = found.layers[threshold] - first.layers[threshold]
            print(f"{state} less {args.exit_state[0]}, {threshold:g}: {interval(more)} lost, {interval(layers)} layers")


if __name__ == "__main__":
    main()
