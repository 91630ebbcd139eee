"""A sampling field: parameters with one more."""

from typing import Annotated

from headrace.data.fields import Field, Use
from headrace.data.params import SamplingParams


class Dimming(SamplingParams, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    dimming: Annotated[float, Field("How much less each token counts", Use.SAMPLER, ge=0, le=1, means=(0, "off"))] = 0.0
