"""From logits to what each feed asked for: rows are picked first, so that only they go through the head."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

import torch

from headrace.data.plan import (
    Answer,
    AnyWant,
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
    StepPlan,
    Top,
    Verify,
    Where,
)
from headrace.ops.logprobs import best_tokens, token_logprobs
from headrace.ops.noise import Purpose, key
from headrace.ops.penalties import TokenCounts, ban, check_mask, mask
from headrace.ops.processing import permitted
from headrace.ops.rejection import draw_draft, round_key, verify
from headrace.ops.sampling import RowResult, RowSpec, process, sample
from headrace.ops.trees import child, paths
from headrace.runner.slots import Slot, Slots


@dataclass(slots=True)
class Wanted:
    """Which of the step's rows need logits, and where in them each feed's rows are."""

    index: torch.Tensor  # [r] int64 row numbers, ascending
    first: list[int]  # per feed: where its logits begin; its rows are consecutive
    roots: list[int]  # per feed: that of its last known token; its nodes' rows follow


def rows_wanted(plan: StepPlan) -> Wanted:
    """The rows that any want of the plan names: a feed's last known row, that and its nodes, or all of them."""
    index: list[int] = []
    first, roots = [], []
    start = 0
    for feed in plan.feeds:
        end = start + feed.count + len(feed.nodes)
        skipped = end - start - logit_rows(feed)
        first.append(len(index))
        roots.append(len(index) + feed.count - skipped - 1)
        index += range(start + skipped, end)
        start = end
    return Wanted(torch.tensor(index, dtype=torch.int64), first, roots)


def logit_rows(feed: Feed) -> int:
    """How many of a feed's last rows need logits."""
    wants = [want for want in feed.wants if not isinstance(want, Pool)]  # which reads hidden rows
    if not wants:
        return 0
    return (feed.count if any(isinstance(want, Score) for want in wants) else min(feed.count, 1)) + len(feed.nodes)


def named_rows(feed: Feed, want: Sample | Top | Logits) -> range:
    """The rows that a want names: -1 the last known token, from 0 on the nodes."""
    first = 0 if want.at is Where.NODES else -1
    return range(first, 0 if want.at is Where.LAST else len(feed.nodes))


@dataclass(slots=True)
class Place:
    """Where an answer is to stand."""

    among: list[Any]
    at: int

    def put(self, answer: Answer) -> None:
        self.among[self.at] = answer


@dataclass(slots=True)
class Walk:
    """A draft that is being verified: the node it has come to (-1: the last known token), and what was drawn so far."""

    feed: Feed
    want: Verify
    root: int  # row of the last known token
    place: Place
    drawn: Drawn = field(default_factory=lambda: Drawn(()))
    node: int = -1
    path: list[int] = field(default_factory=list)  # the tokens from the root to the node


@dataclass(slots=True)
class Ranking:
    """The likeliest tokens of a row of logits."""

    want: Top
    row: int
    mask: bytes  # what may come; empty: anything
    stop_ids: list[int]
    place: Place


