"""Query-level cascades: a small model answers, and what it is not sure of a larger one answers again (FrugalGPT, 2023).

A cascade lowers the expected cost, not the time of each answer: what is deferred pays for every model that was asked, so that
it is worth it only where the share that is deferred stays below 1 - (cost of the small model / cost of the large one). It is
lossy: an answer that the small model is sure of, and wrong about, stays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.llm import LLM, Messages, Prompt
from headrace.workflows.consistency import majority
from headrace.workflows.surety import TOKEN_SCORES, of_tokens

Score = Literal["min", "mean", "low", "vote"]
SCORES = (*TOKEN_SCORES, "vote")


@dataclass(frozen=True, slots=True)
class Tier:
    """A model of the cascade. Its answer stands where `score` is at least `threshold`; the last one's always does.

    `score`: of the probabilities of an answer's tokens the least ("min"), their geometric mean ("mean"), that of the worst
    tenth ("low"); or the share of its n answers that are equal ("vote"). `cost`: of a token that it reads or writes, in any
    unit. `params`: how this one is asked, where not as the others.
    """

    llm: LLM
    threshold: float = 0.0
    score: Score = "min"
    cost: float = 1.0
    params: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer of one prompt: whose it is (a tier's number), the scores of those that were asked, what they cost together."""

    output: RequestOutput
    tier: int
    scores: list[float] = field(default_factory=list)
    cost: float = 0.0


def answer(tiers: Sequence[Tier], prompts: Sequence[Prompt | Messages], params: SamplingParams) -> list[Settled]:
    """One settled answer a prompt: a text, token ids (of one vocabulary), or a conversation, which each tier's own template
    writes. A tier is asked for all that those before it were unsure of, in one batch.

    Raises ValueError where there is no tier, or a score needs what `params` does not ask for.
    """
    if not tiers:
        raise ValueError("a cascade has at least one model; give tiers")
    settled: list[Settled | None] = [None] * len(prompts)
    scores: list[list[float]] = [[] for _ in prompts]
    costs = [0.0] * len(prompts)
    open_ = list(range(len(prompts)))
    for number, tier in enumerate(tiers):
        last = number == len(tiers) - 1
        asked = [_rendered(tier.llm, prompts[at]) for at in open_]
        outputs = tier.llm.generate(asked, _asked(tier, params, scored=not last)) if asked else []
        deferred = []
        for at, output in zip(open_, outputs, strict=True):
            costs[at] += tier.cost * tokens_used(output)
            if not last:
                scores[at].append(surety(output, tier.score))
            if last or (output.error is None and scores[at][-1] >= tier.threshold):
                settled[at] = Settled(output, number, scores[at], costs[at])
            else:
                deferred.append(at)
        open_ = deferred
    return [one for one in settled if one is not None]


def surety(output: RequestOutput, score: Score) -> float:
    """How sure a model is of its answer, from 0 to 1; 0 of one that failed or has no token."""
    if output.error is not None:
        return 0.0
    if score == "vote":
        _, votes = majority(one.text for one in output.outputs)
        return votes / len(output.outputs)
    return of_tokens([entry.logprob for entry in output.outputs[0].logprobs or []], score)


def text_of(output: RequestOutput, score: Score) -> str:
    """The text of an answer, of a vote that of most."""
    texts = [one.text for one in output.outputs]
    return (majority(texts)[0] or "") if score == "vote" else texts[0]


def _asked(tier: Tier, params: SamplingParams, *, scored: bool) -> SamplingParams:
    """The parameters of a tier, with log-probabilities where its answers are scored by them. Raises ValueError."""
    own = tier.params or params
    if not scored:
        return own
    if tier.score not in SCORES:
        raise ValueError(f"there is no score {tier.score!r}; use {', '.join(SCORES)}")
    if tier.score == "vote":
        if own.n < 2 or own.greedy:
            raise ValueError("a vote needs several different answers; set n to 2 or more, and a temperature above 0")
        return own
    if own.n > 1:
        raise ValueError(f"the score {tier.score!r} is of one answer; set n to 1, or use the score vote")
    return own if own.logprobs is not None else own.replace(logprobs=0)


def _rendered(llm: LLM, prompt: Any) -> Prompt:
    talk = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return llm.render(prompt) if talk else prompt


def tokens_used(output: RequestOutput) -> int:
    """Tokens read and written, of all answers together."""
    return len(output.prompt_token_ids) + sum(len(one.token_ids) for one in output.outputs)


# -- how good a score is -----------------------------------------------------------------------------------------------------


def auroc(scores: Sequence[float], right: Sequence[bool]) -> float:
    """How often a right answer scores above a wrong one, a tie by half: 0.5 tells nothing, 1 all; NaN without both kinds."""
    of, good = np.asarray(scores, float), np.asarray(right, bool)
    if good.all() or not good.any():
        return float("nan")
    above = of[good][:, None] - of[~good][None, :]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Deferral:
    """A share of the prompts, those of the lowest scores, is answered by the large model: the accuracy, what a choice of as
    many by chance would have, and the cost of a prompt."""

    share: float
    accuracy: float
    by_chance: float
    cost: float


def deferrals(
    scores: Sequence[float],
    small: Sequence[bool],
    large: Sequence[bool],
    costs: tuple[float, float],
    shares: Sequence[float] = SHARES,
) -> list[Deferral]:
    """The curve of quality against cost, from which of its answers each model has right. `costs`: of a question to either."""
    order = np.argsort(np.asarray(scores, float), kind="stable")
    mine, theirs = np.asarray(small, float)[order], np.asarray(large, float)[order]
    found = []
    for share in shares:
        count = round(share * len(order))
        accuracy = (theirs[:count].sum() + mine[count:].sum()) / len(order)
        chance = count / len(order)
        found.append(
            Deferral(
                chance,
                float(accuracy),
                float((1 - chance) * mine.mean() + chance * theirs.mean()),
                costs[0] + chance * costs[1],
            )
        )
    return found


def losses_against(scores: Sequence[float], small: Sequence[bool], large: Sequence[bool]) -> Callable[[float], np.ndarray]:
    """For `training.calibration.calibrate`: a threshold loses 1 where its cascade is wrong and the large model is right."""
    of, mine, theirs = np.asarray(scores, float), np.asarray(small, bool), np.asarray(large, bool)
    return lambda threshold: ((of >= threshold) & ~mine & theirs).astype(float)
