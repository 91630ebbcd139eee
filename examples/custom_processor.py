"""A logit processor of your own, an answer without the letter e: python examples/custom_processor.py [MODEL]"""

import sys
from collections.abc import Sequence

import torch

from headrace import LLM, SamplingParams
from headrace.decoding.processors import History


class Without:
    """Makes every token impossible whose text holds a given letter."""

    scope = "pointwise"  # the result depends on the logits alone, so it is right for drafts, too

    def __init__(self, llm: LLM, letter: str) -> None:
        letters = (letter.lower().encode(), letter.upper().encode())
        spell = llm.tokenizer.token_bytes
        self.ids = [id_ for id_ in range(llm.tokenizer.vocab_size) if any(one in spell(id_) for one in letters)]

    def apply(self, logits: torch.Tensor, history: History, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """logits [n, V] of one sequence, which may be changed in place; `paths` are the draft tokens before each row."""
        logits[:, self.ids] = float("-inf")
        return logits


def main(model: str = "smollm2-135m") -> None:
    llm = LLM(model, max_model_len=1024, max_num_seqs=2)
    prompt = llm.render([{"role": "user", "content": "Describe a morning by the sea."}])
    params = SamplingParams(temperature=0, max_tokens=16)
    (plain,) = llm.generate(prompt, params)
    (without,) = llm.generate(prompt, params, processors=[Without(llm, "e")])
    print(f"as it is:  {plain.outputs[0].text!r}")
    print(f"without e: {without.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
