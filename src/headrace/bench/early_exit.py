"""Measure early exit of a decoder: agreement and cost over thresholds, overthinking, perturbed answers, speed."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.classifier import interleaved_speedup, overthinking_of
from headrace.bench.early_exit_audit import CRITERIA, ExitPredictions, Text, audit, criteria_of
from headrace.bench.figures import Column, Line, Table, percent
from headrace.bench.machine import machine
from headrace.data.outputs import RequestOutput, whole
from headrace.data.params import SamplingParams
from headrace.data.plan import Exited
from headrace.data.progress import threshold_text
from headrace.data.settings import DEFERRED
from headrace.llm import LLM
from headrace.runner.early_exit import MOST_BEHIND
from headrace.runner.heads import Heads
from headrace.startup.thresholds import load
from headrace.stats.calibration import calibration_error
from headrace.stats.paired_ratio import rouge_l
from headrace.training.exit_heads import BINS, WeightBytes, unchecked_exit, weight_bytes
from headrace.training.heads import prompt_tokens
from headrace.workflows.prompts import Prompt, tokens_of

BATCHES = (1, 2, 4, 8)
# Criteria whose confidence is a probability.
PROBABILITIES = ("max_prob", "classifier")
# Shares of early tokens that choose the thresholds of a curve.
SHARES = tuple(round(0.05 * step, 2) for step in range(1, 20))
DECAY = 4.0
# Positions in an answer, as a share of its length, at which a token is replaced.
PLACES = (0.0, 0.25, 0.5, 0.75)
# Tokens of a prompt that are read at most.
LONGEST = 128
# Shares of early tokens in the printed table.
PRINTED_SHARES = (0.1, 0.25, 0.5)
EXIT_COLUMNS = (
    Column("after layer", "{layers}"),
    Column("agrees", "{agreement:.1%}"),
    Column("cost by bytes", "{cost:.2f}"),
    Column("calibration error", "{calibration_error[max_prob]:.3f}"),
    Column(
        "classifier's error",
        lambda row: f"{error:.3f}" if (error := row["calibration_error"].get("classifier")) is not None else "",
    ),
)
CURVE_COLUMNS = (
    Column("criterion", "{criterion}"),
    Column("threshold", "{threshold:.4g}"),
    Column("early", "{share:.1%}"),
    Column("agree", lambda row: percent(row["agreement"])),
    Column("layers", "{layers:.1f}"),
    Column("bytes", "{bytes:.2f}"),
    Column("falling: early", "{falling[share]:.1%}"),
    Column("agree", lambda row: percent(row["falling"]["agreement"])),
)
BATCH_COLUMNS = (
    Column("batch", "{batch}"),
    Column("early", "{share:.1%}"),
    Column("speed-up", "{speedup:.2f}"),
    Column("rounds", "{least:.2f}..{most:.2f}"),
    Column("by bytes", "{bytes:.2f}"),
)
PERTURBED_COLUMNS = (
    Column("token replaced after", "{place:.0%}"),
    Column("answer lost", "{lost:.3f}"),
    Column("rest lost", "{after:.3f}"),
    Column("answers", "{n}"),
)


@dataclass(frozen=True, slots=True)
class ExitRule:
    """Rule by which tokens exit early: a criterion, its threshold, and the decay of the threshold along the answer."""

    criterion: str = "max_prob"
    threshold: float = 0.9
    decay: float = 0.0

    def params(self, max_tokens: int) -> SamplingParams:
        """Greedy parameters with this rule and answers of `max_tokens` tokens."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            exit_threshold=self.threshold,
            exit_criterion=self.criterion,  # type: ignore[arg-type]
            exit_decay=self.decay,
        )

    def exits(self, confidence: np.ndarray, position: np.ndarray, max_tokens: int) -> np.ndarray:
        """Whether tokens exit early, [n] bool, from their confidence [n] and their position in the answer [n]."""
        params = self.params(max_tokens)
        at = {int(index): params.sure_at(int(index)) for index in np.unique(position)}
        early: np.ndarray = confidence >= np.array([at[int(index)] for index in position])
        return early


def rule_of(folder: Path, criterion: str | None, threshold: float | None) -> ExitRule:
    """The rule of the arguments; missing values come from the last calibration, or are max_prob and 0.9. Raises ValueError."""
    known = [rule for rule in load(folder, DEFERRED) if criterion in (None, rule.criterion)]
    if threshold is None and known:
        return ExitRule(known[0].criterion, known[0].threshold, known[0].decay)
    if criterion is not None and criterion not in CRITERIA:
        raise ValueError(f"unknown criterion {criterion!r} of an exit; use {', '.join(CRITERIA)}")
    if threshold is None and criterion is not None:
        raise ValueError(f"no threshold of {criterion} was calibrated for these exits; give one")
    rule = ExitRule(criterion or "max_prob", 0.9 if threshold is None else threshold)
    # Raises ValueError for an invalid rule.
    rule.params(1)
    return rule


