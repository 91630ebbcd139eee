"""What callers hand over, in the forms they may have: one prompt or many, one set of parameters or one each."""

from collections.abc import Sequence

from headrace.data.params import BeamSearchParams, SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | BeamSearchParams


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text, a list of texts, token ids, or a list of those."""
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(item, int) for item in batch):
        return [batch]  # type: ignore[list-item]
    return batch  # type: ignore[return-value]


def spread(params: Params | Sequence[Params], count: int) -> list[SamplingParams]:
    """Parameters for `count` prompts. Raises ValueError."""
    if isinstance(params, Params):
        params = [params] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts and {len(params)} params; give one for all or one each")
    return [one.sampling() if isinstance(one, BeamSearchParams) else one for one in params]
