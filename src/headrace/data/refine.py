"""`RefineParams`: parameters of non-autoregressive decoding, in which a model fills in blocks of masks."""

from typing import Annotated, Literal

import msgspec

from headrace.data.fields import Field, Params, check

# A block is verified as a draft of this many nodes.
MAX_BLOCK = 64


class RefineParams(
    msgspec.Struct, metaclass=Params, frozen=True, kw_only=True, repr_omit_defaults=True, forbid_unknown_fields=True
):
    """How blocks are filled in. Raises ParamError for invalid values.

    After pass t of T over a block of K tokens, the K (T - t) / T tokens with the lowest confidence (rounded down) are masked
    again. remask: "any" chooses among all tokens (Mask-Predict, Ghazvininejad et al. 2019), "masked" among those that were
    masked in the last pass. One pass is fully non-autoregressive (Gu et al. 2018). length: largest number of tokens of the
    answer; the last block is shortened to it.
    """

    block: Annotated[
        int, Field("Block filling: tokens of a block (models with a mask token)", ge=1, le=MAX_BLOCK, name="refine_block")
    ] = 8
    passes: Annotated[
        int, Field("Block filling: passes over a block, at most its number of tokens", ge=1, le=MAX_BLOCK, name="refine_passes")
    ] = 4
    remask: Annotated[
        Literal["any", "masked"],
        Field("Block filling: tokens that a pass masks again: any of the block, or only masked ones", name="refine_remask"),
    ] = "any"
    length: Annotated[
        int | None,
        Field("Block filling: tokens of the answer, if known; the last block is then shorter", ge=1, name="refine_length"),
    ] = None

    def __post_init__(self) -> None:
        check(self)
