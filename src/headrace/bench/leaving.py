"""What tokens that leave a decoder early save and lose: curves of every criterion, what audits tell besides, and the clock."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.audit import CRITERIA, Text, Votes, audit, criteria_of
from headrace.bench.exits import in_turns, thought
from headrace.bench.machine import machine
from headrace.bench.plots import Line
from headrace.data.outputs import RequestOutput, whole
from headrace.data.params import SamplingParams
from headrace.data.plan import Exited
from headrace.data.settings import DEFERRED
from headrace.llm import LLM
from headrace.runner.early_exit import MOST_BEHIND
from headrace.runner.heads import Heads
from headrace.startup.rules import load
from headrace.stats.calibration import calibration_error
from headrace.stats.text_similarity import rouge_l
from headrace.training.exit_heads import BINS, WeightBytes, unchecked_exit, weight_bytes
from headrace.training.heads import prompt_tokens
from headrace.workflows.prompts import Prompt, tokens_of

BATCHES = (1, 2, 4, 8)
SHARES = tuple(round(0.05 * step, 2) for step in range(1, 20))  # of the tokens that leave: a curve's thresholds
DECAY = 4.0
PLACES = (0.0, 0.25, 0.5, 0.75)  # of an answer: where one of its tokens becomes another
LONGEST = 128  # tokens of a prompt that are read


@dataclass(frozen=True, slots=True)
class Rule:
    """By what tokens leave."""

    criterion: str = "max_prob"
    threshold: float = 0.9
    decay: float = 0.0

    def params(self, max_tokens: int) -> SamplingParams:
        """Greedy, and as long as that."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            exit_threshold=self.threshold,
            exit_criterion=self.criterion,  # type: ignore[arg-type]
            exit_decay=self.decay,
        )

    def leaves(self, sure: np.ndarray, written: np.ndarray, max_tokens: int) -> np.ndarray:
        """Which tokens [n] leave, of which so many of the answer were written before."""
        params = self.params(max_tokens)
        at = {int(count): params.sure_at(int(count)) for count in np.unique(written)}
        gone: np.ndarray = sure >= np.array([at[int(count)] for count in written])
        return gone


def rule_of(folder: Path, criterion: str | None, threshold: float | None) -> Rule:
    """As asked, or as was calibrated last for exits whose layers lag, or sure by nine tenths. Raises ValueError."""
    known = [one for one in load(folder, DEFERRED) if criterion in (None, one.criterion)]
    if threshold is None and known:
        return Rule(known[0].criterion, known[0].threshold, known[0].decay)
    if criterion is not None and criterion not in CRITERIA:
        raise ValueError(f"unknown criterion {criterion!r} of an exit; use {', '.join(CRITERIA)}")
    if threshold is None and criterion is not None:
        raise ValueError(f"no threshold of {criterion} was calibrated for these exits; give one")
    made = Rule(criterion or "max_prob", 0.9 if threshold is None else threshold)
    made.params(1)  # which says what is wrong with it
    return made


def measure(
    llm: LLM, heads: Heads, prompts: Sequence[Prompt], rule: Rule, *, max_tokens: int, decay: float = DECAY, rounds: int = 5
) -> dict[str, Any]:
    """The figures of a decoder's exits, on its own greedy answers to prompts and on the prompts' own words. `rule` is what is
    timed; curves are drawn without a decay and with this one. Raises ValueError."""
    asked = [prompt_tokens(llm, prompt) for prompt in prompts]
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    answers = whole(llm.generate(asked, plain))
    texts = [Text(one.prompt_token_ids, one.outputs[0].token_ids) for one in answers]
    votes = audit(llm, heads, texts, criteria_of(heads))
    words = audit(llm, heads, _own_words(llm, prompts), ("max_prob",))
    weights = weight_bytes(llm.opened)
    return {
        "machine": machine(),
        "backend": llm.backend,
        "texts": len(answers),
        "tokens": votes.choices.shape[1],
        "exits": [_of_exit(votes, at, weights, heads, max_tokens, decay) for at in range(len(heads.layers))],
        "leave_after": heads.drafts,
        "decay": decay,
        "oracle": thought(votes.choices == votes.choices[-1], votes.layers),
        "overthinking": thought(words.choices == words.came, words.layers) | {"tokens": words.choices.shape[1]},
        "perturbed": perturbed(llm, answers, plain),
        "checks": checks(weights, heads, int(votes.layers[-1])),
        "rule": asdict(rule),
        "batches": [_clock(llm, heads, asked, rule, weights, (batch, max_tokens, rounds)) for batch in BATCHES],
    }


