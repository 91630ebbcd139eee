"""Beam search and diverse beam search: hypotheses share their blocks and run in the same loop as all other methods.

Exactness: greedy for width 1; for widths of V**(T-1) and more the best of all V**T sequences. In between it keeps the
`beam_width` likeliest prefixes, which is not an exact MAP search. Scores are sums of raw log-probabilities in float64, as a
temperature would change which hypothesis wins.

Source: Vijayakumar et al., "Diverse Beam Search", arXiv 1610.02424.
"""

from dataclasses import dataclass, field

from headrace.data.pairing import BEAMS
from headrace.data.params import BeamSearchParams
from headrace.data.plan import AnyWant, Feed, Ranked, Top
from headrace.data.types import Child, Request, Sequence
from headrace.decoding.base import Outputs, Strategy

__all__ = ["BeamSearch", "BeamSearchParams"]


@dataclass(frozen=True, slots=True)
class BeamCandidate:
    """A live hypothesis and one next token. rank: the score minus the diversity penalty; candidates are chosen by it."""

    parent: int  # place among the group's live sequences
    token: int
    score: float
    rank: float


@dataclass(slots=True)
class Beams:
    """State of one request: per group, its finished hypotheses, best first, and whether the group has ended."""

    finished: list[list[Sequence]] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)


class BeamSearch(Strategy):
    """Keeps `beam_width` hypotheses alive; a step's children are the best continuations over all of them."""

    streams = False  # which hypothesis wins is known at the end
    drops_failed = True
    honours = BEAMS

    def __init__(self, params: BeamSearchParams) -> None:
        self.params = params
        self.group_width = params.beam_width // params.groups

    def width(self, request: Request) -> int:
        return self.params.beam_width

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        """The best tokens, and the best that end nothing: enough for a group's `group_width` candidates that go on, whatever
        ends and whatever earlier groups took."""
        taken = 2 * (self.params.beam_width - self.group_width)
        return (Top(self.group_width + taken, live=bool(request.stop_ids)),) if last else ()

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        """The children of each live hypothesis, chosen group by group."""
        if request.state is None:
            request.state = Beams([[] for _ in range(self.params.groups)], [False] * self.params.groups)
        children: list[list[Child]] = [[] for _ in outputs]
        used: dict[int, int] = {}
        for group in range(self.params.groups):
            members = [i for i, (seq, _) in enumerate(outputs) if seq.decode.state in (None, group)]
            if request.state.ended[group] or not members:
                continue
            candidates = self._candidates(request, [outputs[i] for i in members], used)
            for candidate in self._keep(request, outputs[members[0]][0], candidates):
                children[members[candidate.parent]].append(
                    Child(token=candidate.token, index=0, score=candidate.score, state=group)
                )
                used[candidate.token] = used.get(candidate.token, 0) + 1
        return children

    def done(self, request: Request) -> bool:
        """Move finished hypotheses to their group and drop those that can no longer win; True if every group has ended."""
        beams: Beams = request.state
        for seq in request.finished:
            beams.finished[seq.decode.state].append(seq)
        request.finished = []
        for group, pool in enumerate(beams.finished):
            pool.sort(key=self._rank, reverse=True)
            del pool[self.group_width :]
            live = [seq for seq in request.seqs if seq.decode.state == group]
            beams.ended[group] = beams.ended[group] or not live or self._settled(request, pool, live)
        return all(beams.ended)

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        """The n best finished hypotheses of all groups, best first, with their normalised scores."""
        beams: Beams = request.state or Beams()
        everyone = sorted((seq for pool in beams.finished for seq in pool), key=self._rank, reverse=True)
        return [(seq, self._rank(seq)) for seq in everyone[: self.params.n]]

    def _rank(self, seq: Sequence) -> float:
        return self.params.normalised(seq.decode.score, len(seq.tokens) - seq.prompt_len)

    def _candidates(self, request: Request, outputs: Outputs, used: dict[int, int]) -> list[BeamCandidate]:
        """Every continuation of the answers, best first; ties go to the earlier hypothesis, then to the lower token id."""
        candidates = []
        for parent, (seq, (answer,)) in enumerate(outputs):
            if not isinstance(answer, Ranked):
                continue  # its grammar has failed, so it is dropped
            early = len(seq.tokens) - seq.prompt_len < self.params.min_tokens
            for token, logprob in zip(answer.ids, answer.logprobs, strict=True):
                if early and token in request.stop_ids:
                    continue
                score = seq.decode.score + logprob
                rank = score - self.params.diversity_penalty * used.get(token, 0)
                candidates.append(BeamCandidate(parent, token, score, rank))
        candidates.sort(key=lambda c: (-c.rank, c.parent, c.token))
        return candidates

    def _keep(self, request: Request, seq: Sequence, candidates: list[BeamCandidate]) -> list[BeamCandidate]:
        """The best candidates, until the group has `group_width` that go on. End tokens count only among the first
        `group_width` candidates; at the last step nothing else is kept."""
        width = self.group_width
        last = len(seq.tokens) - seq.prompt_len + 1 >= self.params.max_tokens
        kept: list[BeamCandidate] = []
        live = 0
        for place, candidate in enumerate(candidates):
            if live == width or (last and place == width):
                break
            if candidate.token in request.stop_ids:
                if place < width:
                    kept.append(candidate)
                continue
            kept.append(candidate)
            live += 1
        return kept

    def _settled(self, request: Request, pool: list[Sequence], live: list[Sequence]) -> bool:
        """Whether no live hypothesis of a group can still enter its finished ones."""
        if len(pool) < self.group_width:
            return False
        if self.params.early_stopping is True:
            return True
        length = len(live[0].tokens) - live[0].prompt_len
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.params.max_tokens
        best = max(seq.decode.score for seq in live)
        return self.params.normalised(best, length) <= self._rank(pool[-1])
