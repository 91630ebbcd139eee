"""Beam search under Whisper's rules for timestamps.

It differs from `BeamSearch` as openai-whisper does. A score sums the log-probabilities among the allowed tokens, after the
comparison of all timestamps with the best text. Every end token before the last kept candidate counts. The search stops at
`beam_width` ended hypotheses; at the length limit unfinished ones take the places that are left. The rank is the mean
log-probability by the tokens before the end token.

Exactness: the tokens of openai-whisper's beam search (patience 1), but for nearly equal candidates.

Source: `BeamSearchDecoder` and `MaximumLikelihoodRanker` of openai-whisper.
"""

import math

from headrace.data.pairing import SPEECH_BEAMS
from headrace.data.plan import AnyWant, Drawn, Feed, Sample
from headrace.data.types import Request, Sequence
from headrace.decoding.base import Outputs
from headrace.decoding.beam import BeamCandidate, Beams, BeamSearch


class SpeechBeamSearch(BeamSearch):
    honours = SPEECH_BEAMS

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        """The best tokens, one more than beams, as one of them may be the end token. The drawn token has no effect."""
        return (Sample(logprobs=self.params.beam_width + 1),) if last else ()

    def done(self, request: Request) -> bool:
        """Collect ended hypotheses, those with an end token first; True if there are enough, or none goes on."""
        beams: Beams = request.state
        ended = beams.finished[0]
        for seq in sorted(request.finished, key=lambda seq: (not self._closed(seq), -seq.decode.score)):
            if len(ended) < self.params.beam_width:
                ended.append(seq)
        request.finished = []
        beams.ended[0] = len(ended) == self.params.beam_width or not request.seqs
        return beams.ended[0]

    def _closed(self, seq: Sequence) -> bool:
        return seq.text.finish_reason == "stop"

    def _rank(self, seq: Sequence) -> float:
        return seq.decode.score / max(len(seq.tokens) - seq.prompt_len - self._closed(seq), 1)

    def _candidates(self, request: Request, outputs: Outputs, used: dict[int, int]) -> list[BeamCandidate]:
        """Every continuation of the answers, best first; ties go to the earlier hypothesis, then to its likelier token."""
        candidates = []
        for parent, (seq, (answer,)) in enumerate(outputs):
            if not isinstance(answer, Drawn):
                continue  # no token is allowed, so it is dropped
            (best,) = answer.logprobs
            for token, logprob in zip(best.top_ids, best.top_logprobs, strict=True):
                if logprob > -math.inf:
                    score = seq.decode.score + logprob
                    candidates.append(BeamCandidate(parent, token, score, score))
        candidates.sort(key=lambda candidate: -candidate.rank)
        return candidates

    def _keep(self, request: Request, seq: Sequence, candidates: list[BeamCandidate]) -> list[BeamCandidate]:
        """The best candidates, until `beam_width` go on."""
        kept: list[BeamCandidate] = []
        going = 0
        for candidate in candidates:
            if going == self.params.beam_width:
                break
            kept.append(candidate)
            going += candidate.token not in request.stop_ids
        return kept
