"""Resumes an output that another engine began: its tokens are known, and the next step samples the token after them."""

from collections.abc import Sequence as Series

from headrace.data.types import Request, Sequence
from headrace.decoding.stopping import Stopping
from headrace.engine.admission import AdmissionError


def resume(request: Request, seq: Sequence, given: Series[int], stopping: Stopping, vocab_size: int) -> None:
    """Append the tokens that the caller has; text, stop strings and grammar then stand behind them. Raises AdmissionError."""
    if not given:
        return
    if request.width > 1 or not request.strategy.streams or not 0 <= min(given) <= max(given) < vocab_size:
        raise AdmissionError("given", "only one streamed output of known tokens can go on; leave given out")
    stopping.extend(request, seq, list(given), ())
    if seq.text.finish_reason is not None or (seq.decode.constraint is not None and seq.decode.constraint.error):
        raise AdmissionError("given", "the output ends within the given tokens; leave given out")
