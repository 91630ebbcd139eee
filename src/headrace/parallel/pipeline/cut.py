"""Cuts a model into stages: consecutive layers, the embedding with the first stage and the head with the last one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from headrace.data.config import ModelConfig
from headrace.models.registry import describe


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that one process of a pipeline runs. number: 0 for the first stage."""

    number: int
    layers: range

    def __str__(self) -> str:
        return f"stage {self.number} (layers {self.layers.start} to {self.layers.stop - 1})"


def cut_layers(config: ModelConfig, stages: int, sizes: Sequence[int] = ()) -> tuple[Stage, ...]:
    """Stages whose largest one has as few numbers in matrices as possible; or stages of `sizes` layers.

    A layer that reads the K/V of a layer below it stays with that layer. Raises ValueError for a cut that cannot be made.
    """
    count, ends = config.num_layers, possible_ends(config)
    if stages < 1 or stages > len(ends):
        parted = "" if len(ends) == count else f", of which {len(ends)} groups share no K/V"
        raise ValueError(f"pp={stages}: the model has {count} layers{parted}; use pp of 1 to {len(ends)}")
    if sizes:
        if len(sizes) != stages or sum(sizes) != count or min(sizes) < 1:
            raise ValueError(f"stages {_listed(sizes)}: give {stages} numbers of layers with the sum {count}")
        borders = [sum(sizes[:at]) for at in range(stages + 1)]
        for border in borders[1:-1]:
            if border not in ends:
                reader, read = _across(config, border)[0]
                raise ValueError(f"stages {_listed(sizes)}: layer {reader} reads the K/V of layer {read}; keep them together")
    else:
        borders = _balanced(config, stages, ends)
    return tuple(Stage(at, range(borders[at], borders[at + 1])) for at in range(stages))


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def possible_ends(config: ModelConfig) -> list[int]:
    """Numbers of layers after which a cut can be made, ascending; the last one is all layers."""
    return [at for at in range(1, config.num_layers + 1) if not _across(config, at)]


def _across(config: ModelConfig, border: int) -> list[tuple[int, int]]:
    """The layers from `border` on that read the K/V of a layer below it, each with that layer."""
    return [(at, read) for at in range(border, config.num_layers) if (read := config.kv_layer(at)) < border]


def _balanced(config: ModelConfig, stages: int, ends: list[int]) -> list[int]:
    """Borders of the stages with the smallest largest stage, by the numbers in matrices."""
    layers, outside = [0] * config.num_layers, dict[str, int]()
    for path, holder in describe(config).holders():
        count = sum(spec.elements for spec in holder.params().values() if spec.tail)
        if path.startswith("layers."):
            layers[int(path.split(".")[1])] += count
        else:
            outside[path] = count
    head = outside.pop("output", 0) or outside["tokens"]
    return even_borders(layers, ends, sum(outside.values()), head, stages)


def even_borders(costs: Sequence[int], ends: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """Borders [0, …, number of layers] of consecutive stages whose largest cost is least; of equal ones the earliest borders.

    costs: of the layers. ends: layers after which a stage may end, ascending. first, last: further costs of these stages.
    """
    sums = [0, *accumulate(costs)]
    count = len(costs)
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}  # by border: the largest stage before it, and the borders
    for stage in range(stages):
        reached: dict[int, tuple[int, list[int]]] = {}
        for end in ends:
            if (end == count) != (stage == stages - 1):
                continue
            more = first * (stage == 0) + last * (end == count)
            cuts = [
                (max(most, sums[end] - sums[start] + more), [*borders, end])
                for start, (most, borders) in best.items()
                if start < end
            ]
            if cuts:
                reached[end] = min(cuts)
        best = reached
    return best[count][1]
