"""Parts of a model: its first layers, or all but some sublayers."""

from dataclasses import dataclass

ATTENTION, MLP = 1, 2  # sublayers, as bits


@dataclass(frozen=True, slots=True)
class Part:
    """What a step runs of a model: `layers` of them (0: all), without the sublayers whose bits `skips` has for a layer."""

    layers: int = 0
    skips: tuple[int, ...] = ()

    def skip(self, layer: int) -> int:
        """The bits of a layer's sublayers that are left out."""
        return self.skips[layer] if layer < len(self.skips) else 0
