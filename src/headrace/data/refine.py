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
        int, Field("Fill in blocks of so many tokens (models with a mask token)", ge=1, le=MAX_BLOCK, name="refine_block")
    ] = 8
    passes: Annotated[
        int, Field("Passes over a block, no more than it has tokens", ge=1, le=MAX_BLOCK, name="refine_passes")
    ] = 4
    remask: Annotated[
        Literal["any", "masked"],
        Field("What is masked again: any token of the block, or only what was masked", name="refine_remask"),
    ] = "any"
    length: Annotated[
        int | None,
        Field("Tokens of the answer, where that is known: the last block is what is left", ge=1, name="refine_length"),
    ] = None

    def __post_init__(self) -> None:
        check(self)
