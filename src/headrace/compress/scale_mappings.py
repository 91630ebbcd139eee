"""Scale mappings of a layer, found in its recorded operations (no table of models)."""

from collections.abc import Mapping
from typing import Any

from headrace.compress.base import ScaleMapping
from headrace.runner.last_use import ValueUses
from headrace.runner.record import Node, Segment


def scale_mappings(segment: Segment, holders: Mapping[str, Any]) -> tuple[ScaleMapping, ...]:
    """The mappings of a layer in order. holders: by name. A value that anything but linear layers reads has none."""
    names = {id(holder): name for name, holder in holders.items()}
    uses = ValueUses(segment)
    producers_of = {value: node for node in segment.nodes for value in node.outputs}
    mappings = []
    for node in segment.nodes:
        readers = uses.by_linears(node.outputs[0])
        produced = _producer(node, producers_of)
        if readers and produced is not None:
            rule, holder = produced
            consumers = tuple(dict.fromkeys(names[id(reader.settings["w"])] for reader in readers))
            mappings.append(ScaleMapping(rule, names[id(holder)], consumers))
    return tuple(mappings)


def _producer(node: Node, makers: Mapping[int, Node]) -> tuple[str, Any] | None:
    """Rule and holder that can divide a node's result; None if unknown."""
    if node.op == "norm":
        return "norm", node.settings["w"]
    if node.op == "act_mul":
        maker = makers.get(node.inputs["gate_up"])
        if maker is not None and maker.op == "linear" and [name for name, _ in maker.settings["w"].parts] == ["gate", "up"]:
            return "gate", maker.settings["w"]
    if node.op == "attention":
        value = node.inputs.get("v", -1)
        maker = makers.get(value)
        if maker is not None and maker.op == "linear" and maker.settings["w"].split:
            parts = [name for name, _ in maker.settings["w"].parts]
            if parts[maker.outputs.index(value)] == "v":
                return "value", maker.settings["w"]
    return None
