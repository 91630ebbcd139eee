"""Rotary scaling that the user gives a model for a longer context (`--rope yarn:4`), instead of its files."""

from dataclasses import replace

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models.reader import magnitude

KINDS = ("linear", "yarn")
LARGEST = 64.0  # published models extend their context by 2 to 40


def parse_scaling(value: str) -> tuple[str, float]:
    """Parse KIND:FACTOR, such as "yarn:4". Raises ValueError, one line."""
    kind, _, number = value.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if kind not in KINDS or not 1 < factor <= LARGEST:
        raise ValueError(
            f"rope {value!r}: give a kind ({' or '.join(KINDS)}) and a factor above 1 and up to {LARGEST:g}, as in yarn:4"
        )
    return kind, factor


def with_scaling(config: ModelConfig, value: str) -> ModelConfig:
    """The config with this scaling in all rotary layers, and a context that is longer by its factor.

    YaRN with the paper's constants (arXiv 2309.00071: beta 32 and 1, attention scaled by 0.1 ln(factor) + 1); linear is
    position interpolation (arXiv 2306.15595). Raises ValueError for a model without rotary positions, or with a scaling.
    """
    kind, factor = parse_scaling(value)
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    if not ropes:
        raise ValueError(f"rope {value}: a {config.architecture} model has no rotary positions; leave rope out")
    if own := sorted({rope.scaling for rope in ropes} - {"none"}):
        raise ValueError(f"rope {value}: the model's files give it a scaling ({', '.join(own)}); leave rope out")

    def scaled(rope: RopeConfig) -> RopeConfig:
        if kind == "linear":
            return replace(rope, scaling="linear", factor=factor)
        return replace(rope, scaling="yarn", factor=factor, original_context=config.max_position, amplitude=magnitude(factor))

    layers = tuple(layer if layer.rope is None else replace(layer, rope=scaled(layer.rope)) for layer in config.layers)
    return replace(config, layers=layers, max_position=int(config.max_position * factor))


def scaling_note(config: ModelConfig, value: str | None) -> str:
    """Text for the user about a scaling that was given; empty without one."""
    return "" if value is None else f", rope {value} for {config.max_position} tokens (not given by the model's makers)"
