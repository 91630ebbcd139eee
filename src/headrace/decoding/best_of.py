"""Best of several: draws `best_of` outputs and returns the `n` with the largest mean log-probability."""

import itertools

from headrace.data.plan import TokenLogprob
from headrace.data.types import Child, Request, Sequence
from headrace.decoding.base import Outputs
from headrace.decoding.sampling import Sampling


class BestOf(Sampling):
    """Sampling whose outputs are ranked by the mean log-probability of their tokens, the end token included.

    Output i equals output i of a request with `n` = `best_of` and the same seed. Log-probabilities are those of
    `logprobs_mode`; raw ones are the model's own. Exactness: as sampling.
    """

    streams = False  # which outputs are the best is known at the end
    honours = Sampling.honours | {"best_of"}

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        children = super().select(request, outputs)
        drawn: dict[int, list[TokenLogprob]] = request.state or {}
        for child in itertools.chain.from_iterable(children):
            assert child.index is not None
            drawn.setdefault(child.index, []).extend(child.logprobs)
        request.state = drawn
        return children

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        """The best n, best first, with their mean log-probabilities; of equals the one drawn first."""
        ranked = [(seq, self._mean(request, seq)) for seq in sorted(request.finished, key=lambda seq: seq.decode.index)]
        ranked.sort(key=lambda pair: -pair[1])
        return ranked[: request.params.n]

    def _mean(self, request: Request, seq: Sequence) -> float:
        entries = request.state[seq.decode.index][: len(seq.output)]
        seq.decode.score = sum(entry.logprob for entry in entries)
        seq.text.logprobs = entries if request.params.logprobs is not None else []
        return seq.decode.score / len(entries)

    def _outputs(self, request: Request) -> int:
        return request.params.best_of or request.params.n

    def _logprobs(self, request: Request) -> int:
        return request.params.logprobs or 0
