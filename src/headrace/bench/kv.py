"""Cost of number formats of K and V: change of a model's predictions, and tokens/s at long contexts.

Predictions are computed in float32 torch, with each vector rounded as the KV pools round it. Speed is that of the native core.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch

from headrace.bench.competitors import OURS, Build, fitting, kv_bytes, load_competitors
from headrace.bench.figures import Column
from headrace.bench.interleave import Cell
from headrace.bench.interleave import measure as measure_rounds
from headrace.bench.machine import BandwidthProbe, Say
from headrace.compress.judge import compare_logits
from headrace.data.progress import Progress
from headrace.host import cores
from headrace.kv.layout import kv_shape
from headrace.kv.rounded import Rounding, by_channel, to_bfloat16, to_int4, to_int8, unrounded
from headrace.models.base import Model
from headrace.ops.context import Context
from headrace.runner.streamed import TABLE, OneLayer, Streamed
from headrace.startup.loading import open_model
from headrace.stats.paired_ratio import ratio
from headrace.weights.source import WeightSource

SPEEDS = ("bfloat16", "int8", "int4")
COLUMNS = (
    Column("K AND V", "{name}"),
    Column("BYTES A TOKEN", "{token_bytes:,.0f}"),
    Column("NATS LOST", lambda row: f"{row['nll']:+.4f}" + ("" if row["nll_error"] is None else f" ± {row['nll_error']:.4f}")),
    Column("KL", "{kl:.4f}"),
    Column("SAME CHOICE", "{same_choice:.1%}"),
)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Rounding of K and V. `bits`: bits per number of K and of V; `scales`: bits of the scales per vector of K and of V.

    `centred`: the mean key of the layer is subtracted from K first.
    """

    name: str
    k: Rounding = unrounded
    v: Rounding = unrounded
    bits: tuple[float, float] = (16, 16)
    scales: tuple[float, float] = (0, 0)
    centred: bool = False

    def token_bytes(self, model: Model) -> float:
        """Bytes of K and V per token over all layers; unrounded numbers count as bfloat16."""
        layers, heads, head_dim = kv_shape(model.config)
        return layers * heads * (head_dim * sum(self.bits) + sum(self.scales)) / 8


HALVES = partial(to_int4, parts=2)
EXACT = KVFormat("float32", bits=(32, 32))
FORMATS = (
    KVFormat("bfloat16", to_bfloat16, to_bfloat16),
    KVFormat("int8", to_int8, to_int8, (8, 8), (32, 32), True),
    KVFormat("int4", HALVES, to_int4, (4, 4), (64, 32), True),
    KVFormat("int8, K alone", to_int8, bits=(8, 16), scales=(32, 0), centred=True),
    KVFormat("int8, V alone", v=to_int8, bits=(16, 8), scales=(0, 32)),
    KVFormat("int4, K alone", HALVES, bits=(4, 16), scales=(64, 0), centred=True),
    KVFormat("int4, V alone", v=to_int4, bits=(16, 4), scales=(0, 32)),
    KVFormat("int4, K not centred", HALVES, to_int4, (4, 4), (64, 32)),
    KVFormat("int4, one scale for K", to_int4, to_int4, (4, 4), (32, 32), True),
    KVFormat("int4, one scale, K not centred", to_int4, to_int4, (4, 4), (32, 32)),
    KVFormat("int4, K by channel (not served)", by_channel, to_int4, (4, 4), (32, 32)),
)


