"""A step in torch: feeds and wants in, answers from logits out. Only rows with a want go through the head."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

import torch

from headrace.backends.eager.live import EagerLive
from headrace.data.plan import (
    Align,
    Answer,
    Answers,
    AnyWant,
    Classify,
    Drawn,
    Each,
    Failed,
    Feed,
    LogitRow,
    Logits,
    Pool,
    Propose,
    Ranked,
    Reject,
    Sample,
    Score,
    Scores,
    Top,
    Verify,
    Where,
)
from headrace.ops.contrast import combine
from headrace.ops.keys import Purpose, key, round_key
from headrace.ops.logprobs import best_tokens, token_logprobs
from headrace.ops.penalties import TokenCounts, ban, check_mask, mask
from headrace.ops.processing import permitted
from headrace.ops.rejection import draw_draft, verify
from headrace.ops.sampling import RowResult, RowSpec, reported_rows, sample
from headrace.ops.trees import child, paths
from headrace.runner.wants import BROKEN_LOGITS, NOTHING_MAY_COME, append_live, logit_rows, named_rows


@dataclass(slots=True)
class Fed:
    """A feed of a step. first: its first row of logits. root: the row of its last known token, before those of its nodes."""

    feed: Feed
    live: EagerLive
    first: int
    root: int


@dataclass(slots=True)
class Place:
    """Position of an answer among those of a step."""

    among: list[Any]
    at: int

    def put(self, answer: Answer) -> None:
        self.among[self.at] = answer


@dataclass(slots=True)
class Walk:
    """A draft during verification: the current node (-1: the last known token), and the tokens sampled so far."""

    fed: Fed
    want: Verify
    place: Place
    drawn: Drawn = field(default_factory=lambda: Drawn(()))
    node: int = -1
    path: list[int] = field(default_factory=list)  # the tokens from the root to the node


@dataclass(slots=True)
class Ranking:
    """A Top want on one row of logits. mask: allowed tokens, empty for all."""

    want: Top
    row: int
    mask: bytes
    stop_ids: list[int]
    place: Place


class EagerStep:
    """A step of a program in torch. It collects the wants of all feeds and computes them together."""

    def __init__(self) -> None:
        self.fed: list[Fed] = []
        # Rows of the step that need logits, ascending.
        self.index: list[int] = []
        # [len(index), vocabulary] after the step has run.
        self.logits = torch.empty(0)
        self._amateurs: list[tuple[Fed, EagerStep]] = []
        self._rows = 0
        # Sampling parameters, row of logits, place of the answer.
        self._draws: list[tuple[RowSpec, int, Place]] = []
        self._tops: list[Ranking] = []
        self._walks: list[Walk] = []

    def draw_each(self, feeds: Sequence[Feed], lives: Sequence[EagerLive]) -> bool:
        """There is no short way in torch."""
        return False

    def drawn(self) -> list[Answers]:
        """There is no short way in torch."""
        return []

    def feed(self, feed: Feed, live: EagerLive, amateur: "EagerStep | None" = None) -> None:
        """Add a feed and its wants. With `amateur` its logits are combined with the rows of the same slot in that step."""
        self.feed_for_rows(feed, live)
        if amateur is not None:
            self._amateurs.append((self.fed[-1], amateur))

    def feed_for_rows(self, feed: Feed, live: EagerLive) -> None:
        """Add a feed whose rows of logits are combined with another model's step."""
        end = self._rows + feed.count + len(feed.nodes)
        skipped = end - self._rows - logit_rows(feed)
        self.fed.append(Fed(feed, live, len(self.index), len(self.index) + feed.count - skipped - 1))
        self.index += range(self._rows + skipped, end)
        self._rows = end

    @torch.inference_mode()
    def answers(self) -> list[list[Any]]:
        """The answers of each feed, in the order of its wants; None for wants that are answered from hidden rows."""
        for fed, amateur in self._amateurs:
            self._combine(fed, amateur)
        answers: list[list[Any]] = [[None] * len(fed.feed.wants) for fed in self.fed]
        for fed, places in zip(self.fed, answers, strict=True):
            for at, want in enumerate(fed.feed.wants):
                self._ask(fed, want, Place(places, at))
        if self._tops:
            _rank(self._tops, self.logits)
        for (_, _, place), result in zip(self._draws, self._draw([draw[:2] for draw in self._draws]), strict=True):
            place.put(Failed(result.error) if result.error else _drawn(result))
        while self._walks:
            self._go_on()
        return [[Each(tuple(one)) if isinstance(one, list) else one for one in each] for each in answers]

    def _combine(self, fed: Fed, amateur: "EagerStep") -> None:
        """Combine the rows of a feed with those of the amateur's step."""
        other = next(each for each in amateur.fed if each.feed.slot == fed.feed.slot)
        end, rule = fed.first + logit_rows(fed.feed), fed.live.params.combined
        if end == fed.first:
            return
        assert rule is not None
        mine, theirs = self.logits[fed.first : end], amateur.logits[other.first : other.first + end - fed.first]
        may = torch.cat([self.logits[fed.first : fed.root], permitted_rows(fed, self.logits[fed.root : end])])
        name, a, b = rule
        self.logits[fed.first : end] = combine(name, mine, theirs, a, b, may)

    def _ask(self, fed: Fed, want: AnyWant, place: Place) -> None:
        match want:
            case Score():
                place.put(_score(fed, want, self.logits[fed.root - fed.feed.count + 1 : fed.root + 1]))
            case Verify():
                self._walks.append(Walk(fed, want, place))
            case Reject():
                place.put(self._reject(fed, want))
            case Propose():
                place.put(self._propose(fed, want))
            case Sample() | Top() | Logits():
                nodes = named_rows(fed.feed, want)
                if want.at is Where.LAST:
                    self._ask_row(fed, want, fed.root, [], place, -1)
                    return
                place.among[place.at] = each = [None] * len(nodes)
                before = [[], *paths(fed.feed.nodes, fed.feed.parents)]
                for at, node in enumerate(nodes):
                    self._ask_row(fed, want, fed.root + 1 + node, before[node + 1], Place(each, at), node)
            case Pool() | Classify() | Align():
                pass  # answered from other rows by the runner
            case _:
                assert_never(want)

    def _ask_row(self, fed: Fed, want: Sample | Top | Logits, row: int, path: list[int], place: Place, node: int) -> None:
        match want:
            case Sample():
                keys = range(want.child, want.child + want.n)
                self._draws.append((self._spec(fed, keys, want.logprobs, path, node, want.mu), row, place))
            case Top():
                self._top(fed, want, row, place, node)
            case Logits():
                place.put(LogitRow(self.logits[row].float().cpu().numpy().astype("<f4").tobytes()))

    def _propose(self, fed: Fed, want: Propose) -> Answer:
        found = draw_draft(self.logits[fed.root].float(), self._round_spec(fed, want.child, None, [], -1, want.known))
        if found is None:
            return Failed(BROKEN_LOGITS)
        token, q = found
        return Drawn((token,), q=q.cpu().numpy().astype("<f4").tobytes())

    def _reject(self, fed: Fed, want: Reject) -> Answer:
        """Verify a chain by the request's rejection rule."""
        chain = list(fed.feed.nodes)
        raw = self.logits[fed.root : fed.root + 1 + len(chain)].float()
        specs = [self._round_spec(fed, want.child, want.logprobs, chain[:at], at - 1) for at in range(len(chain) + 1)]
        accepted, token = verify(raw, specs, chain, list(fed.feed.q) or None)
        if token is None and not accepted:
            return Failed("no token can be drawn: the logits are not finite, or the constraints together exclude every token")
        tokens = (*chain[:accepted], *(() if token is None else (token,)))
        out = Drawn(tokens, tuple(range(len(tokens) - 1)))
        if want.logprobs is not None:
            rows = reported_rows(raw, raw, specs)
            out.logprobs = tuple(token_logprobs(rows[: len(tokens)], torch.tensor(tokens), want.logprobs))
        return out

    def _round_spec(self, fed: Fed, child: int, logprobs: int | None, path: list[int], node: int, drafted: int = 0) -> RowSpec:
        """How a row of a round of the second rule is processed; `drafted` of the slot's tokens are the round's own."""
        live = fed.live
        spec = self._spec(fed, (), logprobs, path, node)
        return replace(spec, keys=[round_key(live.seed, len(live) - drafted, child)], purpose=Purpose.DRAFT, mu=None)

    def _top(self, fed: Fed, want: Top, row: int, place: Place, node: int) -> None:
        """Mask tokens that the grammar forbids. Log-probabilities are those before the mask."""
        bits = b""
        if fed.live.params.constrained:
            bits = _allowed(fed.feed, node)
            try:
                check_mask(bits, self.logits.shape[-1])
            except ValueError as error:
                place.put(Failed(str(error)))
                return
        self._tops.append(Ranking(want, row, bits, fed.live.stop_ids, place))

    def _spec(
        self,
        fed: Fed,
        children: Iterable[int],
        logprobs: int | None,
        path: list[int],
        node: int,
        mu: float | None = None,
    ) -> RowSpec:
        live, params = fed.live, fed.live.params
        if logprobs != params.logprobs:  # the strategy needs another number
            params = params.replace(logprobs=logprobs, beam=None)
        return RowSpec(
            params=params,
            keys=[key(live.seed, child) for child in children],
            tokens=live.tokens,
            prompt_len=live.prompt_len,
            path=path,
            stop_ids=live.stop_ids,
            counts=_counts(live, self.logits.shape[-1], self.logits.device),
            mu=mu,
            mask=_allowed(fed.feed, node),
        )

    def _draw(self, draws: list[tuple[RowSpec, int]]) -> list[RowResult]:
        """Sample at these rows in one call."""
        if not draws:
            return []
        rows = [row for _, row in draws]
        logits = self.logits if rows == list(range(len(self.logits))) else self.logits[rows]
        return sample(logits, [spec for spec, _ in draws])

    def _go_on(self) -> None:
        """Sample at the current node of each draft, and move to the child with the sampled token, if there is one."""
        draws = []
        for walk in self._walks:
            mu = walk.drawn.mus[-1] if walk.drawn.mus else walk.want.mu
            spec = self._spec(walk.fed, (walk.want.child,), walk.want.logprobs, list(walk.path), walk.node, mu)
            draws.append((spec, walk.fed.root + 1 + walk.node))
        going = []
        for walk, result in zip(self._walks, self._draw(draws), strict=True):
            drawn = walk.drawn
            if result.error:  # where something was drawn the walk ends before its last node (ops.trees.walk)
                drawn.path = drawn.path[:-1]
                walk.place.put(drawn if drawn.tokens else Failed(result.error))
                continue
            drawn.tokens += tuple(result.tokens)
            drawn.logprobs += tuple(result.logprobs)
            drawn.mus += tuple(result.mus)
            walk.place.put(drawn)
            if (found := child(walk.fed.feed.nodes, walk.fed.feed.parents, walk.node, drawn.tokens[-1])) is not None:
                walk.node = found
                walk.path.append(drawn.tokens[-1])
                drawn.path += (found,)
                going.append(walk)
        self._walks = going


