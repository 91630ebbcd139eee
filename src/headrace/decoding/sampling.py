"""Greedy decoding and sampling, with `n` parallel outputs that share their prompt, and best of several outputs."""

import itertools
from functools import cache

from headrace.data.params import DRAWN
from headrace.data.plan import Answer, AnyWant, Drawn, Each, Feed, LogitRow, Logits, Reject, Sample, TokenLogprob, Verify, Where
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
            from headrace.decoding.host import verify_by_rejection  # torch

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
