"""From logits to what each feed asked for: rows are picked first, so that only they go through the head."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from headrace.data.plan import Feed, FeedOutput, StepPlan, Want
from headrace.ops.logprobs import best_tokens, token_logprobs
from headrace.ops.noise import Purpose, key
from headrace.ops.penalties import TokenCounts, ban, check_mask, mask
from headrace.ops.processing import permitted
from headrace.ops.rejection import draw_draft, round_key, verify
from headrace.ops.sampling import RowSpec, process, sample
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
        skipped = _skipped(feed)
        first.append(len(index))
        roots.append(len(index) + feed.count - skipped - 1)
        index += range(start + skipped, end)
        start = end
    return Wanted(torch.tensor(index, dtype=torch.int64), first, roots)


def _skipped(feed: Feed) -> int:
    """How many rows of a feed need no logits; wanted rows are always the last ones."""
    wants = [want for want in feed.wants if want.kind != "pool"]  # which reads hidden rows
    if any(want.rows == "all" for want in wants):
        return 0
    if not wants:
        return feed.count + len(feed.nodes)
    return max(feed.count - 1, 0)


@dataclass(slots=True)
class Walk:
    """A draft that is being verified: the node it has come to (-1: the last known token)."""

    feed: Feed
    want: Want
    root: int  # row of the last known token
    out: FeedOutput
    node: int = -1
    path: list[int] = field(default_factory=list)  # the tokens from the root to the node


@dataclass(slots=True)
class Top:
    """The likeliest tokens of a row of logits."""

    want: Want
    row: int
    mask: bytes  # what may come; empty: anything
    stop_ids: list[int]
    out: FeedOutput


class Answers:
    """Carries out the wants of one plan: collected feed by feed, then computed together."""

    def __init__(self, plan: StepPlan, slots: Slots, logits: torch.Tensor, wanted: Wanted) -> None:
        self.logits = logits
        self.slots = slots
        self.outputs = [FeedOutput() for _ in plan.feeds]
        self._draws: list[tuple[RowSpec, int, FeedOutput]] = []  # how to draw, row of logits, for whom
        self._tops: list[Top] = []
        self._walks: list[Walk] = []
        for feed, root, out in zip(plan.feeds, wanted.roots, self.outputs, strict=True):
            if any(want.rows == "nodes" and want.kind not in ("verify", "reject") for want in feed.wants):
                out.nodes = tuple(FeedOutput() for _ in feed.nodes)
            for want in feed.wants:
                self._ask(feed, want, root, out)

    def give(self) -> list[FeedOutput]:
        if self._tops:
            _top(self._tops, self.logits)
        if self._draws:
            self._draw()
        while self._walks:
            self._go_on()
        return self.outputs

    def _ask(self, feed: Feed, want: Want, root: int, out: FeedOutput) -> None:
        if want.kind == "score":
            _score(feed, self.slots[feed.slot], want, self.logits[root - feed.count + 1 : root + 1], out)
        elif want.kind == "verify":
            self._walks.append(Walk(feed, want, root, out))
        elif want.kind == "reject":
            self._reject(feed, want, root, out)
        elif want.rows == "nodes":
            if want.kind == "logits":
                self._ask_row(feed, want, root, [], out)
            for node, (path, each) in enumerate(zip(paths(feed.nodes, feed.parents), out.nodes, strict=True)):
                self._ask_row(feed, want, root + 1 + node, path, each, node)
        elif want.kind != "pool":
            self._ask_row(feed, want, root, [], out)

    def _ask_row(self, feed: Feed, want: Want, row: int, path: list[int], out: FeedOutput, node: int = -1) -> None:
        if want.kind == "sample":
            self._draws.append((self._spec(feed, want, path, node), row, out))
        elif want.kind == "top":
            self._top(feed, want, row, out, node)
        elif want.kind == "propose":
            spec = self._round_spec(feed, want, [], node, want.k)
            if (drawn := draw_draft(self.logits[row].float(), spec)) is not None:
                out.tokens, out.logits = (drawn[0],), drawn[1].cpu().numpy().astype("<f4").tobytes()
        elif want.kind == "logits":
            out.logits = self.logits[row].float().cpu().numpy().astype("<f4").tobytes()
        else:
            raise ValueError(f"this runner does not answer {want.kind!r}")

    def _reject(self, feed: Feed, want: Want, root: int, out: FeedOutput) -> None:
        """A chain by the rule that the request names."""
        chain, raw = list(feed.nodes), self.logits[root : root + 1 + len(feed.nodes)].float()
        specs = [self._round_spec(feed, want, chain[:at], at - 1) for at in range(len(chain) + 1)]
        accepted, token = verify(raw, specs, chain, list(feed.q) or None)
        if token is None and not accepted:
            out.error = "no token can be drawn: logits are broken, or what is allowed together rules out every one"
            return
        out.tokens = (*chain[:accepted], *(() if token is None else (token,)))
        out.path = tuple(range(len(out.tokens) - 1))
        if want.logprobs is not None:
            rows = raw if specs[0].params.logprobs_mode == "raw" else process(raw, specs)
            out.logprobs = tuple(token_logprobs(rows[: len(out.tokens)], torch.tensor(out.tokens), want.logprobs))

    def _round_spec(self, feed: Feed, want: Want, path: list[int], node: int, drafted: int = 0) -> RowSpec:
        """How a row of a round of the second rule is processed; `drafted` of the slot's tokens are the round's own."""
        slot = self.slots[feed.slot]
        spec = self._spec(feed, want, path, node)
        return replace(spec, keys=[round_key(slot.seed, len(slot) - drafted, want.child)], purpose=Purpose.DRAFT, mu=None)

    def _top(self, feed: Feed, want: Want, row: int, out: FeedOutput, node: int) -> None:
        """A grammar leaves fewer tokens to choose from and their log-probabilities as they were."""
        slot = self.slots[feed.slot]
        bits = b""
        if slot.params.structured_outputs is not None:
            words = len(feed.masks) // (1 + len(feed.nodes))
            bits = feed.masks[(node + 1) * words : (node + 2) * words]
            try:
                check_mask(bits, self.logits.shape[-1])
            except ValueError as error:
                out.error = str(error)
                return
        self._tops.append(Top(want, row, bits, slot.stop_ids, out))

    def _spec(self, feed: Feed, want: Want, path: list[int], node: int, mu: float | None = None) -> RowSpec:
        slot = self.slots[feed.slot]
        words = len(feed.masks) // (1 + len(feed.nodes))
        params = slot.params
        if want.logprobs != params.logprobs:  # the strategy's own wish
            params = params.replace(logprobs=want.logprobs)
        return RowSpec(
            params=params,
            keys=[key(slot.seed, want.child + i) for i in range(want.n)],
            tokens=slot.tokens,
            prompt_len=slot.prompt_len,
            path=path,
            stop_ids=slot.stop_ids,
            counts=_counts(slot, self.logits.shape[-1], self.logits.device),
            mu=want.mu if mu is None else mu,
            mask=feed.masks[(node + 1) * words : (node + 2) * words],
        )

    def _draw(self) -> None:
        """Draw together whatever was asked for, and ask for nothing more."""
        rows = [row for _, row, _ in self._draws]
        logits = self.logits if rows == list(range(len(self.logits))) else self.logits[rows]
        results = sample(logits, [spec for spec, _, _ in self._draws])
        for (_, _, out), result in zip(self._draws, results, strict=True):
            out.tokens += tuple(result.tokens)
            out.logprobs += tuple(result.logprobs)
            out.mus += tuple(result.mus)
            out.error = out.error or result.error
        self._draws = []

    def _go_on(self) -> None:
        """Draw at the node each walk has come to, and follow the child that was drawn, where there is one."""
        for walk in self._walks:
            mu = walk.out.mus[-1] if walk.out.mus else None
            spec = self._spec(walk.feed, walk.want, list(walk.path), walk.node, mu)
            self._draws.append((spec, walk.root + 1 + walk.node, walk.out))
        self._draw()
        going = []
        for walk in self._walks:
            if walk.out.error:  # where something was drawn the walk ends before its last node (ops.trees.walk)
                walk.out.error = "" if walk.path else walk.out.error
                walk.out.path = walk.out.path[:-1]
                continue
            token = walk.out.tokens[-1]
            if (found := child(walk.feed.nodes, walk.feed.parents, walk.node, token)) is not None:
                walk.node = found
                walk.path.append(token)
                walk.out.path += (found,)
                going.append(walk)
        self._walks = going


def answer(plan: StepPlan, slots: Slots, logits: torch.Tensor, wanted: Wanted) -> list[FeedOutput]:
    """Carry out the wants. `logits` [r, V] are those of `wanted.index`."""
    return Answers(plan, slots, logits, wanted).give()


def permitted_rows(feed: Feed, slot: Slot, logits: torch.Tensor) -> torch.Tensor:
    """Logits [1 + nodes, V] of a feed's last known token and its nodes, -inf where a token may not come."""
    words = len(feed.masks) // (1 + len(feed.nodes))
    rows = []
    for place, path in enumerate([[], *paths(feed.nodes, feed.parents)]):
        bits = feed.masks[place * words : (place + 1) * words]
        spec = RowSpec(slot.params, [], slot.tokens, slot.prompt_len, path, slot.stop_ids, mask=bits)
        rows.append(permitted(logits[place : place + 1], spec))
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