def _own_words(llm: LLM, prompts: Sequence[Prompt]) -> list[Text]:
    """Prompts as texts that somebody wrote, of which every token is known."""
    found = [tokens_of(llm, prompt, chat=False)[:LONGEST] for prompt in prompts]
    return [Text(tokens[:1], tokens[1:]) for tokens in found if len(tokens) > 2]


def _of_exit(votes: Votes, at: int, weights: WeightBytes, heads: Heads, max_tokens: int, decay: float) -> dict[str, Any]:
    """One exit's figures: `agreement` at every token, by criterion its curves without the decay and with it."""
    layers, agree = int(votes.layers[at]), votes.agree[at]
    bytes_ = weights.share(layers, len(heads.vocab)), weights.share(0, len(heads.vocab))
    curves: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for criterion, sure in votes.sure.items():
        found: dict[str, list[dict[str, Any]]] = {"steady": [], "falling": []}
        for threshold in thresholds(sure[at]):
            for name, falls in (("steady", 0.0), ("falling", decay)):
                gone = Rule(criterion, threshold, falls).leaves(sure[at], votes.written, max_tokens)
                found[name].append(_point(threshold, gone, agree, bytes_, (layers, int(votes.layers[-1]))))
        curves[criterion] = found
    errors = {
        criterion: calibration_error(votes.sure[criterion][at], agree, BINS)
        for criterion in ("max_prob", "classifier")  # which are probabilities
        if criterion in votes.sure
    }
    return {
        "layers": layers,
        "agreement": float(agree.mean()),
        "cost": bytes_[0],
        "calibration_error": errors,
        "curves": curves,
    }


def thresholds(sure: np.ndarray) -> list[float]:
    """From the safest on those by which a twentieth of the tokens leaves, two, three and so on, as far as they can be asked."""
    found = {min(1.0, max(0.0, float(np.quantile(sure, 1 - share)))) for share in SHARES}
    return sorted(found, reverse=True)


def _point(
    threshold: float, gone: np.ndarray, agree: np.ndarray, bytes_: tuple[float, float], layers: tuple[int, int]
) -> dict[str, Any]:
    made = unchecked_exit(threshold, torch.from_numpy(gone), torch.from_numpy(agree), *bytes_)
    mean = made.share * layers[0] + (1 - made.share) * layers[1]
    agreement = made.agreement if made.share else None
    return {"threshold": threshold, "share": made.share, "agreement": agreement, "layers": mean, "bytes": made.cost}


def perturbed(llm: LLM, answers: Sequence[RequestOutput], plain: SamplingParams) -> list[dict[str, float]]:
    """What becomes of greedy answers where a token, early or late, is the second likeliest: how much of the answer (1 - ROUGE-L
    of its tokens) is lost, and how much of what follows. The paper's threshold falls because an early one costs more."""
    made = []
    for place in PLACES:
        changed = []
        for answer in answers:
            tokens, logprobs = answer.outputs[0].token_ids, answer.outputs[0].logprobs or []
            at = int(place * len(tokens))
            others = [token for token in logprobs[at].top_ids if token != tokens[at]] if at + 1 < len(tokens) else []
            changed += [(answer, at, [*tokens[:at], others[0]])] if others else []
        rest = [plain.replace(max_tokens=(plain.max_tokens or 0) - at - 1, logprobs=None) for _, at, _ in changed]
        outputs = (
            [] if not changed else whole(llm.generate([answer.prompt_token_ids + begun for answer, _, begun in changed], rest))
        )
        lost, after = [], []
        for (answer, at, begun), output in zip(changed, outputs, strict=True):
            before, now = answer.outputs[0].token_ids, output.outputs[0].token_ids
            lost.append(1 - rouge_l([*begun, *now], before))
            after.append(1 - rouge_l(now, before[at + 1 :]))
        if changed:
            made.append({"place": place, "n": len(changed), "lost": float(np.mean(lost)), "after": float(np.mean(after))})
    return made


