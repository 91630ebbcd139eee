"""Spans of a model: its first layers, or all but some sublayers."""

from dataclasses import dataclass

ATTENTION, MLP = 1, 2  # sublayers, as bits


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a model that a step runs.

    layers: number of layers from the first one (0: all). skips: per layer the bits of sublayers to leave out. first: the layer
    to start from, with hidden rows as input. fill: compute only K/V of each layer from unchanged rows; attention reads nothing
    and no want is answered.

    A span may draft for its model. It reads the model's K/V and writes approximate K/V of its chain there, which the model's
    own step overwrites before anything else reads them.

    Source: Elhoushi et al., "LayerSkip", arXiv 2404.16710; Zhang et al., "Draft & Verify", arXiv 2309.08168.
    """

    layers: int = 0
    skips: tuple[int, ...] = ()
    first: int = 0
    fill: bool = False

    def skip(self, layer: int) -> int:
        """The bits of a layer's sublayers to leave out."""
        return self.skips[layer] if layer < len(self.skips) else 0


WHOLE = Span()
