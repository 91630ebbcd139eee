"""Quality loss of a compressed model compared with the original: next-token distributions, layer by layer in float32, or the
embeddings of an encoder.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.data.config import ModelConfig
from headrace.llm import LLM
from headrace.runner.streamed import Streamed
from headrace.weights.source import WeightSource

ROWS = 64  # rows of logits compared at a time


@dataclass(frozen=True, slots=True)
class Judgement:
    """Comparison on `tokens` tokens of the texts `text`.

    kl: mean KL(original ‖ compressed) of the next token in nats; kl_error: its standard error over texts. perplexity,
    perplexity_before: of the compressed and the original model. same_choice: share of equal top tokens.
    """

    text: str
    tokens: int
    kl: float
    kl_error: float | None
    perplexity: float
    perplexity_before: float
    same_choice: float


@dataclass(frozen=True, slots=True)
class EmbeddingJudgement:
    """Comparison of embeddings of `texts` texts of the file `text`.

    cosine: mean cosine of each embedding with the original's; error: its standard error; least: the smallest. same_nearest:
    share of texts whose nearest other text is the same.
    """

    text: str
    texts: int
    cosine: float
    error: float | None
    least: float
    same_nearest: float


def judge_embeddings(
    original: Path, compressed: Path, texts: Sequence[Sequence[int]], name: str, threads: int
) -> EmbeddingJudgement:
    """Compare the embeddings of texts by two encoders."""

    def embeddings(path: Path) -> np.ndarray:
        with LLM(path, threads=threads) as llm:
            return np.array([one.values for one in llm.embed([list(text) for text in texts])])

    return compare_embeddings(embeddings(original), embeddings(compressed), name)


def compare_embeddings(before: np.ndarray, after: np.ndarray, name: str) -> EmbeddingJudgement:
    """Compare vectors of length 1, [texts, width] each."""
    cosines = (before * after).sum(-1)
    nearest = [np.argmax(rows @ rows.T - 2 * np.eye(len(rows)), -1) for rows in (before, after)]
    error = float(cosines.std(ddof=1) / math.sqrt(len(cosines))) if len(cosines) > 1 else None
    same = float((nearest[0] == nearest[1]).mean())
    return EmbeddingJudgement(name, len(cosines), float(cosines.mean()), error, float(cosines.min()), same)


def judge(original: WeightSource, compressed: WeightSource, texts: Sequence[Sequence[int]], name: str) -> Judgement:
    """Compare two models on the second half of each text, so that every scored token has context."""
    count = min(map(len, texts)) // 2
    pairs = zip(Streamed(original).logits(texts, count), Streamed(compressed).logits(texts, count), strict=True)
    return compare_logits([text[len(text) - count :] for text in texts], pairs, name)


def compare_logits(scored: Sequence[Sequence[int]], pairs: Iterable[tuple[np.ndarray, np.ndarray]], name: str) -> Judgement:
    """Compare logits [tokens, vocabulary] of the original and another model, a pair for each text. wanted: scored tokens of
    each text.
    """
    kls, losses, same = [], np.zeros(2), 0
    for tokens, (before, after) in zip(scored, pairs, strict=True):
        kl = 0.0
        for at in range(0, len(tokens), ROWS):
            p, q = (torch.from_numpy(rows[at : at + ROWS]).double().log_softmax(-1) for rows in (before, after))
            kl += float((p.exp() * (p - q)).sum())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            scored_tokens = torch.tensor(tokens[at : at + ROWS])[:, None]
            losses -= [float(rows.gather(1, scored_tokens).sum()) for rows in (p, q)]
        kls.append(kl / len(tokens))
    count = sum(map(len, scored))
    error = float(np.std(kls, ddof=1) / math.sqrt(len(kls))) if len(kls) > 1 else None
    before_loss, after_loss = np.exp(losses / count).tolist()
    return Judgement(name, count, float(np.mean(kls)), error, after_loss, before_loss, same / count)


def judge_bytes(config: ModelConfig, window: int) -> int:
    """Peak memory of `judge` in bytes: both output projections, logits of a text, and some rows as float64."""
    return 2 * 4 * config.vocab_size * (config.hidden_size + window // 2) + 6 * 8 * ROWS * config.vocab_size
