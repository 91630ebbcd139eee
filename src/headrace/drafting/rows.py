"""Draft tokens drawn on the host from rows of logits, for heads whose tokens depend on the tokens before them."""

import math
from dataclasses import replace

import numpy as np
import torch

from headrace.data.plan import Drawn
from headrace.drafting.base import TargetFeed
from headrace.drafting.draft_model import SMALLEST, Chain, append_drawn, mask_after
from headrace.ops.keys import Purpose, key
from headrace.ops.rejection import draw_draft, row_spec
from headrace.ops.sampling import sample


def draw_from_rows(target: TargetFeed, row: bytes, chain: Chain) -> bool:
    """Draw a token from a row of logits and append it to a chain; False if no token can come.

    row: float32 [vocabulary], little-endian. Under the rejection rule the chain also receives q, the distribution after the
    grammar's mask: a token removed after the draw would make q another distribution.
    """
    mask = mask_after(target, chain.tokens)
    if not mask and target.seq.decode.constraint is not None:
        return False
    logits = torch.from_numpy(np.frombuffer(row, dtype="<f4").copy())
    spec = row_spec(target.request, target.seq, list(chain.tokens), mask)
    if not target.request.params.rejects:
        params = target.request.params.replace(logprobs=0, logprobs_mode="processed")
        noise = key(target.request.seed, target.seq.decode.index)
        (result,) = sample(logits[None], [replace(spec, params=params, keys=[noise], purpose=Purpose.TARGET)])
        return append_drawn(Drawn(tuple(result.tokens), logprobs=tuple(result.logprobs)), chain)
    drawn = draw_draft(logits, spec)
    if drawn is not None:
        token, q = drawn
        chain.tokens.append(token)
        chain.q.append(q.numpy().astype("<f4").tobytes())
        chain.log_prob += math.log(max(float(q[token]), SMALLEST))
    return drawn is not None
