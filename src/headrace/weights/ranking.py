"""Rerankers: the score of a query and a document, by a head on the host over the pooled row of both. Needs no torch.

A cross-encoder has a published head with one label. Qwen3-Reranker is a decoder that answers yes or no: its head is two rows of
the output matrix, or one row that was trained as the difference of both.

Source: Nogueira and Cho, "Passage Re-ranking with BERT", arXiv 1901.04085.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.data.config import ModelConfig
from headrace.data.fields import FieldError
from headrace.weights.decode import check_finite, dequantize, read_floats
from headrace.weights.sentence import LOGIT_SCORE, MODULES, read_modules
from headrace.weights.source import WeightError, WeightSource

# pooling_type of rerankers in GGUF files. Cross-encoders have it only if their users ask for it.
RANK = 4
GGUF_HEAD, ONE_LABEL = "cls.output.weight", "score.weight"
# classifier.pooling_type of GGUF files.
GGUF_POOLING = {1: "mean", 2: "first"}
# Pooling of cross-encoders without a setting of their own.
FIRST = "first"
SEQUENCE = "ForSequenceClassification"
CARD = 64 << 10  # characters of a model card that are read
NO_RANKER = "this model has no head to rank with; open a reranker: a cross-encoder with one label, or Qwen3-Reranker"
# The prompt of Qwen3-Reranker, around the instruction, query and document.
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note "
    'that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = ("yes", "no")


class Tokenizer(Protocol):
    """The part of a `text.tokenizer.Tokenizer` that a reranker needs."""

    between: tuple[int, ...]

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...
    def id_of(self, text: str) -> int | None: ...
    def join_pair(self, first: Sequence[int], second: Sequence[int]) -> list[int]: ...


Row = np.ndarray
Step = Callable[[Row], Row]


@dataclass(frozen=True, slots=True)
class Ranker:
    """A reranker. steps: from the pooled row [hidden] to logits. pooling: first, last or mean.

    finish: from logits to the score. texts: the texts of a query and a document that are encoded, without control tokens in
    them. join: token ids of the pair from those of its texts.
    """

    pooling: str
    steps: tuple[Step, ...]
    finish: Callable[[Row], float]
    texts: Callable[[str, str], tuple[str, ...]]
    join: Callable[[Sequence[list[int]]], list[int]]

    def pairs(
        self, query: str, documents: Sequence[str], top_n: int | None, encode: Callable[[str], list[int]]
    ) -> list[list[int]]:
        """Token ids of each pair. encode: of a text without control tokens. Raises ValueError for a ranking of nothing."""
        check_ranking(query, documents, top_n)
        return [self.join([encode(text) for text in self.texts(query, document)]) for document in documents]

    def ranked(
        self, pooled: Sequence[Sequence[float]], pairs: Sequence[Sequence[int]], top_n: int | None
    ) -> list[tuple[int, float]]:
        """Index and score of the `top_n` best documents, best first, from the pooled row of each pair; lowest index on ties."""
        scores = [self.score(row, len(pair)) for row, pair in zip(pooled, pairs, strict=True)]
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top_n]
        return [(index, scores[index]) for index in best]

    def score(self, pooled: Sequence[float], tokens: int) -> float:
        """Relevance of a document from the pooled row of the pair; the sum of its `tokens` rows if pooling is mean."""
        row = np.asarray(pooled, np.float64) / (tokens if self.pooling == "mean" else 1)
        for step in self.steps:
            row = step(row)
        return self.finish(row)


def check_ranking(query: str, documents: Sequence[str], top_n: int | None) -> None:
    """Raise FieldError for an empty query, no documents, an empty one, or top_n below 1."""
    if not query:
        raise FieldError("query", "the query is empty; give at least one character")
    if isinstance(documents, str) or not documents or not all(documents):
        raise FieldError("documents", "documents must be a list of texts, none of them empty")
    if top_n is not None and top_n < 1:
        raise FieldError("top_n", f"top_n must be 1 or more, not {top_n}")


def labels_of(source: WeightSource) -> int:
    """Number of labels of a folder's published classification head; 0 if its config.json names none."""
    settings: dict[str, Any] = getattr(source, "config", {})
    names = settings.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(SEQUENCE) for name in names):
        return 0
    labels = settings.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(settings.get("num_labels") or 2)