@dataclass(slots=True)
class FormatLoss:
    """Losses of one format compared with float32 on the same tokens, one value per text.

    `nll`: nats of log-likelihood lost; `kl`: KL divergence of the next token; `same_choice`: share of equal first choices.
    """

    name: str
    token_bytes: float
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same_choice: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Figures for the JSON file; errors are standard errors over texts."""
        many = len(self.nll) > 1
        errors = {f"{name}_error": stdev(values) / math.sqrt(len(values)) if many else None for name, values in self._means}
        return {"name": self.name, "token_bytes": self.token_bytes, **{n: mean(x) for n, x in self._means}, **errors}

    @property
    def _means(self) -> list[tuple[str, list[float]]]:
        return [("nll", self.nll), ("kl", self.kl), ("same_choice", self.same_choice)]


class RoundedPool(OneLayer):
    """K and V of one layer, rounded to a format when they are written."""

    def __init__(self, number_format: KVFormat, centre: torch.Tensor, model: Model, tokens: int, dtype: torch.dtype) -> None:
        super().__init__(model, tokens, dtype)
        self._format, self._centre = number_format, centre

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        k = k - self._centre[layer] if self._format.centred else k
        super().write(layer, slots, self._format.k(k), self._format.v(v))


@torch.inference_mode()
def measure_losses(
    source: WeightSource,
    texts: Sequence[Sequence[int]],
    centre: np.ndarray,
    formats: Sequence[KVFormat] = FORMATS,
    tell: Progress | None = None,
) -> tuple[float, list[FormatLoss]]:
    """Perplexity in float32 of the second halves of texts, and the losses of each format there.

    All texts and formats pass through a layer before the weights of the next one are read, so one layer is in memory.
    centre: mean keys [layers, KV heads * head size] float32.
    """
    tell, streamed = tell or Progress(), Streamed(source)
    model, longest = streamed.model, max(map(len, texts))
    mean_key, compared = torch.from_numpy(centre).view(kv_shape(model.config)), (EXACT, *formats)
    tell.start("layers", model.config.num_layers, unit="layers")
    pools = [RoundedPool(each, mean_key, model, longest, torch.float32) for each in compared]
    contexts = [[pool.context(text) for text in texts] for pool in pools]
    with streamed.holding(TABLE):
        rows = [[model.embed(context) for context in some] for some in contexts]
    for number in range(model.config.num_layers):
        with streamed.holding(f"layers.{number}"):
            rows = [_through(model, number, *both) for both in zip(rows, contexts, strict=True)]
        tell.advance(1)
    tell.finish()
    losses = [FormatLoss(each.name, each.token_bytes(model)) for each in formats]
    exact: list[float] = []
    with streamed.holding(streamed.head):
        for at, text in enumerate(texts):
            count = len(text) // 2
            before, *after = (model.head(some[at][-count - 1 : -1]).numpy() for some in rows)
            for loss, logits in zip(losses, after, strict=True):
                one = compare_logits([text[-count:]], [(before, logits)], loss.name)
                loss.nll.append(math.log(one.perplexity / one.perplexity_before))
                loss.kl.append(one.kl)
                loss.same_choice.append(one.same_choice)
            exact.append(math.log(one.perplexity_before))
    return math.exp(mean(exact)), losses


def _through(model: Model, number: int, rows: list[torch.Tensor], contexts: list[Context]) -> list[torch.Tensor]:
    return [model.layer(number, x, context) for x, context in zip(rows, contexts, strict=True)]


def speeds(
    model: str,
    cells: Sequence[Cell],
    *,
    rounds: int = 5,
    threads: int | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> dict[str, Any]:
    """Tokens/s of the native core in each of SPEEDS, interleaved, by cell. `ratio`: int4 to int8, with its interval."""
    opened = open_model(model)
    opened.source.close()
    cells = fitting(cells, opened.config, say)
    task = {"threads": threads or cores(), "kv_bytes": kv_bytes(cells, opened.config)}
    first, *others = SPEEDS
    settings = {name: _setting(name) for name in others}
    cell_figures: dict[str, Any] = {}
    with ExitStack() as stack:
        theirs = Build(OURS, settings, Path(sys.prefix) / "bin" / "python")
        competitors = load_competitors(stack, opened.path, [theirs], _setting(first), task, say)
        if competitors.left_out:
            raise ValueError(next(iter(competitors.left_out.values())))
        probe = BandwidthProbe()
        for cell in cells:
            state = measure_rounds(competitors.variants, cell, rounds, opened.tokenizer.vocab_size, probe.gb_per_s)
            by_name = {variant.setting or first: variant.samples[cell.name] for variant in competitors.variants}
            pair = ratio(by_name["int4"], by_name["int8"])
            cell_figures[cell.name] = {
                "tokens_per_s": {name: median(samples) for name, samples in by_name.items()},
                "samples": by_name,
                "ratio": pair.median,
                "interval": [pair.low, pair.high],
                "others_cpu": median(state.others_cpu),
                "bandwidth_gb_s": median(state.bandwidth),
            }
            done({"cell": cell.name, **cell_figures[cell.name]})
    return cell_figures


def _setting(kv_dtype: str) -> dict[str, Any]:
    return {"backend": "native", "kv_dtype": kv_dtype}


def speed_lines(cells: dict[str, Any]) -> list[str]:
    """One line for each cell of `speeds`."""
    lines = []
    for cell, figures in cells.items():
        by_name = ", ".join(f"{name} {speed:.1f}" for name, speed in figures["tokens_per_s"].items())
        low, high = figures["interval"]
        lines.append(f"{cell}: {by_name} tokens/s; int4 {figures['ratio']:.3f} of int8 ({low:.3f} to {high:.3f})")
    return lines
