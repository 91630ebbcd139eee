"""Sampling parameters in the native core's format."""

from collections.abc import Sequence
from typing import Any

from headrace import core
from headrace.data.fields import Use, used
from headrace.data.params import SamplingParams

# Fields with the same names in the core.
SAME = used(SamplingParams, Use.CORE)


def sample_params(params: SamplingParams, stop_ids: Sequence[int] = ()) -> Any:
    """The core's SampleParams. `stop_ids` (EOS and stop_token_ids) cannot be drawn before `params.min_tokens`."""
    out = core.module().SampleParams()
    for name in SAME:
        setattr(out, name, getattr(params, name))
    out.logit_bias = list((params.logit_bias or {}).items())
    out.bad_words = [list(word) for word in params.bad_words]
    out.stop_ids = list(stop_ids)
    if params.dry_multiplier:
        out.dry_breakers = list(params.dry_breakers)
    out.constrained = params.structured_outputs is not None
    out.allowed = None if params.allowed_token_ids is None else list(params.allowed_token_ids)
    return out