def is_ranker(path: Path, source: Any, config: ModelConfig) -> bool:
    """Whether a model ranks documents."""
    if config.source is not None:
        return False
    if source.format == "gguf":
        if source.metadata.get(f"{source.metadata.get('general.architecture')}.pooling_type") == RANK:
            return True
        if config.encoder:
            return GGUF_HEAD in source.names() and source.info(GGUF_HEAD).shape[0] == 1
        titles = [source.metadata.get(f"general.{key}") for key in ("basename", "name")]
        return config.architecture == "qwen3" and _is_named(path, titles)
    if config.encoder or labels_of(source):
        return labels_of(source) == 1 and (config.encoder or config.architecture == "qwen3")
    return config.architecture == "qwen3" and (
        _logit_score(path) is not None or _is_named(path, [source.config.get("_name_or_path"), _heading(path)])
    )


def _is_named(path: Path, titles: Sequence[object]) -> bool:
    return any("reranker" in str(title).lower() for title in (path.name, *titles))


def _heading(folder: Path) -> str:
    """The first heading of a folder's model card."""
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            lines = file.read(CARD).splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("# ")), "")


def _logit_score(folder: Path) -> dict[str, Any] | None:
    """Settings of the module of sentence-transformers that compares the logits of two tokens; None without it."""
    if not (folder / MODULES).is_file():
        return None
    place = next((place for kind, place in read_modules(folder) if kind == LOGIT_SCORE), None)
    if place is None:
        return None
    try:
        settings = json.loads((place / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"{place / 'config.json'}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(settings, dict):
        raise WeightError(f"{place / 'config.json'}: must be a JSON object")
    return settings


def read_ranker(source: Any, config: ModelConfig, tokenizer: Tokenizer) -> Ranker:
    """The ranker of a model for which `is_ranker` is true. Raises WeightError if its head is missing or broken."""
    if not config.encoder:
        return _answering(source, config, tokenizer)
    pooling = FIRST
    if config.architecture == "modernbert":
        pooling = _modernbert_pooling(source)
    steps = _gguf_head(source, config) if source.format == "gguf" else _folder_head(source, config)
    finish = _raw if source.format == "safetensors" and _has_raw_scores(source.config) else _sigmoid
    if not tokenizer.between:
        raise WeightError(f"{source.path}: a reranker reads pairs of texts, and its tokenizer has no form for pairs")
    return Ranker(pooling, steps, finish, lambda query, document: (query, document), lambda ids: tokenizer.join_pair(*ids))


def _modernbert_pooling(source: Any) -> str:
    if source.format == "gguf":
        pooling = GGUF_POOLING.get(source.metadata.get("modern-bert.classifier.pooling_type", 1), "")
    else:
        pooling = {"cls": "first", "mean": "mean"}.get(str(source.config.get("classifier_pooling", "cls")), "")
    if not pooling:
        raise WeightError(f"{source.path}: classifier_pooling must be cls or mean")
    return pooling


def with_separator(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The config of a reranker: tokens after a pair's separator have the second type, if there are two."""
    return replace(config, separator=tokenizer.between[0]) if config.token_types > 1 and tokenizer.between else config


# -- heads -------------------------------------------------------------------------------------------------------------
def _folder_head(source: WeightSource, config: ModelConfig) -> tuple[Step, ...]:
    settings: dict[str, Any] = source.config  # type: ignore[attr-defined]
    if config.architecture == "bert":
        return _linear(source, "pooler.dense", "bert."), np.tanh, _linear(source, "classifier", rows=1)
    if config.architecture == "modernbert":
        if settings.get("classifier_activation", "gelu") != "gelu":
            raise WeightError(f"{source.path}: classifier_activation must be gelu")
        norm = _norm(source, "head.norm", config.norm_eps)
        return _linear(source, "head.dense"), _gelu, norm, _linear(source, "classifier", rows=1)
    return _linear(source, "classifier.dense"), np.tanh, _linear(source, "classifier.out_proj", rows=1)


def _gguf_head(source: WeightSource, config: ModelConfig) -> tuple[Step, ...]:
    last = _linear(source, "cls.output", rows=1)
    if "cls.weight" not in source.names():
        if config.architecture == "bert":
            raise WeightError(
                f"{source.path}: lacks the pooler of its head (cls.weight), which converters leave out; open the model's folder"
            )
        return (last,)
    if config.architecture == "modernbert":
        return _linear(source, "cls"), _gelu, _norm(source, "cls.norm", config.norm_eps), last
    return _linear(source, "cls"), np.tanh, last


def _answering(source: Any, config: ModelConfig, tokenizer: Tokenizer) -> Ranker:
    """The ranker of a decoder that answers yes or no."""
    names, finish = source.names(), _first_of_two
    if GGUF_HEAD in names:
        step = _linear(source, "cls.output", rows=len(ANSWERS))
    elif ONE_LABEL in names:
        step, finish = _linear(source, "score", rows=1), _sigmoid
    else:
        heads = ("lm_head.weight", "output.weight", "model.embed_tokens.weight", "embed_tokens.weight", "token_embd.weight")
        stored = next((name for name in heads if name in names and not (config.tied_head and name == "lm_head.weight")), None)
        if stored is None:
            raise WeightError(f"{source.path}: the output matrix is missing; this file cannot rank")
        step = partial(np.matmul, _rows(source, stored, _answer_ids(source, config, tokenizer)))

    before, after = (tokenizer.encode(text, add_special=False) for text in (BEFORE, AFTER))

    def texts(query: str, document: str) -> tuple[str, ...]:
        return (f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}",)

    return Ranker("last", (step,), finish, texts, lambda ids: [*before, *ids[0], *after])


def _answer_ids(source: Any, config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    """Token ids of yes and no: of the folder's module, otherwise of the vocabulary."""
    given = _logit_score(source.path) if source.format == "safetensors" else None
    if given is None:
        ids = [tokenizer.id_of(text) for text in ANSWERS]
        if None in ids:
            raise WeightError(f"{source.path}: a reranker answers yes or no, and its vocabulary lacks one of them")
        return [id for id in ids if id is not None]
    ids = [given.get(f"{key}_token_id") for key in ("true", "false")]
    known = [id for id in ids if isinstance(id, int) and not isinstance(id, bool) and 0 <= id < config.vocab_size]
    if len(known) != len(ANSWERS):
        raise WeightError(f"{source.path}: {LOGIT_SCORE} must have true_token_id and false_token_id, not {ids!r:.60}")
    return known


def _linear(source: WeightSource, name: str, prefix: str = "", rows: int = 0) -> Step:
    """A linear step. The prefix may be missing in the file. rows: outputs that it must have, 0 for any."""
    head = next((each for each in (prefix + name, name) if f"{each}.weight" in source.names()), None)
    if head is None:
        raise WeightError(
            f"{source.path}: a reranker's head is named and {name + '.weight'!r} is missing; this file cannot rank"
        )
    weight = _checked(source, f"{head}.weight").astype(np.float64)
    bias = _checked(source, f"{head}.bias").astype(np.float64) if f"{head}.bias" in source.names() else np.zeros(1)
    weight = weight.reshape(-1, weight.shape[-1])
    if rows and len(weight) != rows:
        raise WeightError(f"{source.path}: {head + '.weight'!r} has {len(weight)} outputs, and a reranker's head has {rows}")
    return lambda row: weight @ row + bias


def _norm(source: WeightSource, name: str, eps: float) -> Step:
    weight = _checked(source, f"{name}.weight").astype(np.float64)

    def norm(row: Row) -> Row:
        centred = row - row.mean()
        normed: Row = centred / np.sqrt((centred**2).mean() + eps) * weight
        return normed

    return norm


def _checked(source: WeightSource, name: str) -> np.ndarray:
    values = read_floats(source, name)
    check_finite(values, np.float32, name, source)
    return values


def _rows(source: Any, name: str, ids: list[int]) -> np.ndarray:
    """Rows of a stored matrix, float64."""
    info = source.info(name)
    raw = np.ascontiguousarray(source.raw(name)[ids])
    values = dequantize(raw.reshape(-1), info.kind).reshape(len(ids), -1)
    check_finite(values, np.float32, name, source)
    return values.astype(np.float64)


def _gelu(row: Row) -> Row:
    return row * 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in row]))


def _raw(logits: Row) -> float:
    return float(logits[0])


def _sigmoid(logits: Row) -> float:
    value = float(logits[0])
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _first_of_two(logits: Row) -> float:
    """Probability of the first of two answers."""
    return _sigmoid(logits[:1] - logits[1:])


def _has_raw_scores(settings: dict[str, Any]) -> bool:
    """Whether sentence-transformers' settings ask for logits as scores."""
    new = settings.get("sentence_transformers")
    name = new.get("activation_fn") if isinstance(new, dict) else settings.get("sbert_ce_default_activation_function")
    return str(name).rpartition(".")[2] == "Identity"
