"""Beam search on real weights: hypotheses and scores of `transformers`, in float32 on the torch back end."""

from typing import Any

import pytest
import torch

from headrace.decoding.beam import BeamSearch, BeamSearchParams
from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from tests.models.real import PROMPTS, transformers_model
from tests.places import model_file
from tests.tiny import finish, tiny_engine

WIDTH, COUNT = 4, 24
NEAR = 2e-4  # two hypotheses with scores this close may change places in float32


def ours(model: Any, prompts: list[list[int]], count: int, eos: int) -> list[list[tuple[list[int], float]]]:
    """All prompts in one engine, in one batch."""
    engine = tiny_engine(model, blocks=1200, block_size=16, budget=512, seqs=64)
    engine.eos_ids = frozenset({eos})
    params = BeamSearchParams(beam_width=WIDTH, n=WIDTH, max_tokens=count)
    requests = [engine.add(prompt, params.sampling(), strategy=BeamSearch(params)) for prompt in prompts]
    finish(engine)
    return [[(seq.output, score) for seq, score in request.strategy.results(request)] for request in requests]


@torch.no_grad()
def theirs(model: Any, prompt: list[int], count: int, eos: int) -> list[tuple[list[int], float]]:
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return list(zip((s[len(prompt) :] for s in result.sequences.tolist()), result.sequences_scores.tolist(), strict=True))


def check(texts: list[str], count: int) -> None:
    with GGUFFile(model_file("SmolLM2-135M-Instruct.Q4_1.gguf")) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
        eos = int(source.metadata["tokenizer.ggml.eos_token_id"])
        prompts = [tokenizer.encode(text) for text in texts]
        found = ours(load_model(source), prompts, count, eos)
        oracle = transformers_model(source)
    for text, prompt, mine in zip(texts, prompts, found, strict=True):
        expected = theirs(oracle, prompt, count, eos)
        assert [score for _, score in mine] == pytest.approx([score for _, score in expected], abs=NEAR), text
        for (tokens, _), (other, other_score) in zip(mine, expected, strict=True):
            if tokens != other[: len(tokens)]:  # a near tie may change places: then it stands elsewhere in the list
                near = [o[: len(tokens)] for o, score in expected if abs(score - other_score) < NEAR]
                assert tokens in near, text
    print(f"{len(texts)} prompts, {WIDTH} hypotheses of up to {count} tokens each: the same, scores within {NEAR}")


@pytest.mark.weights
def test_smollm2_two_prompts() -> None:
    check(PROMPTS[:2], 10)


@pytest.mark.weights
@pytest.mark.slow
def test_smollm2_20_prompts() -> None:
    check(PROMPTS, COUNT)
