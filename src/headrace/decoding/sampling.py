"""Greedy decoding and sampling, with `n` parallel outputs that share their prompt."""

import numpy as np
import torch

from headrace.decoding.noise import key
from headrace.decoding.processors import History, ProcessorError, apply_processors
from headrace.ops.sampling import RowResult, RowSpec, sample
from headrace.types import Child, FeedOutput, Request, Sequence, Want


class Sampling:
    """One token a step for every output. Exactness: bitwise for a given seed, whatever the batch (rules 5 and 12).

    The token is argmax(processed logit + Gumbel noise of (seed, child, position, token)), drawn where the logits are. With
    `n` > 1 the prompt's one sequence becomes n children, once; child i draws what a single run with the noise key
    key(seed, i) would.
    """

    streams = True

    def width(self, request: Request) -> int:
        return self._outputs(request)

    def want(self, request: Request, seq: Sequence) -> Want:
        """A sampled token for each child still to be born, or the whole row where the caller's processors come first."""
        if request.processors:
            return Want(kind="logits")
        return Want(n=self._births(request, seq), child=seq.index, logprobs=self._logprobs(request), mu=seq.state)

    def select(self, request: Request, outputs: list[tuple[Sequence, FeedOutput]]) -> list[list[Child]]:
        return [self._children(request, seq, out) for seq, out in outputs]

    def done(self, request: Request) -> bool:
        return False

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        return []

    def _children(self, request: Request, seq: Sequence, out: FeedOutput) -> list[Child]:
        """`state` is mirostat's, None where that is off."""
        drawn = self._sample_on_host(request, seq, out) if request.processors else out
        mus: list[float] | list[None] = drawn.mus or [None] * len(drawn.tokens)
        return [
            Child(token=token, index=seq.index + i, logprobs=drawn.logprobs[i : i + 1], state=mu)
            for i, (token, mu) in enumerate(zip(drawn.tokens, mus, strict=True))
        ]

    def _outputs(self, request: Request) -> int:
        """How many are drawn."""
        return request.params.n

    def _logprobs(self, request: Request) -> int | None:
        """What is to be said of drawn tokens: None, or how many alternatives."""
        return request.params.logprobs

    def _births(self, request: Request, seq: Sequence) -> int:
        """All outputs at the end of the prompt, one ever after."""
        return self._outputs(request) if len(seq.tokens) == seq.prompt_len else 1

    def _sample_on_host(self, request: Request, seq: Sequence, out: FeedOutput) -> RowResult:
        """The caller's processors on the whole row, then the same pipeline the back ends run. Raises ProcessorError."""
        raw = torch.from_numpy(np.frombuffer(out.logits, dtype="<f4").copy())[None]
        history = History(request.prompt, seq.output)
        spec = RowSpec(
            params=request.params.replace(logprobs=self._logprobs(request)),
            keys=[key(request.seed, seq.index + i) for i in range(self._births(request, seq))],
            tokens=seq.tokens,
            prompt_len=seq.prompt_len,
            stop_ids=sorted(request.stop_ids),
            mu=seq.state,
            mask=b"" if seq.constraint is None else seq.constraint.masks(),
        )
        (result,) = sample(apply_processors(request.processors, raw, history), [spec], raw)
        if result.error:
            raise ProcessorError(result.error)
        return result