class Answering:
    """Carries out the wants of one plan: collected feed by feed, then computed together."""

    def __init__(self, plan: StepPlan, slots: Slots, logits: torch.Tensor, rows: Wanted) -> None:
        self.logits = logits
        self.slots = slots
        self.answers: list[list[Any]] = [[None] * len(feed.wants) for feed in plan.feeds]
        self._draws: list[tuple[RowSpec, int, Place]] = []  # how to draw, row of logits, for whom
        self._tops: list[Ranking] = []
        self._walks: list[Walk] = []
        for feed, root, answers in zip(plan.feeds, rows.roots, self.answers, strict=True):
            for at, want in enumerate(feed.wants):
                self._ask(feed, want, root, Place(answers, at))

    def give(self) -> list[list[Any]]:
        """What each feed's wants got, in their order; None where hidden rows are pooled."""
        if self._tops:
            _rank(self._tops, self.logits)
        for (_, _, place), result in zip(self._draws, self._draw([draw[:2] for draw in self._draws]), strict=True):
            place.put(Failed(result.error) if result.error else _drawn(result))
        while self._walks:
            self._go_on()
        return [[Each(tuple(one)) if isinstance(one, list) else one for one in answers] for answers in self.answers]

    def _ask(self, feed: Feed, want: AnyWant, root: int, place: Place) -> None:
        match want:
            case Score():
                place.put(_score(feed, self.slots[feed.slot], want, self.logits[root - feed.count + 1 : root + 1]))
            case Verify():
                self._walks.append(Walk(feed, want, root, place))
            case Reject():
                place.put(self._reject(feed, want, root))
            case Propose():
                place.put(self._propose(feed, want, root))
            case Sample() | Top() | Logits():
                nodes = named_rows(feed, want)
                if want.at is Where.LAST:
                    self._ask_row(feed, want, root, [], place, -1)
                    return
                place.among[place.at] = each = [None] * len(nodes)
                before = [[], *paths(feed.nodes, feed.parents)]
                for at, node in enumerate(nodes):
                    self._ask_row(feed, want, root + 1 + node, before[node + 1], Place(each, at), node)
            case Pool():
                pass  # filled in where the hidden rows are
            case _:
                assert_never(want)

    def _ask_row(self, feed: Feed, want: Sample | Top | Logits, row: int, path: list[int], place: Place, node: int) -> None:
        match want:
            case Sample():
                keys = range(want.child, want.child + want.n)
                self._draws.append((self._spec(feed, keys, want.logprobs, path, node, want.mu), row, place))
            case Top():
                self._top(feed, want, row, place, node)
            case Logits():
                place.put(LogitRow(self.logits[row].float().cpu().numpy().astype("<f4").tobytes()))

    def _propose(self, feed: Feed, want: Propose, root: int) -> Answer:
        found = draw_draft(self.logits[root].float(), self._round_spec(feed, want.child, None, [], -1, want.known))
        if found is None:
            return Failed(BROKEN_LOGITS)
        token, q = found
        return Drawn((token,), q=q.cpu().numpy().astype("<f4").tobytes())

    def _reject(self, feed: Feed, want: Reject, root: int) -> Answer:
        """A chain by the rule that the request names."""
        chain, raw = list(feed.nodes), self.logits[root : root + 1 + len(feed.nodes)].float()
        specs = [self._round_spec(feed, want.child, want.logprobs, chain[:at], at - 1) for at in range(len(chain) + 1)]
        accepted, token = verify(raw, specs, chain, list(feed.q) or None)
        if token is None and not accepted:
            return Failed("no token can be drawn: logits are broken, or what is allowed together rules out every one")
        tokens = (*chain[:accepted], *(() if token is None else (token,)))
        out = Drawn(tokens, tuple(range(len(tokens) - 1)))
        if want.logprobs is not None:
            rows = raw if specs[0].params.logprobs_mode == "raw" else process(raw, specs)
            out.logprobs = tuple(token_logprobs(rows[: len(tokens)], torch.tensor(tokens), want.logprobs))
        return out

    def _round_spec(
        self, feed: Feed, child: int, logprobs: int | None, path: list[int], node: int, drafted: int = 0
    ) -> RowSpec:
        """How a row of a round of the second rule is processed; `drafted` of the slot's tokens are the round's own."""
        slot = self.slots[feed.slot]
        spec = self._spec(feed, (), logprobs, path, node)
        return replace(spec, keys=[round_key(slot.seed, len(slot) - drafted, child)], purpose=Purpose.DRAFT, mu=None)

    def _top(self, feed: Feed, want: Top, row: int, place: Place, node: int) -> None:
        """A grammar leaves fewer tokens to choose from and their log-probabilities as they were."""
        slot = self.slots[feed.slot]
        bits = b""
        if slot.params.structured_outputs is not None:
            bits = _allowed(feed, node)
            try:
                check_mask(bits, self.logits.shape[-1])
            except ValueError as error:
                place.put(Failed(str(error)))
                return
        self._tops.append(Ranking(want, row, bits, slot.stop_ids, place))

    def _spec(
        self,
        feed: Feed,
        children: Iterable[int],
        logprobs: int | None,
        path: list[int],
        node: int,
        mu: float | None = None,
    ) -> RowSpec:
        slot = self.slots[feed.slot]
        params = slot.params
        if logprobs != params.logprobs:  # the strategy's own wish
            params = params.replace(logprobs=logprobs)
        return RowSpec(
            params=params,
            keys=[key(slot.seed, child) for child in children],
            tokens=slot.tokens,
            prompt_len=slot.prompt_len,
            path=path,
            stop_ids=slot.stop_ids,
            counts=_counts(slot, self.logits.shape[-1], self.logits.device),
            mu=mu,
            mask=_allowed(feed, node),
        )

    def _draw(self, draws: list[tuple[RowSpec, int]]) -> list[RowResult]:
        """Draw at these rows, all together."""
        if not draws:
            return []
        rows = [row for _, row in draws]
        logits = self.logits if rows == list(range(len(self.logits))) else self.logits[rows]
        return sample(logits, [spec for spec, _ in draws])

    def _go_on(self) -> None:
        """Draw at the node each walk has come to, and follow the child that was drawn, where there is one."""
        draws = []
        for walk in self._walks:
            mu = walk.drawn.mus[-1] if walk.drawn.mus else walk.want.mu
            spec = self._spec(walk.feed, (walk.want.child,), walk.want.logprobs, list(walk.path), walk.node, mu)
            draws.append((spec, walk.root + 1 + walk.node))
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
            if (found := child(walk.feed.nodes, walk.feed.parents, walk.node, drawn.tokens[-1])) is not None:
                walk.node = found
                walk.path.append(drawn.tokens[-1])
                drawn.path += (found,)
                going.append(walk)
        self._walks = going


