"""What a caller may ask of a model that fills in blocks: `RefineParams`, checked when they are made."""

from typing import Annotated, Literal

import msgspec

from headrace.data.fields import Field, Params, check

MAX_BLOCK = 64  # nodes of a draft


class RefineParams(
    msgspec.Struct, metaclass=Params, frozen=True, kw_only=True, repr_omit_defaults=True, forbid_unknown_fields=True
):
    """How blocks are filled in. Raises ParamError for what cannot be meant.

    After pass t of T over a block of K tokens the K (T - t) / T least sure ones (rounded down) are masked again: "any" of all,
    as Mask-Predict does it (Ghazvininejad et al. 2019), or "masked": what was once kept stays. One pass is fully
    non-autoregressive (Gu et al. 2018). With `length` the answer has so many tokens at most: the last block is what is left.
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
