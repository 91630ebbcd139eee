"""Verification by rejection on the host, for requests with the caller's own logit processors."""

import numpy as np
import torch

from headrace.data.plan import Drawn, TokenLogprob
from headrace.data.types import Request, Sequence
from headrace.decoding.host import apply_processors
from headrace.decoding.processors import History, ProcessorError
from headrace.ops.logprobs import token_logprobs
from headrace.ops.processing import RowSpec
from headrace.ops.rejection import row_spec, verify
from headrace.ops.sampling import process


def verify_by_rejection(request: Request, seq: Sequence, rows: list[bytes], logprobs: int | None) -> Drawn:
    """Path, tokens and log-probabilities of a chain, by the request's rejection rule. Raises ProcessorError.

    rows: the target's logits, float32 [vocabulary], at the last known token and at each node of `seq.decode.draft`.
    """
    draft = seq.decode.draft
    assert draft is not None
    assert draft.parents == list(range(-1, len(draft.tokens) - 1)), "rejection verifies chains"
    chain = draft.tokens
    masks = b"" if seq.decode.constraint is None else seq.decode.constraint.masks(chain, draft.parents)
    width = len(masks) // (1 + len(chain))
    specs = [row_spec(request, seq, chain[:at], masks[at * width : (at + 1) * width]) for at in range(len(chain) + 1)]
    raw = torch.from_numpy(np.stack([np.frombuffer(row, dtype="<f4") for row in rows]))
    before = [list(spec.path) for spec in specs]
    z = apply_processors(request.processors, raw, History(request.prompt, seq.output), before) if request.processors else raw
    accepted, token = verify(z, specs, chain, draft.q)
    if token is None and not accepted:
        raise ProcessorError("no token can be drawn: logits are broken, or what is allowed together rules out every one")
    tokens = chain[:accepted] if token is None else [*chain[:accepted], token]
    drawn = Drawn(tuple(tokens), tuple(range(len(tokens) - 1)))
    if logprobs is not None:
        drawn.logprobs = tuple(_report(raw, z, specs, tokens, logprobs))
    return drawn


def _report(raw: torch.Tensor, z: torch.Tensor, specs: list[RowSpec], tokens: list[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of the tokens, from raw or processed logits as the request asks."""
    rows = raw if specs[0].params.logprobs_mode == "raw" else process(z, specs)
    return token_logprobs(rows[: len(tokens)].float(), torch.tensor(tokens), k)
