"""Greedy decoding and sampling, with `n` parallel outputs that share their prompt."""

from functools import cache

from headrace.data.params import DRAWN
from headrace.data.plan import Answer, AnyWant, Drawn, Each, Feed, LogitRow, Logits, Reject, Sample, Verify, Where
from headrace.data.types import Child, Request, Sequence
from headrace.decoding.base import Outputs, Strategy


@cache
def _one_token(child: int, logprobs: int | None) -> tuple[Sample]:
    """The want of nearly every feed; one object for all sequences."""
    return (Sample(child, logprobs=logprobs),)


class Sampling(Strategy):
    """One token a step for every output. Exactness: bitwise for a given seed, whatever the batch.

    The token is argmax(processed logit + Gumbel noise of (seed, child, position, token)), drawn where the logits are. With `n`
    > 1 the prompt's sequence becomes n children, once; child i draws the tokens of a single run with the noise key key(seed,
    i).
    """

    speculates = True
    honours = DRAWN | {
        "n", "logprobs", "logprobs_mode", "prompt_logprobs", "mirostat_tau", "mirostat_eta", "verification", "processors",
        "exit_threshold", "cascade_threshold",
    }  # fmt: skip

    def width(self, request: Request) -> int:
        return self._outputs(request)

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        """A sampled token for each output that starts here, the verification of the draft, or whole rows of logits for the
        caller's processors."""
        if not last:
            return ()
        index, draft, mu = seq.decode.index, seq.decode.draft, seq.decode.state
        if request.processors:
            return (Logits(Where.TREE if draft else Where.LAST),)
        births, logprobs = self._births(request, seq), self._logprobs(request)
        if draft is None:
            return _one_token(index, logprobs) if births == 1 and mu is None else (Sample(index, births, logprobs, mu),)
        return (Reject(index, logprobs),) if request.params.rejects else (Verify(index, logprobs, mu),)

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [self._children(request, seq, answers[0]) for seq, answers in outputs]

    def _children(self, request: Request, seq: Sequence, answer: Answer) -> list[Child]:
        """The children of one sequence. `state` is mirostat's, None if it is off."""
        index, draft = seq.decode.index, seq.decode.draft
        drawn = answer if isinstance(answer, Drawn) else self._draw(request, seq, answer)
        tokens, mus = drawn.tokens, drawn.mus
        if draft is None and len(tokens) == 1:
            return [Child(token=tokens[0], index=index, logprobs=drawn.logprobs, state=mus[0] if mus else None)]
        if draft is not None:
            return [Child(drawn.path, tokens[-1], index=index, state=mus[-1] if mus else None, logprobs=drawn.logprobs)]
        return [
            Child(token=token, index=index + i, logprobs=drawn.logprobs[i : i + 1], state=mu)
            for i, (token, mu) in enumerate(zip(tokens, mus or (None,) * len(tokens), strict=True))
        ]

    def _draw(self, request: Request, seq: Sequence, answer: Answer) -> Drawn:
        """Draw on the host from whole rows of logits, after the caller's processors."""
        from headrace.decoding.host import draw, draw_early  # torch

        if isinstance(answer, LogitRow) and answer.other:
            return draw_early(request, seq, answer, self._logprobs(request))
        answers = answer.answers if isinstance(answer, Each) else (answer,)
        # A node whose row failed keeps its place.
        rows = [one.row if isinstance(one, LogitRow) else b"" for one in answers]
        rejects = seq.decode.draft is not None and request.params.rejects
        if rejects:
            from headrace.decoding.rejecting import verify_by_rejection  # torch

            return verify_by_rejection(request, seq, rows, self._logprobs(request))
        return draw(request, seq, rows, self._births(request, seq), self._logprobs(request))

    def _outputs(self, request: Request) -> int:
        """Number of outputs that are drawn."""
        return request.params.n

    def _logprobs(self, request: Request) -> int | None:
        """Alternatives to report per token; None: no log-probabilities."""
        return request.params.logprobs

    def _births(self, request: Request, seq: Sequence) -> int:
        """Outputs that start here: all at the end of the prompt, one later."""
        return self._outputs(request) if len(seq.tokens) == seq.prompt_len else 1
