"""Cuts a model into stages: consecutive layers, the embedding with the first stage and the head with the last one."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.data.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that one process of a pipeline runs. number: 0 for the first stage."""

    number: int
    layers: range

    def __str__(self) -> str:
        return f"stage {self.number} (layers {self.layers.start} to {self.layers.stop - 1})"


def cut_layers(config: ModelConfig, stages: int, sizes: Sequence[int] = ()) -> tuple[Stage, ...]:
    """Stages whose largest one has as few parameters as possible; or stages of `sizes` layers.

    A layer that reads the K/V of a layer below it stays with that layer. Raises ValueError for a cut that cannot be made.
    """
    count, ends = config.num_layers, _ends(config)
    if stages < 1 or stages > len(ends):
        parted = "" if len(ends) == count else f", of which {len(ends)} groups share no K/V"
        raise ValueError(f"pp={stages}: the model has {count} layers{parted}; use pp of 1 to {len(ends)}")
    if sizes:
        if len(sizes) != stages or sum(sizes) != count or min(sizes) < 1:
            raise ValueError(f"stages {_listed(sizes)}: give {stages} numbers of layers with the sum {count}")
        borders = [sum(sizes[:at]) for at in range(stages + 1)]
        for border in borders[1:-1]:
            if border not in ends:
                raise ValueError(
                    f"stages {_listed(sizes)}: layer {border} reads the K/V of layer {border - 1}; keep them together"
                )
    else:
        borders = _balanced(config, stages, ends)
    return tuple(Stage(at, range(borders[at], borders[at + 1])) for at in range(stages))


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _ends(config: ModelConfig) -> list[int]:
    """Numbers of layers after which a cut can be made, ascending; the last one is all layers."""
    return [at for at in range(1, config.num_layers + 1) if at == config.num_layers or not config.layers[at].shares]


def _balanced(config: ModelConfig, stages: int, ends: list[int]) -> list[int]:
    """Borders of the stages with the smallest largest stage; of equal cuts the one with the earliest borders."""
    hidden, table = config.hidden_size, config.vocab_size * config.hidden_size
    sizes = [hidden * (sum(layer.qkv.values()) + layer.q_size + 3 * layer.ffn) for layer in config.layers]

    def size(first: int, last: int) -> int:
        return sum(sizes[first:last]) + table * ((first == 0) + (last == config.num_layers))

    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}  # by border: the largest stage before it, and the borders
    for stage in range(stages):
        reached: dict[int, tuple[int, list[int]]] = {}
        for end in ends:
            if (end == config.num_layers) != (stage == stages - 1):
                continue
            cuts = [(max(most, size(start, end)), [*borders, end]) for start, (most, borders) in best.items() if start < end]
            if cuts:
                reached[end] = min(cuts)
        best = reached
    return best[config.num_layers][1]