def _drawn(result: RowResult) -> Drawn:
    return Drawn(tuple(result.tokens), logprobs=tuple(result.logprobs), mus=tuple(result.mus))


def _allowed(feed: Feed, node: int) -> bytes:
    """Allowed tokens after a node (-1: the last known token), one bit each."""
    width = len(feed.allowed) // (1 + len(feed.nodes))
    return feed.allowed[(node + 1) * width : (node + 2) * width]


def permitted_rows(fed: Fed, logits: torch.Tensor) -> torch.Tensor:
    """Logits [1 + nodes, vocabulary] of a feed's last known token and its nodes, -inf for forbidden tokens."""
    feed, live, rows = fed.feed, fed.live, []
    for node, path in enumerate([[], *paths(feed.nodes, feed.parents)], -1):
        spec = RowSpec(live.params, [], live.tokens, live.prompt_len, path, live.stop_ids, mask=_allowed(feed, node))
        rows.append(permitted(logits[node + 1 : node + 2], spec))
    return torch.cat(rows)


def _counts(live: EagerLive, vocab_size: int, device: torch.device) -> TokenCounts | None:
    """Penalty counts of a sequence, updated; None if no penalty needs them."""
    params = live.params
    if params.repetition_penalty == 1.0 and not params.frequency_penalty and not params.presence_penalty:
        return None
    if live.counts is None:
        live.counts = TokenCounts(vocab_size, live.tokens[: live.prompt_len], device=device)
    live.counts.extend(live.tokens[live.prompt_len + live.counts.length :])
    return live.counts


