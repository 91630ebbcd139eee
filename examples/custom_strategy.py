"""A decoding method of your own, Mirostat: python examples/custom_strategy.py [MODEL]

Mirostat 2 (Basu et al., 2021, https://arxiv.org/abs/2007.14966) holds the surprise of a text at a target: tokens that would
surprise by more than `mu` bits are cut off, and `mu` follows what the drawn tokens really did.
"""

import math
import sys

import torch

from headrace import LLM, SamplingParams
from headrace.data.plan import Feed, Ranked, Top
from headrace.data.types import Child, Request, Sequence
from headrace.decoding.base import Outputs, Strategy
from headrace.ops.keys import Purpose, key
from headrace.ops.noise import gumbel_at


class Mirostat(Strategy):
    """It says what it needs of each step, and turns what comes back into children."""

    # It heeds no field of SamplingParams beside those the loop does (max_tokens, stop, seed …), so a request that sets another,
    # such as a temperature, is refused: nothing is dropped in silence. A strategy that heeds some names them here.
    honours = frozenset[str]()

    def __init__(self, target: float = 3.0, rate: float = 0.1, k: int = 50) -> None:
        self.target = target  # bits
        self.rate = rate
        self.k = k

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[Top, ...]:
        return (Top(self.k),) if last else ()  # the k likeliest tokens; whole rows of logits stay where they are

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [[self._next(request, seq, ranked)] for seq, (ranked,) in outputs]

    def _next(self, request: Request, seq: Sequence, ranked: Ranked) -> Child:
        mu = 2 * self.target if seq.decode.state is None else seq.decode.state  # state travels with the sequence
        bits = [-logprob / math.log(2) for logprob in ranked.logprobs]
        kept = max(sum(one <= mu for one in bits), 1)
        # Noise that depends on seed, child, position and token alone: the same answer in any batch.
        ids = torch.tensor([ranked.ids[:kept]])
        keys, position = torch.tensor([key(request.seed, seq.decode.index)]), torch.tensor([len(seq.tokens)])
        noisy = torch.tensor(ranked.logprobs[:kept]) + gumbel_at(keys, position, ids, Purpose.TARGET)[0]
        drawn = int(noisy.argmax())
        share = sum(2**-one for one in bits[:kept])
        surprise = bits[drawn] + math.log2(share)  # among the tokens that were kept
        return Child(token=ranked.ids[drawn], index=seq.decode.index, state=mu - self.rate * (surprise - self.target))


def main(model: str = "smollm2-135m") -> None:
    llm = LLM(model, max_model_len=1024, max_num_seqs=4)
    for target in (0.5, 3.0):
        (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=16, seed=1), strategy=Mirostat(target))
        print(f"{target} bits: {output.prompt}{output.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
