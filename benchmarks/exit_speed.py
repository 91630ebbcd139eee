"""Speed of a decoder with early exits next to the same model without, by batch size.

Rounds alternate between requests without exits and with them, in one process; the first round warms up. Prints tokens a second
without exits, and the ratio of times (above 1: exits are faster) as median and range over rounds, with the mean layers a token.

    python -m benchmarks.exit_speed qwen2.5-coder-0.5b exits prompts.jsonl --exit-layers all --thresholds 0.99 0.95
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from headrace.data.outputs import whole
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.training.heads import prompt_tokens
from headrace.workflows.prompts import read_prompts


def timed(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[float, float]:
    """Seconds of one batch, and mean layers of the tokens that an exit or the full model gave (0 without exits)."""
    start = time.perf_counter()
    outputs = whole(llm.generate(prompts, params))
    seconds = time.perf_counter() - start
    layers = [one.layers for output in outputs for one in output.outputs[0].exits or () if one is not None]
    return seconds, mean(layers) if layers else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("exits")
    parser.add_argument("source", type=Path, help="prompts, one per line, or JSON lines")
    parser.add_argument("--exit-layers")
    parser.add_argument("--criterion", default="max_prob")
    parser.add_argument("--thresholds", type=float, nargs="+", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    plain = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    settings = {
        "exits": args.exits,
        "exit_layers": args.exit_layers,
        "threads": args.threads,
        "max_model_len": args.max_model_len,
    }
    # Neither drafts nor cached prompts, so that rounds differ in the exits alone.
    with LLM(args.model, speculate=None, enable_prefix_caching=False, **settings) as llm:
        prompts = [prompt_tokens(llm, prompt) for prompt in read_prompts(args.source, max(args.batches))]
        for batch in args.batches:
            given = prompts[:batch]
            ways = [plain]
            for threshold in args.thresholds:
                ways.append(plain.replace(exit_threshold=threshold, exit_criterion=args.criterion))
            rounds = [[timed(llm, given, way) for way in ways] for _ in range(args.rounds + 1)][1:]
            speed = median(batch * args.max_tokens / each[0][0] for each in rounds)
            print(f"batch {batch}: {speed:.1f} tokens/s without exits", flush=True)
            for at, threshold in enumerate(args.thresholds, 1):
                ratios = [each[0][0] / each[at][0] for each in rounds]
                layers = mean(each[at][1] for each in rounds)
                ratio = f"{median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})"
                print(f"  threshold {threshold:g}: {ratio}, {layers:.2f} layers", flush=True)


if __name__ == "__main__":
    main()
