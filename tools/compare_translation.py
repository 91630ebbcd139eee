"""An encoder-decoder on the native core beside itself in torch (float32): tools/compare_translation.py FOLDER --data FILE

    --reference FILE     what the lines of --data should be translated to: BLEU of both
    --lines 200          how many lines; --beams 50: how many of them with four beams, too
    --threads N          of every back end (default: as many as each takes by itself)
    --speed              tokens a second at batch 1 and 32, in alternating rounds
    --drafts             tokens a step of Jacobi and lookahead decoding, and whether they change a token
    --exits FOLDER       (headrace train-heads --kind exit) tokens that leave early: layers a token and BLEU, by threshold

What torch writes greedily is put before the core: how often its likeliest next token is the same ("top-1").
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from to_safetensors import bleu

from headrace.backends.recipe import BLOCK_SIZE
from headrace.data.outputs import RequestOutput
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM
from headrace.training.selfdraft import likeliest

GREEDY = SamplingParams(temperature=0.0, max_tokens=128)
FOUR = BeamSearchParams(beam_width=4, max_tokens=128, early_stopping=False)
NATIVE: dict[str, dict[str, Any]] = {"native": {}, "native, --quantize int8": {"quantize": "int8"}}
THRESHOLDS = (0.95, 0.9, 0.8, 0.6, 0.4, 0.2)
TIMED, ROUNDS = 64, 5
THREADS: int | None = None  # --threads


def opened(folder: Path, backend: str, **settings: Any) -> LLM:
    """A model whose pool holds nothing that it was not asked for just now."""
    common: dict[str, Any] = {"speculate": None, "enable_prefix_caching": False, "threads": THREADS}
    return LLM(folder, backend=backend, device="cpu", **{**common, **settings})


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def said(outputs: Sequence[RequestOutput], reference: list[str] | None) -> str:
    if reference is None:
        return ""
    return f", BLEU {bleu([output.outputs[0].text for output in outputs], reference[: len(outputs)]):.1f}"


def chosen(llm: LLM, source: list[int], answer: list[int]) -> list[bool]:
    """Whether each token of an answer is the one that the model finds likeliest."""
    return likeliest(llm.runner, [llm.model_config.start, *answer], BLOCK_SIZE, source)


def compare(folder: Path, texts: list[str], reference: list[str] | None, beams: int) -> None:
    with opened(folder, "torch") as llm:
        plain, searched = llm.generate(texts, GREEDY), llm.generate(texts[:beams], FOUR)
    print(f"torch, float32: {len(texts)} lines, {sum(map(len, tokens(plain)))} tokens{said(plain, reference)}")
    for name, settings in NATIVE.items():
        with opened(folder, "native", **settings) as llm:
            made, others = llm.generate(texts, GREEDY), llm.generate(texts[:beams], FOUR)
            pairs = zip(plain, tokens(plain), strict=True)
            same = [one for output, answer in pairs for one in chosen(llm, output.prompt_token_ids, answer)]
        equal = sum(a == b for a, b in zip(tokens(made), tokens(plain), strict=True))
        share = sum(same) / len(same)
        print(f"{name}: top-1 {share:.2%} of {len(same)}; {equal} of {len(texts)} lines equal{said(made, reference)}")
        if beams:
            equal = sum(a == b for a, b in zip(tokens(others), tokens(searched), strict=True))
            apart = [abs(a.outputs[0].score - b.outputs[0].score) for a, b in zip(others, searched, strict=True)]
            both = f"{said(others, reference)} (torch{said(searched, reference)[1:]})" if reference else ""
            print(f"  four beams: {equal} of {beams} equal; scores {median(apart):.1e} apart, {max(apart):.1e} at most{both}")


def speed(folder: Path, texts: list[str]) -> None:
    """Tokens a second, medians of alternating rounds; each back end in the threads that it takes by itself."""
    backs = {"torch": opened(folder, "torch")} | {name: opened(folder, "native", **more) for name, more in NATIVE.items()}
    for batch in (1, 32):
        rates: dict[str, list[float]] = {name: [] for name in backs}
        lines = texts[: 8 if batch == 1 else TIMED]
        for _ in range(ROUNDS + 1):
            for name, llm in backs.items():
                began, count = time.perf_counter(), 0
                for at in range(0, len(lines), batch):
                    count += sum(map(len, tokens(llm.generate(lines[at : at + batch], GREEDY))))
                rates[name].append(count / (time.perf_counter() - began))
        each = [f"{name} {median(one[1:]):.0f} ({min(one[1:]):.0f}..{max(one[1:]):.0f})" for name, one in rates.items()]
        print(f"batch {batch}, tokens a second: {'; '.join(each)}")
    for llm in backs.values():
        llm.close()


def drafts(folder: Path, texts: list[str]) -> None:
    with opened(folder, "native") as llm:
        plain = llm.generate(texts, GREEDY)
    for method, more in (("jacobi", {}), ("lookahead", {}), ("ngram", {})):
        with opened(folder, "native", speculate=method, draft_tokens=8, **more) as llm:
            made = llm.generate(texts, GREEDY)
        count, steps = sum(map(len, tokens(made))), sum(output.metrics.steps for output in made)
        equal = sum(a == b for a, b in zip(tokens(made), tokens(plain), strict=True))
        print(f"{method}: {count} tokens in {steps} steps, {count / steps:.2f} a step; {equal} of {len(texts)} lines equal")


def leaving(folder: Path, exits: Path, texts: list[str], reference: list[str] | None) -> None:
    with opened(folder, "native", exits=exits) as llm:
        plain = llm.generate(texts, GREEDY)
        print(f"whole model, {llm.model_config.num_layers} layers{said(plain, reference)}")
        for threshold in THRESHOLDS:
            made = llm.generate(texts, GREEDY.replace(exit_threshold=threshold))
            layers = [one.layers for output in made for one in output.outputs[0].exits or ()]
            left = sum(one < llm.model_config.num_layers for one in layers) / len(layers)
            like = bleu([o.outputs[0].text for o in made], [o.outputs[0].text for o in plain])
            mean = sum(layers) / len(layers)
            print(f"{threshold:g}: {left:.1%} leave, {mean:.2f} layers a token{said(made, reference)}, BLEU with it {like:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--beams", type=int, default=50)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--exits", type=Path)
    asked = parser.parse_args()
    global THREADS  # noqa: PLW0603 - a script's own setting
    THREADS = asked.threads
    texts = asked.data.read_text("utf-8").splitlines()[: asked.lines]
    reference = None if asked.reference is None else asked.reference.read_text("utf-8").splitlines()[: asked.lines]
    if asked.speed:
        speed(asked.folder, texts)
    elif asked.drafts:
        drafts(asked.folder, texts)
    elif asked.exits is not None:
        leaving(asked.folder, asked.exits, texts, reference)
    else:
        compare(asked.folder, texts, reference, asked.beams)


if __name__ == "__main__":
    main()