def _drawn(result: RowResult) -> Drawn:
    return Drawn(tuple(result.tokens), logprobs=tuple(result.logprobs), mus=tuple(result.mus))


def _allowed(feed: Feed, node: int) -> bytes:
    """The bits of what may come after a node (-1: the last known token)."""
    width = len(feed.allowed) // (1 + len(feed.nodes))
    return feed.allowed[(node + 1) * width : (node + 2) * width]


def answer(plan: StepPlan, slots: Slots, logits: torch.Tensor, rows: Wanted) -> list[list[Any]]:
    """Carry out the wants. `logits` [r, V] are those of `rows.index`."""
    return Answering(plan, slots, logits, rows).give()


def permitted_rows(feed: Feed, slot: Slot, logits: torch.Tensor) -> torch.Tensor:
    """Logits [1 + nodes, V] of a feed's last known token and its nodes, -inf where a token may not come."""
    rows = []
    for node, path in enumerate([[], *paths(feed.nodes, feed.parents)], -1):
        spec = RowSpec(slot.params, [], slot.tokens, slot.prompt_len, path, slot.stop_ids, mask=_allowed(feed, node))
        rows.append(permitted(logits[node + 1 : node + 2], spec))
    return torch.cat(rows)


def _counts(slot: Slot, vocab_size: int, device: torch.device) -> TokenCounts | None:
    """The slot's penalty counts, brought up to date; None where no penalty needs them."""
    params = slot.params
    if params.repetition_penalty == 1.0 and not params.frequency_penalty and not params.presence_penalty:
        return None
    if slot.counts is None:
        slot.counts = TokenCounts(vocab_size, slot.tokens[: slot.prompt_len], device=device)
    slot.counts.extend(slot.tokens[slot.prompt_len + slot.counts.length :])
    return slot.counts


def _score(feed: Feed, slot: Slot, want: Score, logits: torch.Tensor) -> Scores:
    """Row p scores token p + 1, as far as that is known."""
    targets = slot.tokens[feed.start + 1 : feed.start + feed.count + 1]
    return Scores(tuple(token_logprobs(logits[: len(targets)], torch.tensor(targets), want.logprobs)) if targets else ())


def _rank(tops: list[Ranking], logits: torch.Tensor) -> None:
    """The likeliest tokens of each row with their log-probabilities, best first, lowest id on ties."""
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
            add_live(found[at], ids[:k], logprobs[:k])


def add_live(ranked: Ranked, ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """List the best tokens that end nothing behind the best of all: those that are not among them come after them."""
    known = set(ranked.ids)
    more = [at for at, token in enumerate(ids) if token not in known]
    ranked.ids += tuple(ids[at] for at in more)
    ranked.logprobs += tuple(logprobs[at] for at in more)


NOTHING_MAY_COME = "no token can come: the grammar rules out every one"
BROKEN_LOGITS = "the model's logits are broken: no token has a probability; check the weights"
