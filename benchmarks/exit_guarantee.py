"""How often a calibrated threshold of early exits loses more than delta on prompts that did not choose it.

Answers of all prompts are written once with each threshold. Each redraw calibrates on some of the prompts and judges the
chosen threshold on the others; the control takes the lowest threshold with a small mean loss. A redraw that can show no
threshold chooses none and loses nothing, so the share of redraws that chose one is printed first.

    python -m benchmarks.exit_guarantee smollm2-135m exits prompts.jsonl --exit-layers all --prompts 400 -n 200
"""

import argparse
from pathlib import Path

import numpy as np

from headrace.llm import LLM
from headrace.stats.calibration import Redraws, minimum_n, redraw
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("exits")
    parser.add_argument("source", type=Path)
    parser.add_argument("--exit-layers")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("-n", type=int, default=200, help="prompts of each calibration")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--criterion", default="max_prob")
    parser.add_argument("--loss", default="text")
    parser.add_argument("--slope", type=float, default=0.0)
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--delta", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with LLM(args.model, exits=args.exits, exit_layers=args.exit_layers, threads=args.threads, max_model_len=1024) as llm:
        prompts = read_prompts(args.source)[: args.prompts]
        ids = [prompt_tokens(llm, prompt) for prompt in prompts]
        references = None
        if args.loss == "risk":
            texts = read_references(args.source)[: args.prompts]
            references = [llm.tokenizer.encode(text, add_special=False) for text in texts]
        config = CalibrationConfig(args.criterion, args.decay, args.slope, args.max_tokens, args.loss)
        measure, losses, layers = measure_losses(llm, ids, config, references), {}, {}
        for threshold in GRID:
            losses[threshold], each = measure(threshold)
            layers[threshold] = float(np.mean(each))
            error = losses[threshold].std(ddof=1) / len(ids) ** 0.5
            print(
                f"{threshold:g}: {losses[threshold].mean():.4f} ± {error:.4f} lost, {layers[threshold]:.2f} layers", flush=True
            )
            if losses[threshold].mean() > max(args.delta) + 4 * error:
                break
    for delta in args.delta:
        found = redraw(losses, args.n, delta=delta, epsilon=EPSILON, redraws=REDRAWS)
        print(summary(found, args.n, delta))


if __name__ == "__main__":
    main()
