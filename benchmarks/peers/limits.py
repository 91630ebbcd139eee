"""The least time that a machine needs for a cell, from its limits: memory read bandwidth, products of int8 and of bfloat16."""

import math
from dataclasses import dataclass
from typing import Any

from headrace.bench.interleave import Cell
from headrace.data.config import ModelConfig
from headrace.kv.layout import all_kv_shapes
from headrace.models.registry import describe
from headrace.startup.loading import Opened
from headrace.weights.parts import plan

KV_BYTES = 2  # of a number: bfloat16, the default


@dataclass(frozen=True, slots=True)
class Work:
    """What a step needs: bytes of all weights that it reads; products of one token in the layers, and in the head."""

    weight_bytes: float
    layer_products: float
    head_products: float


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit that is reached first, "memory" or "products", and the least seconds that it allows."""

    name: str
    seconds: float


def work_of(opened: Opened) -> Work:
    """Read the sizes from the tensor headers of a model's file."""
    config, source = opened.config, opened.source
    read = layers = head = 0.0
    head_path = "tokens.weight" if config.tied_head else "output.weight"
    for path, parts in plan(describe(config), source).items():
        in_layer, in_head = path.startswith("layers."), path == head_path
        for part in parts if in_layer or in_head else ():
            info, count = source.info(part.source), math.prod(part.shape)
            read += info.nbytes * count / max(1, math.prod(info.shape))
            layers += count if in_layer else 0.0
            head += count if in_head else 0.0
    return Work(read, layers, head)


def attention_products(config: ModelConfig, first: int, last: int) -> float:
    """Products of Q·K and of weights·V for the queries at positions [first, last) of one sequence."""
    total = 0.0
    for layer in config.layers:
        window = layer.window or last
        seen = sum(min(position + 1, window) for position in range(first, last))
        total += 2 * layer.q_size * seen
    return total


def limit_of(cell: Cell, work: Work, config: ModelConfig, machine: dict[str, Any]) -> Limit:
    """The least seconds of a prefill, or of one decoding step, of a cell.

    machine: `bandwidth_gb_s`, and `gmacs` by kind of product (GMAC/s), from `headrace.bench.profile.limits`. Linear layers
    multiply int8, attention bfloat16. A decoding step stands in the middle of the cell's new tokens.
    """
    int8, bf16 = (machine["gmacs"][kind] * 1e9 for kind in ("int8", "bf16"))
    context = cell.prompt + cell.new_tokens // 2
    begin, rows = (context, 1) if cell.new_tokens else (0, cell.prompt)
    linear = cell.batch * (rows * work.layer_products + work.head_products)
    attention = cell.batch * attention_products(config, begin, begin + rows)
    kv_bytes = sum(shape.block_bytes(context, KV_BYTES) for shape in all_kv_shapes(config))
    kv = cell.batch * kv_bytes if cell.new_tokens else 0.0
    products = linear / int8 + attention / bf16
    memory = (work.weight_bytes + kv) / (machine["bandwidth_gb_s"] * 1e9)
    return Limit("memory", memory) if memory > products else Limit("products", products)


def share_of(cell: Cell, tokens_per_s: float, limit: Limit) -> float:
    """The part of the limit that a speed reaches, 1 at the limit."""
    tokens = cell.batch if cell.new_tokens else cell.batch * cell.prompt
    return limit.seconds * tokens_per_s / tokens