def checks(weights: WeightBytes, heads: Heads, layers: int) -> dict[str, float]:
    """The weights that a token reads where it is looked for after every layer whether it may leave, as CALM's paper does, and
    never leaves; as a share of a plain step's: by the whole head, and by a head of the exits' tokens; and of one exit."""
    own, short = weights.head / weights.total, weights.share(0, len(heads.vocab))
    return {"every_layer": 1 + (layers - 1) * own, "every_layer_short": 1 + (layers - 1) * short, "one_exit": 1 + short}


def _clock(
    llm: LLM, heads: Heads, asked: Sequence[list[int]], rule: Rule, weights: WeightBytes, sizes: tuple[int, int, int]
) -> dict[str, float]:
    """Time of the whole model divided by that with tokens that leave, in turns, and the same by the bytes of both."""
    batch, max_tokens, rounds = sizes
    prompts = [asked[at % len(asked)] for at in range(batch)]
    params, outputs = rule.params(max_tokens), list[RequestOutput]()
    plain = params.replace(exit_threshold=None, exit_criterion="max_prob", exit_decay=0.0)

    def early() -> None:
        outputs[:] = whole(llm.generate(prompts, params))

    found = in_turns(lambda: llm.generate(prompts, plain), early, rounds)
    exits = [one.outputs[0].exits or [] for one in outputs]
    left_early = [one.layers == heads.drafts for each in exits for one in each]
    share = sum(left_early) / max(1, len(left_early))
    return {"batch": batch, "share": share, "bytes": 1 / bytes_a_step(exits, heads, weights)} | found


def bytes_a_step(exits: Sequence[Sequence[Exited]], heads: Heads, weights: WeightBytes) -> float:
    """What a step reads on average of a batch whose rows left so, as a share of a plain step's. The layers above the exit are
    read where a row has not left, or lags as far as one may, and the model's head where a row has not left."""
    below, short = weights.share(heads.drafts, len(heads.vocab)), weights.share(0, len(heads.vocab))
    above = weights.layers * (1 - heads.drafts / weights.count) / weights.total
    lags, reads = [0] * len(exits), []
    for step in zip(*(each[1:] for each in exits), strict=False):  # the first token is the prompt's
        gone = [one.layers == heads.drafts for one in step]
        stays = [leaves and lag < MOST_BEHIND for leaves, lag in zip(gone, lags, strict=True)]
        lags = [lag + 1 if stay else 0 for lag, stay in zip(lags, stays, strict=True)]
        reads.append(below + (0 if all(stays) else above) + (0 if all(gone) else weights.head / weights.total))
    return float(np.mean(reads)) if reads else 1 + short


def lines(found: dict[str, Any]) -> list[Line]:
    """Agreement (percent) of tokens that leave over layers a token, by criterion of the exit by which they leave; dashed: where
    the threshold falls along the answer."""
    made = []
    exit = next(one for one in found["exits"] if one["layers"] == found["leave_after"])
    for criterion, curves in exit["curves"].items():
        for name, points in curves.items():
            known = sorted((one for one in points if one["agreement"] is not None), key=lambda point: point["layers"])
            x, y = [one["layers"] for one in known], [100 * one["agreement"] for one in known]
            made += [Line(criterion, x, y, dashed=name == "falling")] if known else []
    return made
