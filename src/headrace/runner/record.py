"""Records a model file once, with symbols for values, as lists of ops that a back end turns into a program. The recorder knows
no back end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.models.base import Model
from headrace.ops.registry import OPS


@dataclass(frozen=True, slots=True)
class Node:
    """One op. inputs: values by parameter name. settings: all other arguments (weight holders, numbers, names)."""

    op: str
    inputs: dict[str, int]
    settings: dict[str, Any]
    outputs: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Segment:
    """A part of a model: embed, one layer, or head. entry: the value it starts from (None: it needs none)."""

    nodes: list[Node] = field(default_factory=list)
    entry: int | None = None
    result: int = -1
    values: int = 0

    def new_value(self) -> "Value":
        self.values += 1
        return Value(self, self.values - 1)

    def record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Append an op; returns the symbol of its result, or one per part of a split linear."""
        bound = OPS[name].signature.bind(*args, **kwargs)
        bound.apply_defaults()
        inputs = {key: value.number for key, value in bound.arguments.items() if isinstance(value, Value)}
        settings = {key: value for key, value in bound.arguments.items() if not isinstance(value, Value | SymbolicContext)}
        split = name == "linear" and settings["w"].split
        outputs = [self.new_value() for _ in settings["w"].sizes] if split else [self.new_value()]
        self.nodes.append(Node(name, inputs, settings, tuple(value.number for value in outputs)))
        return tuple(outputs) if split else outputs[0]

    def uses(self, value: int) -> list[Node]:
        """The ops that read a value."""
        return [node for node in self.nodes if value in node.inputs.values()]


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """The symbol of a value's rows while recording."""

    segment: Segment
    number: int

    def __headrace_op__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.segment.record(name, args, kwargs)


@dataclass(frozen=True, eq=False, slots=True)
class SymbolicContext:
    """The step's context while recording: model files read ids and positions from it and pass it on."""

    ids: Value
    positions: Value


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole model. In `embed`, value 0 is the token ids and value 1 the positions; elsewhere value 0 is the hidden rows. An
    encoder's head has no nodes."""

    embed: Segment
    layers: tuple[Segment, ...]
    head: Segment


class RecordError(ValueError):
    """The model does something that a recording cannot contain; it runs in torch as a whole."""


def record(model: Model, embeds: bool = True, layers: range | None = None) -> Recording:
    """Trace every segment of a model once; embed only if `embeds`. Raises RecordError, naming the segment.

    layers: record only these. Embed is then recorded with the first layer, and the head with the last one.
    """
    count = model.config.num_layers
    held = range(count) if layers is None else layers
    embed = Segment()
    ctx = SymbolicContext(embed.new_value(), embed.new_value())
    if embeds and held.start == 0:
        _trace(embed, "embed", lambda: model.embed(ctx))
    # ids and positions belong to the step, not to a layer: a layer that reads them cannot start from hidden rows.
    recorded = _layers(held, "layer", lambda i, x: model.layer(i, x, _HANDED_ON))
    head = Segment(entry=0)
    rows = head.new_value()
    if not model.config.encoder and held.stop == count:
        _trace(head, "head", lambda: model.head(rows))
    return Recording(embed, recorded, head)


def record_cross(model: Model) -> Recording:
    """The ops with which every layer of an encoder-decoder stores K/V of the encoder's rows: segments that return these rows
    unchanged, without embed and head. Raises RecordError."""
    encoder = model.encoder
    assert encoder is not None, "only an encoder-decoder has sources"
    layers = _layers(range(model.config.num_layers), "cross", lambda i, x: model.cross(i, encoder.final(x), _HANDED_ON))
    for layer in layers:
        assert layer.entry is not None
        layer.result = layer.entry
    return Recording(Segment(), layers, Segment(entry=0))


def record_convolution(encoder: Model, number: int) -> Recording:
    """One convolution of an encoder that reads sound, as a recording of one layer. Raises RecordError."""
    layers = _layers(range(number, number + 1), "convolution", lambda i, x: encoder.convolve(i, x, _HANDED_ON))
    return Recording(Segment(), layers, Segment(entry=0))


def _layers(numbers: range, name: str, call: Callable[[int, Value], Any]) -> tuple[Segment, ...]:
    """One segment per layer, from hidden rows."""
    layers = []
    for i in numbers:
        layer = Segment(entry=0)
        x = layer.new_value()
        _trace(layer, f"{name} {i}", lambda i=i, x=x: call(i, x))
        layers.append(layer)
    return tuple(layers)


_NOWHERE = Segment()
_HANDED_ON = SymbolicContext(Value(_NOWHERE, -1), Value(_NOWHERE, -1))


def _trace(segment: Segment, name: str, call: Any) -> None:
    try:
        result = call()
    except (TypeError, AttributeError, KeyError) as error:
        raise RecordError(f"{name} cannot be recorded: {error}") from error
    if not isinstance(result, Value) or result.segment is not segment:
        raise RecordError(f"{name} does not return a value of the vocabulary")
    if any(number < 0 for node in segment.nodes for number in node.inputs.values()):
        raise RecordError(f"{name} reads ids or positions")
    segment.result = result.number
