"""Files that `compress` wrote, opened by llama.cpp: the perplexity and the greedy tokens of our float32 reading of them.

All figures (needs SmolLM2, wikitext-2 and HEADRACE_PEER_PYTHON):
    pytest tests/models/test_written_in_llama_cpp.py -m peers -s
"""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.startup.opening import open_files
from tests.models.gates import LlamaCpp, perplexity, windows
from tests.models.real import PROMPTS as ALL
from tests.places import data_path, model_file

pytestmark = [pytest.mark.peers, pytest.mark.weights, pytest.mark.slow]

WINDOWS, SCORED, WITHIN = 8, 256, 0.005
ANSWER, PROMPTS = 32, ALL[:8]
# Logits between the two best tokens where either may be chosen. llama.cpp multiplies floats as halves, and rounds what it
# multiplies with integers to 8 bits, which our float32 does not.
TIES = {"F32": 0.01, "F16": 0.05, "Q8_0": 0.3, "Q4_K_M": 0.8}


def greedy(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Prompts and their answers."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    outputs = llm.generate(prompts, params)
    return [(prompt, list(output.outputs[0].token_ids)) for prompt, output in zip(prompts, outputs, strict=True)]


def missed(theirs: LlamaCpp, prompt: list[int], answer: list[int], vocab_size: int) -> list[float]:
    """Of each token that llama.cpp would not choose there, by how much its own first choice is likelier to it, in logits."""
    rows = theirs.rows([*prompt, *answer[:-1]], len(answer), vocab_size)
    gaps = rows.max(-1) - rows[np.arange(len(answer)), answer]
    return [float(gap) for gap in gaps if gap > 0]


@pytest.mark.parametrize("format", TIES)
def test_llama_cpp_has_the_perplexity_of_float32(format: str, tmp_path: Path) -> None:
    text = data_path("wikitext2/valid.txt").read_text("utf-8")
    opened = open_files(model_file("SmolLM2-135M-Instruct.Q4_1.gguf"))
    out = tmp_path / "written.gguf"
    compress(opened.path, out, Pipeline(format=format))
    with LLM(str(out), backend="torch", dtype="float32", threads=2) as ours, LlamaCpp(out, 2) as theirs:
        texts = list(islice(windows(ours.tokenizer.encode(text[: 40 * 512 * WINDOWS // 8]), []), WINDOWS))
        assert len(texts) == WINDOWS
        mine = [p for score in ours.score(texts, start=512 - SCORED) for p in score.logprobs]
        other = [p for tokens in texts for p in theirs.scores(tokens, SCORED)]
        ratio = perplexity(other) / perplexity(mine)
        shifted = perplexity([p for tokens in texts for p in theirs.scores([*tokens[:-1], tokens[0]], SCORED)])
        gaps = [gap for prompt, answer in greedy(ours) for gap in missed(theirs, prompt, answer, ours.model_config.vocab_size)]
    print(f"{format}: perplexity {perplexity(other):.4f}, ours {perplexity(mine):.4f}, {ratio:.5f}; near ties", end=" ")
    print(len(gaps), "of", ANSWER * len(PROMPTS), [round(gap, 3) for gap in sorted(gaps)])
    assert abs(ratio - 1) <= WITHIN
    assert abs(shifted / perplexity(mine) - 1) > WITHIN, "the control: one other token at the end of each text"
    assert all(gap <= TIES[format] for gap in gaps)
    assert len(gaps) <= 0.05 * ANSWER * len(PROMPTS)