def measure(
    llm: LLM, heads: Heads, prompts: Sequence[Prompt], rule: ExitRule, *, max_tokens: int, decay: float = DECAY, rounds: int = 5
) -> dict[str, Any]:
    """Content of the JSON file: figures of the exits on the model's greedy answers and on the prompts' own tokens.

    rule: is timed. decay: of the falling threshold of the second set of curves. Raises ValueError.
    """
    ids = [prompt_tokens(llm, prompt) for prompt in prompts]
    plain = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    answers = whole(llm.generate(ids, plain))
    texts = [Text(answer.prompt_token_ids, answer.outputs[0].token_ids) for answer in answers]
    predictions = audit(llm, heads, texts, criteria_of(heads))
    words = audit(llm, heads, _own_words(llm, prompts), ("max_prob",))
    weights = weight_bytes(llm.opened)
    return {
        "machine": machine(),
        "backend": llm.backend,
        "texts": len(answers),
        "tokens": predictions.choices.shape[1],
        "exits": [_of_exit(predictions, at, weights, heads, max_tokens, decay) for at in range(len(heads.layers))],
        "leave_after": heads.drafts,
        "decay": decay,
        "oracle": overthinking_of(predictions.choices == predictions.choices[-1], predictions.layers),
        "overthinking": overthinking_of(words.choices == words.actual, words.layers) | {"tokens": words.choices.shape[1]},
        "perturbed": perturbed(llm, answers, plain),
        "checks": checks(weights, heads, int(predictions.layers[-1])),
        "rule": asdict(rule),
        "batches": [_speedup(llm, heads, ids, rule, weights, (batch, max_tokens, rounds)) for batch in BATCHES],
    }


def _own_words(llm: LLM, prompts: Sequence[Prompt]) -> list[Text]:
    """The prompts as texts with known tokens."""
    texts = [tokens_of(llm, prompt, chat=False)[:LONGEST] for prompt in prompts]
    return [Text(tokens[:1], tokens[1:]) for tokens in texts if len(tokens) > 2]


def _of_exit(
    predictions: ExitPredictions, at: int, weights: WeightBytes, heads: Heads, max_tokens: int, decay: float
) -> dict[str, Any]:
    """Figures of one exit: agreement with the full model, cost, and curves by criterion without and with the decay."""
    layers, agree = int(predictions.layers[at]), predictions.agree[at]
    bytes_ = weights.share(layers, len(heads.vocab)), weights.share(0, len(heads.vocab))
    curves: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for criterion, confidence in predictions.confidence.items():
        groups: dict[str, list[dict[str, Any]]] = {"steady": [], "falling": []}
        for threshold in thresholds(confidence[at]):
            for name, falls in (("steady", 0.0), ("falling", decay)):
                gone = ExitRule(criterion, threshold, falls).exits(confidence[at], predictions.position, max_tokens)
                groups[name].append(_point(threshold, gone, agree, bytes_, (layers, int(predictions.layers[-1]))))
        curves[criterion] = groups
    errors = {
        criterion: calibration_error(predictions.confidence[criterion][at], agree, BINS)
        for criterion in PROBABILITIES
        if criterion in predictions.confidence
    }
    return {
        "layers": layers,
        "agreement": float(agree.mean()),
        "cost": bytes_[0],
        "calibration_error": errors,
        "curves": curves,
    }


def thresholds(confidence: np.ndarray) -> list[float]:
    """Thresholds at which 5 %, 10 %, … 95 % of the tokens exit, the safest first, cut to 0..1 and without duplicates."""
    distinct = {min(1.0, max(0.0, float(np.quantile(confidence, 1 - share)))) for share in SHARES}
    return sorted(distinct, reverse=True)


def _point(
    threshold: float, gone: np.ndarray, agree: np.ndarray, bytes_: tuple[float, float], layers: tuple[int, int]
) -> dict[str, Any]:
    policy = unchecked_exit(threshold, torch.from_numpy(gone), torch.from_numpy(agree), *bytes_)
    mean = policy.share * layers[0] + (1 - policy.share) * layers[1]
    agreement = policy.agreement if policy.share else None
    return {"threshold": threshold, "share": policy.share, "agreement": agreement, "layers": mean, "bytes": policy.cost}


def perturbed(llm: LLM, answers: Sequence[RequestOutput], plain: SamplingParams) -> list[dict[str, float]]:
    """Effect of replacing one token of a greedy answer by the second likeliest, by the position of the token.

    `lost`: 1 - ROUGE-L of the answer's tokens; `after`: the same of the tokens behind the replaced one. CALM lowers its
    threshold along the answer because early errors cost more (Schuster et al., 2022).
    """
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
    """Weights read by a token that never exits, divided by those of a plain step.

    `every_layer`: confidence is computed after every layer with the model's head, as in CALM; `every_layer_short`: with a head
    of the exits' tokens; `one_exit`: at one exit only.
    """
    own, short = weights.head / weights.total, weights.share(0, len(heads.vocab))
    return {"every_layer": 1 + (layers - 1) * own, "every_layer_short": 1 + (layers - 1) * short, "one_exit": 1 + short}


