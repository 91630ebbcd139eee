"""Cascades of models: a small model answers, and prompts with an unsure answer go to a larger one.

A cascade lowers the expected cost, not the latency: a deferred prompt pays for every model that ran. It pays off only if the
deferred share stays below 1 − (cost of the small model / cost of the large one). It is lossy: a wrong answer with a high
confidence stays.

The scores are the answer's own log-probabilities or a vote. FrugalGPT (Chen et al., arXiv 2305.05176) learns a scorer instead,
and chooses the thresholds of three models together under a budget.
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
    """One model of a cascade. Its answer is kept if its confidence is at least `threshold`; the last tier's always is.

    score: "min", "mean" or "low" (`stats.confidence.token_confidence`), or "vote", the share of equal answers among n.
    cost: of a token read or written, in any unit. params: of this tier, None for those of the call.
    """

    llm: LLM
    threshold: float = 0.0
    score: Score = "min"
    cost: float = 1.0
    params: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class CascadeOutput:
    """The answer of one prompt: index of the tier that gave it, confidences of the tiers that ran, their total cost."""

    output: RequestOutput
    tier: int
    scores: list[float] = field(default_factory=list)
    cost: float = 0.0


def answer(tiers: Sequence[Tier], prompts: Sequence[Prompt | Messages], params: SamplingParams) -> list[CascadeOutput]:
    """Answer each prompt: a text, token ids (of one vocabulary), or a conversation, rendered by each tier's own template.

    Each tier runs, in one batch, the prompts that the tiers before did not settle. A prompt that does not fit the context of a
    tier goes to the next one, and so does a prompt whose answer the context cut off.

    Raises ValueError if there is no tier, or `params` do not allow a tier's score.
    """
    if not tiers:
        raise ValueError("a cascade has at least one model; give tiers")
    settled: list[CascadeOutput | None] = [None] * len(prompts)
    scores: list[list[float]] = [[] for _ in prompts]
    costs = [0.0] * len(prompts)
    open_prompts = list(range(len(prompts)))
    for number, tier in enumerate(tiers):
        last = number == len(tiers) - 1
        tier_params = _tier_params(tier, params, scored=not last)
        rendered = {index: _rendered(tier.llm, prompts[index]) for index in open_prompts}
        fitting = {index: prompt for index, prompt in rendered.items() if last or _fits(tier.llm, prompt)}
        outputs = tier.llm.generate(list(fitting.values()), tier_params) if fitting else []
        for index, output in zip(fitting, outputs, strict=True):
            costs[index] += tier.cost * tokens_used(output)
            if not last:
                scores[index].append(confidence(output, tier.score))
            if last or (_is_complete(output, tier_params) and scores[index][-1] >= tier.threshold):
                settled[index] = CascadeOutput(output, number, scores[index], costs[index])
        open_prompts = [index for index in open_prompts if settled[index] is None]
    return [output for output in settled if output is not None]


def _fits(llm: LLM, prompt: Prompt) -> bool:
    """Whether the context holds a prompt and one token of its answer."""
    tokens = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return len(tokens) < llm.memory_plan.max_model_len


def _is_complete(output: RequestOutput, params: SamplingParams) -> bool:
    """Whether an answer neither failed nor was cut off by the context."""
    cut = [cut_by_context(choice.finish_reason, len(choice.token_ids), params.max_tokens) for choice in output.outputs]
    return output.error is None and not all(cut)


def confidence(output: RequestOutput, score: Score) -> float:
    """Return the confidence of a model in its answer, 0 to 1; 0 if it failed or is empty."""
    if output.error is not None:
        return 0.0
    if score == "vote":
        _, votes = majority(choice.text for choice in output.outputs)
        return votes / len(output.outputs)
    return token_confidence([entry.logprob for entry in output.outputs[0].logprobs or []], score)


def text_of(output: RequestOutput, score: Score) -> str:
    """Return the text of an answer, with a vote the most frequent one."""
    texts = [choice.text for choice in output.outputs]
    return (majority(texts)[0] or "") if score == "vote" else texts[0]


def _tier_params(tier: Tier, params: SamplingParams, *, scored: bool) -> SamplingParams:
    """Return the parameters of a tier, with log-probabilities if its score needs them. Raises ValueError."""
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
        raise ValueError(f"the score {tier.score!r} needs one answer; set n to 1, or use the score vote")
    return own if own.logprobs is not None else own.replace(logprobs=0)


def _rendered(llm: LLM, prompt: Any) -> Prompt:
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return llm.render(prompt) if is_chat else prompt


def tokens_used(output: RequestOutput) -> int:
    """Return the tokens of the prompt and of all answers."""
    return len(output.prompt_token_ids) + sum(len(choice.token_ids) for choice in output.outputs)
