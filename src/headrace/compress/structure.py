"""Cuts: which dimension of a model becomes smaller (neurons, heads, K/V heads, layers), and the checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.registry import describe

NEURONS, HEADS, LAYERS, KV_HEADS = STRUCTURES = ("neurons", "heads", "layers", "kv-heads")
OPTIONS = {NEURONS: "keep-neurons", HEADS: "keep-heads", LAYERS: "drop-layers", KV_HEADS: "kv-heads"}
EXAMPLES = {NEURONS: "0.75", HEADS: "0.75", LAYERS: "3", KV_HEADS: "1"}
ALIGNED, MEAN, FIRST = POOLS = ("aligned", "mean", "first")
WIDTH, NARROW = 64, 32  # neurons are kept in multiples of WIDTH, or of NARROW if there are less than 16 * WIDTH


@dataclass(frozen=True, slots=True)
class Cut:
    """A method of STRUCTURES with its number: share that is kept (neurons, heads) or count (layers to drop, K/V heads to keep).

    pool: how K/V heads are merged; None: aligned, or first if q and k have norms.
    """

    method: str
    number: float
    pool: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.method, f"{self.number:g}", self.pool)))


@dataclass(frozen=True, slots=True)
class CutReport:
    """Result of a cut: `before` and `after` count neurons, K/V heads or layers; `dropped` layers.

    layers: for each layer "distance" (mean of 1 - cos(input, output)), or relative output errors: "error" without correction,
    "repaired" with it, and both on held-out texts ("held", "held_repaired"; None: there are none).
    """

    method: str
    before: int
    after: int
    layers: list[dict[str, Any]]
    dropped: list[int]

    def mean(self, name: str) -> float | None:
        """Mean over the layers; None if unknown."""
        values = [layer[name] for layer in self.layers if layer.get(name) is not None]
        return sum(values) / len(values) if values else None


def parse_cuts(methods: Sequence[str], numbers: Mapping[str, float | None], pool: str | None) -> tuple[Cut, ...]:
    """The cuts among the methods, in order. numbers: by method. Raises ValueError for missing or invalid numbers."""
    chosen = [name for name in methods if name in STRUCTURES]
    if twice := [name for name in chosen if chosen.count(name) > 1]:
        raise ValueError(f"{','.join(methods)} cannot be: {twice[0]} is there twice; give its number once")
    for name, number in numbers.items():
        if name in chosen and number is None:
            raise ValueError(f"{name} needs --{OPTIONS[name]}, as in {EXAMPLES[name]}")
        if name not in chosen and number is not None:
            raise ValueError(f"--{OPTIONS[name]} needs the method {name}: --method {name}")
        if number is not None and name in (NEURONS, HEADS) and not 0 < number < 1:
            raise ValueError(f"--{OPTIONS[name]} is the share that stays, above 0 and below 1, not {number:g}")
        if number is not None and name in (LAYERS, KV_HEADS) and number < 1:
            raise ValueError(f"--{OPTIONS[name]} must be 1 or more, not {number:g}")
    if pool is not None and (KV_HEADS not in chosen or pool not in POOLS):
        raise ValueError(f"--pool is {', '.join(POOLS)}, for the method {KV_HEADS}, not {pool}")
    numbered = [(name, numbers[name]) for name in chosen]
    return tuple(Cut(name, number, pool if name == KV_HEADS else None) for name, number in numbered if number is not None)


def pruned_config(config: ModelConfig, cut: Cut) -> ModelConfig:
    """Config of a model after a cut. Raises ValueError if the model cannot be cut so."""
    if cut.method == LAYERS:
        if len(set(config.layers)) > 1:
            raise ValueError(f"the layers of this {config.architecture} model differ by their place, so none may be dropped")
        left = config.num_layers - int(cut.number)
        if left < 1:
            raise ValueError(f"this model has {config.num_layers} layers; drop fewer than {int(cut.number)}")
        return replace(config, layers=config.layers[:left])
    pruned = replace(config, layers=tuple(_layer(config, layer, cut) for layer in config.layers))
    if cut.method != KV_HEADS:
        return pruned
    if config.architecture == "gpt2":
        raise ValueError(
            f"{config.architecture} stores q, k and v as equal thirds of one tensor: it has as many K/V heads as heads"
        )
    if cut.pool == ALIGNED and has_qk_norm(config):
        raise ValueError("q and k of this model are normed by head, so they cannot be turned; use --pool first or mean")
    return pruned


def pool_of(config: ModelConfig, cut: Cut) -> str:
    """How K/V heads of this model are merged."""
    return cut.pool or (FIRST if has_qk_norm(config) else ALIGNED)


def has_qk_norm(config: ModelConfig) -> bool:
    """True if every query and key head has a norm."""
    return any(path.endswith(".q_norm") for path, _ in describe(config).holders())


def structure_size(config: ModelConfig, method: str) -> int:
    """Size of the dimension that a method reduces, in the first layer."""
    layer = config.layers[0]
    return {NEURONS: layer.ffn, HEADS: layer.kv_heads, KV_HEADS: layer.kv_heads, LAYERS: config.num_layers}[method]


def _layer(config: ModelConfig, layer: LayerConfig, cut: Cut) -> LayerConfig:
    if cut.method == NEURONS:
        step = WIDTH if layer.ffn >= 16 * WIDTH else NARROW
        kept = max(1, round(layer.ffn * cut.number / step)) * step
        if kept >= layer.ffn:
            raise ValueError(f"{cut.number:g} of {layer.ffn} neurons, in whole {step}s, are all of them; keep fewer")
        return replace(layer, ffn=kept)
    if cut.method == HEADS:
        groups = max(1, round(layer.kv_heads * cut.number))
        if groups >= layer.kv_heads:
            raise ValueError(
                f"heads go by the K/V head that they share: {cut.number:g} of this model's {layer.kv_heads} are all of them"
            )
        return replace(layer, heads=layer.heads // layer.kv_heads * groups, kv_heads=groups)
    kept = int(cut.number)
    if kept >= layer.kv_heads or layer.kv_heads % kept:
        fit = [str(count) for count in range(1, layer.kv_heads) if layer.kv_heads % count == 0]
        choose = f"choose {' or '.join(fit)}" if fit else "no smaller number is possible"
        raise ValueError(f"this model has {layer.kv_heads} K/V heads, and {kept} is not a proper divisor of that: {choose}")
    return replace(layer, kv_heads=kept)
