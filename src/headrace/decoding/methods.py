"""Chooses the decoding method of a request's parameters."""

from headrace.data.params import SamplingParams
from headrace.decoding.base import Strategy
from headrace.decoding.beam import BeamSearch
from headrace.decoding.contrastive import ContrastiveSearch
from headrace.decoding.refine import Refine
from headrace.decoding.sampling import BestOf, Sampling
from headrace.decoding.speech_beams import SpeechBeamSearch


def strategy_for(params: SamplingParams, mask: int | None = None, context: int = 1 << 31) -> Strategy:
    """A new strategy for one request. mask: the model's mask token. context: the most tokens of a text."""
    if params.beam is not None:
        return BeamSearch(params.beam) if params.timestamps is None else SpeechBeamSearch(params.beam)
    if params.penalty_alpha:
        return ContrastiveSearch()
    if params.refine is not None:
        return Refine(params.refine, mask, context)
    if params.best_of is not None:
        return BestOf()
    return Sampling()