def _score(feed: Feed, slot: Slot, want: Want, logits: torch.Tensor, out: FeedOutput) -> None:
    """Row p scores token p + 1, as far as that is known."""
    targets = slot.tokens[feed.start + 1 : feed.start + feed.count + 1]
    if targets:
        out.scores = tuple(token_logprobs(logits[: len(targets)], torch.tensor(targets), want.logprobs or 0))


def _top(tops: list[Top], logits: torch.Tensor) -> None:
    """The likeliest tokens of each row with their log-probabilities, best first, lowest id on ties."""
    rows = logits[[top.row for top in tops]].float()
    permitted = rows
    if held := [at for at, top in enumerate(tops) if top.mask]:
        permitted = rows.clone()
        permitted[held] = mask(rows[held], [tops[at].mask for at in held])
    for top, (ids, logprobs) in zip(tops, best_tokens(rows, permitted, max(top.want.k for top in tops)), strict=True):
        top.out.top_ids, top.out.top_logprobs = ids[: top.want.k], logprobs[: top.want.k]
        if not ids:
            top.out.error = NOTHING_MAY_COME if top.mask else BROKEN_LOGITS
    if live := [at for at, top in enumerate(tops) if top.want.live]:
        going = ban(permitted[live], [[token for token in tops[at].stop_ids if token < rows.shape[-1]] for at in live])
        most = max(tops[at].want.k for at in live)
        for at, (ids, logprobs) in zip(live, best_tokens(rows[live], going, most), strict=True):
            k = tops[at].want.k
            add_live(tops[at].out, ids[:k], logprobs[:k])


def add_live(out: FeedOutput, ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """List the best tokens that end nothing behind the best of all: those that are not among them come after them."""
    known = set(out.top_ids)
    more = [at for at, token in enumerate(ids) if token not in known]
    out.top_ids += tuple(ids[at] for at in more)
    out.top_logprobs += tuple(logprobs[at] for at in more)


NOTHING_MAY_COME = "no token can come: the grammar rules out every one"
BROKEN_LOGITS = "the model's logits are broken: no token has a probability; check the weights"
