"""Output of one request of a transcription, as plain data."""

import msgspec


class WindowOutput(msgspec.Struct):
    """Output of a window of sound: for each choice the tokens, and the sum of their log-probabilities as the request's
    `logprobs_mode` has them. logprobs: of each token, by choice; empty lists after beam search, which keeps only the sum.
    aligned: of an alignment, what `Request.pooled` has."""

    choices: list[tuple[list[int], float]]
    logprobs: list[list[float]] = []
    aligned: list[float] = []
