"""Query-level cascades: a small model answers, and what it is not sure of a larger one answers again (FrugalGPT, 2023).

A cascade lowers the expected cost, not the time of each answer: what is deferred pays for every model that was asked, so that
it is worth it only where the share that is deferred stays below 1 - (cost of the small model / cost of the large one). It is
lossy: an answer that the small model is sure of, and wrong about, stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.llm import LLM, Messages, Prompt
from headrace.stats.confidence import TOKEN_SCORES, cut_by_context, token_confidence
from headrace.workflows.consistency import majority

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
    writes. A tier is asked for all that those before it were unsure of, in one batch; a prompt that its context does not hold
    is for the next one, and so is an answer that the context cut off.

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
        how = _asked(tier, params, scored=not last)
        each = {at: _rendered(tier.llm, prompts[at]) for at in open_}
        asked = {at: prompt for at, prompt in each.items() if last or _fits(tier.llm, prompt)}
        outputs = tier.llm.generate(list(asked.values()), how) if asked else []
        for at, output in zip(asked, outputs, strict=True):
            costs[at] += tier.cost * tokens_used(output)
            if not last:
                scores[at].append(surety(output, tier.score))
            if last or (_is_whole(output, how) and scores[at][-1] >= tier.threshold):
                settled[at] = Settled(output, number, scores[at], costs[at])
        open_ = [at for at in open_ if settled[at] is None]
    return [one for one in settled if one is not None]


def _fits(llm: LLM, prompt: Prompt) -> bool:
    """Whether a model's context holds a prompt and a token of its answer."""
    tokens = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return len(tokens) < llm.memory_plan.max_model_len


def _is_whole(output: RequestOutput, params: SamplingParams) -> bool:
    """Whether an answer neither failed nor was cut off by the context."""
    cut = [cut_by_context(one.finish_reason, len(one.token_ids), params.max_tokens) for one in output.outputs]
    return output.error is None and not all(cut)


def surety(output: RequestOutput, score: Score) -> float:
    """How sure a model is of its answer, from 0 to 1; 0 of one that failed or has no token."""
    if output.error is not None:
        return 0.0
    if score == "vote":
        _, votes = majority(one.text for one in output.outputs)
        return votes / len(output.outputs)
    return token_confidence([entry.logprob for entry in output.outputs[0].logprobs or []], score)


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