def _score(fed: Fed, want: Score, logits: torch.Tensor) -> Scores:
    """The answer to Score: row p scores token p + 1, if that token is known."""
    targets = fed.live.tokens[fed.feed.start + 1 : fed.feed.start + fed.feed.count + 1]
    return Scores(tuple(token_logprobs(logits[: len(targets)], torch.tensor(targets), want.logprobs)) if targets else ())


def _rank(tops: list[Ranking], logits: torch.Tensor) -> None:
    """The most probable tokens of each row with log-probabilities, best first, lowest id on ties."""
    rows = logits[[top.row for top in tops]].float()
    permitted = rows
    if held := [at for at, top in enumerate(tops) if top.mask]:
        permitted = rows.clone()
        permitted[held] = mask(rows[held], [tops[at].mask for at in held])
    found: list[Ranked] = []
    for top, (ids, logprobs) in zip(tops, best_tokens(rows, permitted, max(top.want.k for top in tops)), strict=True):
        found.append(Ranked(ids[: top.want.k], logprobs[: top.want.k]))
        top.place.put(found[-1] if ids else Failed(NOTHING_MAY_COME if top.mask else BROKEN_LOGITS))
    if live := [at for at, top in enumerate(tops) if top.want.live]:
        going = ban(permitted[live], [[token for token in tops[at].stop_ids if token < rows.shape[-1]] for at in live])
        most = max(tops[at].want.k for at in live)
        for at, (ids, logprobs) in zip(live, best_tokens(rows[live], going, most), strict=True):
            k = tops[at].want.k
            append_live(found[at], ids[:k], logprobs[:k])
