"""From logits to what each feed asked for: rows are picked first, so that only they go through the head."""

from dataclasses import dataclass

import torch

from headrace.ops.logprobs import token_logprobs
from headrace.ops.noise import key
from headrace.ops.penalties import TokenCounts
from headrace.ops.sampling import RowSpec, sample
from headrace.runner.slots import Slot, Slots
from headrace.types import Feed, FeedOutput, StepPlan, Want


@dataclass(slots=True)
class Wanted:
    """Which of the step's rows need logits, and where in them each feed's rows are."""

    index: torch.Tensor  # [r] int64 row numbers, ascending
    first: list[int]  # per feed: where its logits begin; its rows are consecutive


def rows_wanted(plan: StepPlan) -> Wanted:
    """The rows that any want of the plan names: a feed's last known row, that and its nodes, or all of them."""
    index: list[int] = []
    first = []
    start = 0
    for feed in plan.feeds:
        end = start + feed.count + len(feed.nodes)
        first.append(len(index))
        index += range(start + _skipped(feed), end)
        start = end
    return Wanted(torch.tensor(index, dtype=torch.int64), first)


def _skipped(feed: Feed) -> int:
    """How many rows of a feed need no logits; wanted rows are always the last ones."""
    wants = [want for want in feed.wants if want.kind != "pool"]  # which reads hidden rows
    if any(want.rows == "all" for want in wants):
        return 0
    if not wants:
        return feed.count + len(feed.nodes)
    return feed.count - 1


def answer(plan: StepPlan, slots: Slots, logits: torch.Tensor, wanted: Wanted) -> list[FeedOutput]:
    """Carry out the wants. `logits` [r, V] are those of `wanted.index`."""
    outputs = [FeedOutput() for _ in plan.feeds]
    draws: list[tuple[int, RowSpec, int]] = []  # feed, how to draw, row of logits
    tops: list[tuple[int, int, int]] = []  # feed, how many, row of logits
    for number, feed in enumerate(plan.feeds):
        slot = slots[feed.slot]
        last = wanted.first[number] + feed.count - 1 - _skipped(feed)
        for want in feed.wants:
            if want.kind == "sample":
                draws.append((number, _spec(slot, want, feed.masks, logits.shape[-1], logits.device), last))
            elif want.kind == "score":
                _score(feed, slot, want, logits[last - feed.count + 1 : last + 1], outputs[number])
            elif want.kind == "logits":
                outputs[number].logits = logits[last].float().cpu().numpy().astype("<f4").tobytes()
            elif want.kind == "top" and slot.params.structured_outputs is not None:
                outputs[number].error = "the best tokens under a grammar are not built yet"
            elif want.kind == "top":
                tops.append((number, want.k, last))
            elif want.kind != "pool":
                raise ValueError(f"this runner does not answer {want.kind!r}")
    if tops:
        _top(tops, logits, outputs)
    if draws:
        rows = [row for _, _, row in draws]
        whole = rows == list(range(len(logits)))
        results = sample(logits if whole else logits[rows], [spec for _, spec, _ in draws])
        for (number, _, _), result in zip(draws, results, strict=True):
            outputs[number].tokens, outputs[number].logprobs = result.tokens, result.logprobs
            outputs[number].mus = result.mus
            outputs[number].error = result.error
    return outputs


def _spec(slot: Slot, want: Want, mask: bytes, vocab_size: int, device: torch.device) -> RowSpec:
    params = slot.params
    if want.logprobs != params.logprobs:  # the strategy's own wish
        params = params.replace(logprobs=want.logprobs)
    return RowSpec(
        params=params,
        keys=[key(slot.seed, want.child + i) for i in range(want.n)],
        tokens=slot.tokens,
        prompt_len=slot.prompt_len,
        stop_ids=slot.stop_ids,
        counts=_counts(slot, vocab_size, device),
        mu=want.mu,
        mask=mask,
    )


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
        out.scores = token_logprobs(logits[: len(targets)], torch.tensor(targets), want.logprobs or 0)


def _top(tops: list[tuple[int, int, int]], logits: torch.Tensor, outputs: list[FeedOutput]) -> None:
    """The likeliest tokens of each row with their log-probabilities, best first, lowest id on ties."""
    rows = logits[[row for _, _, row in tops]]
    most = max(k for _, k, _ in tops)
    best = token_logprobs(rows, torch.zeros(len(rows), dtype=torch.int64), most)
    for (number, k, _), entry in zip(tops, best, strict=True):
        out = outputs[number]
        if not entry.top_ids:
            out.error = "the model's logits are broken: no token has a probability; check the weights"
        out.top_ids, out.top_logprobs = entry.top_ids[:k], entry.top_logprobs[:k]
