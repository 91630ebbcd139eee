"""Spans of a model: its first layers, or all but some sublayers."""

from dataclasses import dataclass

ATTENTION, MLP = 1, 2  # sublayers, as bits


@dataclass(frozen=True, slots=True)
class Span:
    """What a step runs of a model: `layers` of them (0: all), without the sublayers whose bits `skips` has for a layer; from
    layer `first` on, where it begins with hidden rows that were left there. `fill`: of each layer nothing but K and V is
    computed, of these rows as they are, which go on unchanged; nothing is read and nobody is answered.

    A span may draft for its model (LayerSkip, Elhoushi et al. 2024; Draft & Verify, Zhang et al. 2023). It reads the model's K
    and V and writes those of its chain over there: approximate ones, which the model's own step writes again before anything
    else reads them.
    """

    layers: int = 0
    skips: tuple[int, ...] = ()
    first: int = 0
    fill: bool = False

    def skip(self, layer: int) -> int:
        """The bits of a layer's sublayers that are left out."""
        return self.skips[layer] if layer < len(self.skips) else 0


WHOLE = Span()