def _speedup(
    llm: LLM, heads: Heads, ids: Sequence[list[int]], rule: ExitRule, weights: WeightBytes, sizes: tuple[int, int, int]
) -> dict[str, float]:
    """Speed-up over the full model at one batch size, measured in alternation and predicted from bytes."""
    batch, max_tokens, rounds = sizes
    prompts = [ids[at % len(ids)] for at in range(batch)]
    params, outputs = rule.params(max_tokens), list[RequestOutput]()
    plain = params.replace(exit_threshold=None, exit_criterion="max_prob", exit_decay=0.0)

    def early() -> None:
        outputs[:] = whole(llm.generate(prompts, params))

    ratios = interleaved_speedup(lambda: llm.generate(prompts, plain), early, rounds)
    exits = [output.outputs[0].exits or [] for output in outputs]
    exited = [record.layers == heads.drafts for records in exits for record in records]
    share = sum(exited) / max(1, len(exited))
    return {"batch": batch, "share": share, "bytes": 1 / bytes_a_step(exits, heads, weights)} | ratios


def bytes_a_step(exits: Sequence[Sequence[Exited]], heads: Heads, weights: WeightBytes) -> float:
    """Mean bytes that a step of the batch reads, divided by those of a plain step. exits: records by sequence and token.

    The layers above the exit are read if a row does not exit or has reached the largest lag, and the model's head if a row does
    not exit.
    """
    below, short = weights.share(heads.drafts, len(heads.vocab)), weights.share(0, len(heads.vocab))
    above = weights.layers * (1 - heads.drafts / weights.count) / weights.total
    lags, reads = [0] * len(exits), []
    # The first token comes from the prompt's step.
    for step in zip(*(records[1:] for records in exits), strict=False):
        early = [record.layers == heads.drafts for record in step]
        stays = [exits_here and lag < MOST_BEHIND for exits_here, lag in zip(early, lags, strict=True)]
        lags = [lag + 1 if stay else 0 for lag, stay in zip(lags, stays, strict=True)]
        reads.append(below + (0 if all(stays) else above) + (0 if all(early) else weights.head / weights.total))
    return float(np.mean(reads)) if reads else 1 + short


def curve_lines(result: dict[str, Any]) -> list[Line]:
    """Curves of agreement (percent) of early tokens over layers per token, by criterion; dashed with a falling threshold."""
    lines = []
    for criterion, curves in _used_exit(result)["curves"].items():
        for name, points in curves.items():
            known = sorted((point for point in points if point["agreement"] is not None), key=lambda point: point["layers"])
            x, y = [point["layers"] for point in known], [100 * point["agreement"] for point in known]
            lines += [Line(criterion, x, y, dashed=name == "falling")] if known else []
    return lines


def _used_exit(result: dict[str, Any]) -> dict[str, Any]:
    return next(figures for figures in result["exits"] if figures["layers"] == result["leave_after"])


def printed(result: dict[str, Any]) -> list[Table | str]:
    """Tables and lines of the terminal."""
    return [
        Table(EXIT_COLUMNS, result["exits"]),
        Table(CURVE_COLUMNS, list(_curve_rows(_used_exit(result)["curves"]))),
        Table(BATCH_COLUMNS, result["batches"]),
        Table(PERTURBED_COLUMNS, result["perturbed"]),
        *_summary(result),
    ]


def _curve_rows(by_criterion: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each criterion the thresholds at which about PRINTED_SHARES of the tokens exit."""
    for criterion, curves in by_criterion.items():
        pairs = list(zip(curves["steady"], curves["falling"], strict=True))
        for share in PRINTED_SHARES:
            steady, falling = min(pairs, key=lambda pair: abs(pair[0]["share"] - share))
            yield {"criterion": criterion, **steady, "falling": falling}


def _summary(result: dict[str, Any]) -> list[str]:
    rule, oracle, thought, checks = (result[name] for name in ("rule", "oracle", "overthinking", "checks"))
    falls = f", decay {rule['decay']:g}" if rule["decay"] else ""
    return [
        f"of {result['tokens']} tokens of {result['texts']} answers; "
        f"curves of the exit after {result['leave_after']} layers, "
        f"timed by {rule['criterion']} {threshold_text(rule['threshold'])}{falls}",
        f"an oracle that stops at the first exit that agrees computes {oracle['needed']:.1f} layers a token; "
        f"{oracle['wasteful']:.1%} of tokens have one",
        f"overthinking, of {thought['tokens']} tokens of the prompts: {thought['wasteful']:.1%} are right at an exit, "
        f"{thought['destructive']:.1%} only there: the full model is wrong",
        f"an exit after every layer reads {checks['every_layer']:.2f} times the weights of a plain step with the model's head, "
        f"{checks['every_layer_short']:.2f} times with the exits' vocabulary; one exit {checks['one_exit']:.2f} times",
    ]
