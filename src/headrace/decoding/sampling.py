"""Greedy decoding and sampling, with `n` parallel outputs that share their prompt."""

from functools import cache

import numpy as np
import torch

from headrace.data.param_checks import DRAWN
from headrace.data.plan import FeedOutput, Want
from headrace.data.types import Child, Draft, Request, Sequence
from headrace.decoding.processors import History, ProcessorError, apply_processors
from headrace.decoding.rejecting import verify_by_rejection
from headrace.ops.noise import key
from headrace.ops.sampling import RowResult, RowSpec, sample
from headrace.ops.trees import paths, walk


@cache
def _one_token(child: int, logprobs: int | None) -> Want:
    """What nearly every feed wants; one for all sequences, which share it."""
    return Want(child=child, logprobs=logprobs)


class Sampling:
    """One token a step for every output. Exactness: bitwise for a given seed, whatever the batch (rules 5 and 12).

    The token is argmax(processed logit + Gumbel noise of (seed, child, position, token)), drawn where the logits are. With
    `n` > 1 the prompt's one sequence becomes n children, once; child i draws what a single run with the noise key
    key(seed, i) would.
    """

    streams = True
    speculates = True
    drops_failed = False
    honours = DRAWN | {
        "n", "logprobs", "logprobs_mode", "prompt_logprobs", "mirostat_tau", "mirostat_eta", "verification", "processors",
    }  # fmt: skip

    def width(self, request: Request) -> int:
        return self._outputs(request)

    def want(self, request: Request, seq: Sequence) -> Want:
        """A sampled token for each child still to be born, the draft's verification where there is one, or whole rows where
        the caller's processors come first."""
        if request.processors:
            return Want(kind="logits", rows="nodes" if seq.decode.draft else "last")
        births, logprobs = self._births(request, seq), self._logprobs(request)
        if seq.decode.draft is None and births == 1 and seq.decode.state is None:
            return _one_token(seq.decode.index, logprobs)
        kind, rows = ("reject" if request.params.rejects else "verify", "nodes") if seq.decode.draft else ("sample", "last")
        return Want(rows, kind, births, seq.decode.index, logprobs=logprobs, mu=seq.decode.state)

    def select(self, request: Request, outputs: list[tuple[Sequence, FeedOutput]]) -> list[list[Child]]:
        return [self._children(request, seq, out) for seq, out in outputs]

    def done(self, request: Request) -> bool:
        return False

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        return []

    def _children(self, request: Request, seq: Sequence, out: FeedOutput) -> list[Child]:
        """`state` is mirostat's, None where that is off."""
        if seq.decode.draft is None and not request.processors and len(out.tokens) == 1:  # most of the time
            return [
                Child(token=out.tokens[0], index=seq.decode.index, logprobs=out.logprobs, state=out.mus[0] if out.mus else None)
            ]
        drawn = out
        if request.processors and seq.decode.draft is not None and request.params.rejects:
            drawn = verify_by_rejection(request, seq, out, self._logprobs(request))
        elif request.processors:
            drawn = self._sample_on_host(request, seq, out)
        mus: tuple[float | None, ...] = drawn.mus or (None,) * len(drawn.tokens)
        if seq.decode.draft is not None:
            return [Child(drawn.path, drawn.tokens[-1], index=seq.decode.index, state=mus[-1], logprobs=drawn.logprobs)]
        return [
            Child(token=token, index=seq.decode.index + i, logprobs=drawn.logprobs[i : i + 1], state=mu)
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

    def _sample_on_host(self, request: Request, seq: Sequence, out: FeedOutput) -> FeedOutput:
        """The caller's processors on whole rows, then the same pipeline the back ends run, at each node the walk reaches.

        Raises ProcessorError.
        """
        draft = seq.decode.draft or Draft([], [])
        before = paths(draft.tokens, draft.parents)
        masks = b"" if seq.decode.constraint is None else seq.decode.constraint.masks(draft.tokens, draft.parents)
        width = len(masks) // (1 + len(draft.tokens))
        drawn = FeedOutput()

        def draw(node: int) -> int | None:
            spec = RowSpec(
                params=request.params.replace(logprobs=self._logprobs(request)),
                keys=[key(request.seed, seq.decode.index + i) for i in range(self._births(request, seq))],
                tokens=seq.tokens,
                prompt_len=seq.prompt_len,
                path=before[node] if node >= 0 else [],
                stop_ids=sorted(request.stop_ids),
                mu=drawn.mus[-1] if drawn.mus else seq.decode.state,
                mask=masks[(node + 1) * width : (node + 2) * width],
            )
            try:
                result = _sample_row(request, seq, spec, out.nodes[node].logits if node >= 0 else out.logits)
            except ProcessorError:
                if not drawn.tokens:
                    raise
                return None
            drawn.tokens += tuple(result.tokens)
            drawn.logprobs += tuple(result.logprobs)
            drawn.mus += tuple(result.mus)
            return result.tokens[0]

        drawn.path = tuple(walk(draft.tokens, draft.parents, draw))
        return drawn


def _sample_row(request: Request, seq: Sequence, spec: RowSpec, logits: bytes) -> RowResult:
    raw = torch.from_numpy(np.frombuffer(logits, dtype="<f4").copy())[None]
    processed = apply_processors(request.processors, raw, History(request.prompt, seq.output), [spec.path])
    (result,) = sample(processed, [spec], raw)
    if result.error:
        raise ProcessorError(result.error)
    return result
