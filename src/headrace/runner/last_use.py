"""Liveness of the values of a recorded segment: their readers and last uses, the sublayer of each node, and the nodes that lead
to K/V."""

from headrace.ops.registry import OPS
from headrace.runner.record import Node, RecordError, Segment
from headrace.runner.span import ATTENTION, MLP


class ValueUses:
    """The readers of a segment's values.

    A norm or tap may return its input, so in `last` and `free_for` readers of its output count as readers of the input.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.last = _last_uses(segment)
        self.sublayer = sublayers(segment)

    def of(self, value: int) -> list[int]:
        """Indices of the nodes that read a value."""
        return [i for i, node in enumerate(self.segment.nodes) if value in node.inputs.values()]

    def only(self, value: int) -> int | None:
        """Index of the only node that reads a value; None if none or several read it, or if it is the segment's result."""
        users = self.of(value)
        return users[0] if len(users) == 1 and value != self.segment.result else None

    def by_linears(self, value: int) -> list[Node]:
        """The linear layers that read a value; empty if any other op reads it too."""
        nodes = [self.segment.nodes[i] for i in self.of(value)]
        linears = all(node.op in ("linear", "head") for node in nodes)
        return nodes if linears and value != self.segment.result else []

    def free_for(self, value: int, after: int, reader: int) -> bool:
        """Whether only `reader` needs a value after node `after`, so that its rows may be overwritten from then on."""
        readers = set(self.of(value))
        for i in list(readers):
            node = self.segment.nodes[i]
            readers.update(self.of(node.outputs[0]) if node.op in ("norm", "tap") else ())
        return self.last[value] == reader and all(i <= after or i == reader for i in readers)


def _last_uses(segment: Segment) -> dict[int, int]:
    """Index of the last node that needs each value, also through a norm or tap."""
    last = {value: len(segment.nodes) for value in (segment.result,)}
    for index, node in reversed(list(enumerate(segment.nodes))):
        for value in node.inputs.values():
            reach = last.get(node.outputs[0], index) if node.op in ("norm", "tap") else index
            last[value] = max(last.get(value, -1), reach, index)
    return last


def sublayers(segment: Segment) -> list[int]:
    """Per node the sublayer (ATTENTION or MLP) that a step may skip, up to the residual that ends it; 0: never skipped."""
    marks = [0] * len(segment.nodes)
    first, carried = 0, segment.entry
    for index, node in enumerate(segment.nodes):
        if node.op == "tap" and node.inputs["x"] == carried:
            first, carried = index + 1, node.outputs[0]
        if node.op != "residual":
            continue
        group = segment.nodes[first : index + 1]
        written = {value for member in group for value in member.outputs}
        read = {value for member in group for value in member.inputs.values()}
        if node.inputs["x"] != carried or read - written != {carried}:
            return [0] * len(segment.nodes)
        mark = ATTENTION if any(member.op == "attention" for member in group) else MLP
        marks[first : index + 1] = [mark] * len(group)
        first, carried = index + 1, node.outputs[0]
    return marks


def kv_only(segment: Segment) -> Segment:
    """The part of a layer that makes its K/V: the ops that lead to them, with a `store` in place of attention. Empty for a
    layer that shares another's K/V."""
    if not stores_kv(segment):
        assert segment.entry is not None
        return Segment([], segment.entry, segment.entry, segment.values)
    *leading, last = leading_to_kv(segment)
    attention = segment.nodes[last]
    inputs = {name: attention.inputs[name] for name in ("k", "v")}
    settings = {name: attention.settings[name] for name in OPS["store"].parameters if name in attention.settings}
    nodes = [segment.nodes[at] for at in leading]
    stores = Node("store", inputs, settings, attention.outputs)
    return Segment([*nodes, stores], segment.entry, attention.outputs[0], segment.values)


def stores_kv(segment: Segment) -> bool:
    """Whether a layer has its own K/V."""
    return any(node.op == "attention" and "k" in node.inputs for node in segment.nodes)


def leading_to_kv(segment: Segment) -> list[int]:
    """Indices of the nodes that lead to a layer's K/V; its attention, which stores them, comes last."""
    storing = [at for at, node in enumerate(segment.nodes) if node.op == "attention" and "k" in node.inputs]
    if len(storing) != 1:
        raise RecordError(f"a layer of a decoder stores K and V once, and this one does so {len(storing)} times")
    needed, nodes = {segment.nodes[storing[0]].inputs[name] for name in ("k", "v")}, storing
    for at in reversed(range(storing[0])):
        if needed.intersection(segment.nodes[at].outputs):
            needed.update(segment.nodes[at].inputs.values())
            nodes = [at, *nodes]
    return nodes


def by_softmax_alone(node: Node) -> bool:
    """Whether nothing but softmax sees an attention's scores, so that a constant on all its keys changes nothing."""
    return node.settings["softcap"] is None and node.settings["sinks"] is None
