"""Drafted tokens drawn on the host, from whole rows of logits: of heads whose tokens hang on those before them."""

import math
from dataclasses import replace

import numpy as np
import torch

from headrace.data.plan import Drawn
from headrace.drafting.base import Fed
from headrace.drafting.draft_model import Chain, append_drawn, mask_behind
from headrace.ops.keys import Purpose, key
from headrace.ops.rejection import draw_draft, row_spec
from headrace.ops.sampling import sample


def draw_from_rows(work: Fed, row: bytes, chain: Chain) -> bool:
    """A token drawn here from whole rows of logits: for the rejection rule, and with it what it was drawn from; else as the
    target will draw it. False: there is none.

    q is held to the grammar as p is: to take a token off after it was drawn would make q another distribution.
    """
    mask = mask_behind(work, chain.tokens)
    if not mask and work.seq.decode.constraint is not None:
        return False
    logits = torch.from_numpy(np.frombuffer(row, dtype="<f4").copy())
    spec = row_spec(work.request, work.seq, list(chain.tokens), mask)
    if not work.request.params.rejects:
        params = work.request.params.replace(logprobs=0, logprobs_mode="processed")
        noise = key(work.request.seed, work.seq.decode.index)
        (result,) = sample(logits[None], [replace(spec, params=params, keys=[noise], purpose=Purpose.TARGET)])
        return append_drawn(Drawn(tuple(result.tokens), logprobs=tuple(result.logprobs)), chain)
    found = draw_draft(logits, spec)
    if found is not None:
        token, q = found
        chain.tokens.append(token)
        chain.q.append(q.numpy().astype("<f4").tobytes())
        chain.log_prob += math.log(max(float(q[token]), 1e-30))
    return found is not None
