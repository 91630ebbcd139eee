"""Layer pass: texts run through a model with one layer in memory at a time. Hidden rows are kept on disk.

Scale mappings of a layer come from its recorded operations; there is no table of models.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.compress.base import CHOSEN, FITTED, HELD, REPORTED, InputObserver, Inputs, Matrix, ScaleMapping, Visit
from headrace.compress.work_folder import WorkFolder
from headrace.data.config import ModelConfig
from headrace.models.base import Model
from headrace.models.layers import Linear
from headrace.ops.context import Context
from headrace.runner.last_use import ValueUses
from headrace.runner.record import Node, Segment, record
from headrace.runner.streamed import TABLE, OneLayer, Streamed
from headrace.weights.source import WeightSource

TOGETHER = 8  # texts in a chunk
LIBRARIES = 48 << 20  # bytes that torch and its libraries allocate when they first compute


class LayerPass:
    """The layers of an open model in order, each with the statistics of its inputs; see `__iter__`.

    kinds: format of each part of a matrix, by target; parts without one stay unchanged. choice: every second held-out text
    chooses the damping of a cut, and the others report its error.
    """

    def __init__(
        self,
        source: WeightSource,
        texts: Sequence[Sequence[int]],
        work: WorkFolder,
        kinds: Mapping[str, str],
        choice: bool = False,
    ) -> None:
        self._streamed = Streamed(source)
        self.model = self._streamed.model
        self._work, self._kinds = work, kinds
        held_out = [text for at, text in enumerate(texts) if at % HELD == HELD - 1]
        calibration = [text for at, text in enumerate(texts) if at % HELD != HELD - 1]
        self._choice = choice and len(held_out) > 1
        step = 2 if self._choice else 1
        parts = [(calibration, FITTED), (held_out[::step], REPORTED), (held_out[1::2] if self._choice else [], CHOSEN)]
        self._chunks = [(some[at : at + TOGETHER], part) for some, part in parts for at in range(0, len(some), TOGETHER)]
        self.tokens = sum(map(len, texts))
        longest = max(map(len, texts))
        self._pool = OneLayer(self.model, longest, torch.float32, min(TOGETHER, max(len(calibration), len(held_out))))
        self._segments = record(self.model, embeds=False).layers

    def __iter__(self) -> Iterator[Visit]:
        """Yield every layer with its input statistics, starting after the last finished one.

        When the caller asks for the next layer, the rows run through the layer with its changed weights, and the layer is
        written.
        Raises WeightError as `WorkFolder` does.
        """
        first = self._work.done
        if first == 0:
            self._embed()
        for number in range(first, self.model.config.num_layers):
            with self._streamed.holding(f"layers.{number}") as held:
                visit = self._measured(number, {path.split(".", 2)[2]: holder for path, holder in held.items()})
                importance = {name: matrix.inputs.hessian.diagonal().clone() for name, matrix in visit.matrices.items()}
                yield visit
                self._leave(visit, importance)

    def _embed(self) -> None:
        with self._streamed.holding(TABLE):
            self._through(0, lambda _, context: self.model.embed(context))

    def _measured(self, number: int, holders: dict[str, Any]) -> Visit:
        matrices = {}
        for name, holder in holders.items():
            if isinstance(holder, Linear):
                sizes = [part for part, _ in holder.parts]
                parts = dict(zip(sizes, holder.weight.split(holder.sizes), strict=True))
                matrix = Matrix(f"layers.{number}.{name}", holder, parts, {}, Inputs.empty(holder.n_in))
                matrix.kinds = {part: kind for part in parts if (kind := self._kinds.get(matrix.target(part)))}
                matrices[name] = matrix
        self._observe(number, matrices.values())
        segment = self._segments[number]
        return Visit(
            number,
            self.model.config.layers[number],
            holders,
            matrices,
            scale_mappings(segment, holders),
            run=lambda: self._passes(number),
            measure=lambda names: self._observe(number, [matrices[name] for name in names]),
            order=matrix_order(segment, holders),
        )

    def _observe(self, number: int, matrices: Collection[Matrix]) -> None:
        """Measure the inputs of some matrices with the layer's current weights."""
        part = FITTED  # of the current rows

        def observer(inputs: Inputs) -> InputObserver:
            return InputObserver(lambda x: inputs.add(x, part))

        for matrix in matrices:
            matrix.inputs = Inputs.empty(matrix.linear.n_in, self._choice)
            matrix.linear.method = observer(matrix.inputs)
        for x, context, part in self._rows(number):  # noqa: B007 - the observers read `part`
            self.model.layer(number, x, context)
        for matrix in matrices:
            matrix.linear.method = None
            matrix.inputs.finish()

    def _passes(self, number: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Chunks of the layer's inputs and outputs with its current weights, and their part of the texts."""
        for x, context, part in self._rows(number):
            yield x, self.model.layer(number, x, context), part

    def _parameters(self, visit: Visit, importance: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Every part of a layer's parameters, and the importance of each matrix's inputs."""
        tensors: dict[str, np.ndarray] = {}
        for name, holder in visit.holders.items():
            matrix = visit.matrices.get(name)
            for field, spec in holder.params().items():
                values = getattr(holder, field).split([rows for _, rows in spec.parts])
                for (part, _), value in zip(spec.parts, values, strict=True):
                    key = ".".join(filter(None, (f"layers.{visit.number}.{name}", part, field)))
                    coded = matrix.coded.get(part) if matrix is not None and field == "weight" else None
                    tensors[key] = value.numpy() if coded is None else coded.rows
            if matrix is not None:
                tensors[f"importance.{matrix.path}"] = importance[name].numpy()
        return tensors

    def _leave(self, visit: Visit, importance: Mapping[str, Tensor]) -> None:
        if visit.cut is None:
            tensors = self._parameters(visit, importance)
        else:
            tensors = {target: value.contiguous().numpy() for target, value in visit.cut.items()}
        about = {
            "kinds": {
                matrix.target(part): coded.kind for matrix in visit.matrices.values() for part, coded in matrix.coded.items()
            },
            "told": {target: asdict(one) for target, one in visit.outputs.items()},
            "notes": visit.notes,
            "extra": visit.extra,
            "cut": list(visit.cut or ()),
            "tokens": sum(len(text) for some, part in self._chunks if part == FITTED for text in some),
        }
        # Free the statistics before the next layer is read.
        for matrix in visit.matrices.values():
            matrix.inputs, matrix.parts, matrix.coded = Inputs.empty(0), {}, {}
        self._through(visit.number + 1, lambda x, context: self.model.layer(visit.number, x, context))
        self._work.finish_layer(visit.number, tensors, about)

    def _through(self, number: int, layer: Any) -> None:
        """Write the inputs of layer `number`: outputs of the layer before, or of the embedding."""
        with self._work.writing(self._work.rows(number)) as path:
            before = (
                self._rows(number - 1) if number else ((None, self._pool.context(*some), part) for some, part in self._chunks)
            )
            with path.open("wb") as file:
                for x, context, _ in before:
                    file.write(layer(x, context).contiguous().numpy().data)

    def _rows(self, number: int) -> Iterator[tuple[Tensor, Context, int]]:
        """Inputs of a layer, chunk by chunk, with their context and part of the texts."""
        path, width = self._work.rows(number), self.model.config.hidden_size
        if path.stat().st_size != 4 * width * self.tokens:
            raise self._work.damaged(path.name)
        with path.open("rb") as file:
            for some, part in self._chunks:
                # The same alignment in every run: sums have the same bits.
                x = torch.empty(sum(map(len, some)), width)
                file.readinto(x.numpy().data)
                yield x, self._pool.context(*some), part


def peak_bytes(config: ModelConfig, model: Model, tokens: int, window: int, choice: bool = False) -> int:
    """Peak memory of a pass, besides the program itself, in bytes.

    The token table; or a layer with its Hessians, a Cholesky factor, a matrix in the column loop, and one chunk of activations.
    choice: as of LayerPass.
    """
    layers: dict[str, list[Linear]] = {}
    sizes: dict[str, int] = {}
    for path, holder in model.holders():
        name = path.split(".")[1] if path.startswith("layers.") else path
        sizes[name] = sizes.get(name, 0) + 4 * sum(spec.elements for spec in holder.params().values())
        if isinstance(holder, Linear) and path.startswith("layers."):
            layers.setdefault(name, []).append(holder)
    rows = min(TOGETHER * window, tokens)
    heaviest = 0
    for number, linears in layers.items():
        moments = sum((2 + choice) * 4 * one.n_in**2 for one in linears)
        part = max(4 * one.n_in * rows_of for one in linears for _, rows_of in one.parts)
        upper = max(2 * 4 * one.n_in**2 for one in linears)
        layer = config.layers[int(number)]
        chunk = 4 * rows * (4 * config.hidden_size + 3 * layer.ffn + 2 * layer.q_size) + 8 * layer.heads * rows * window
        heaviest = max(heaviest, sizes[number] + moments + max(upper, chunk, upper // 2 + 7 * part))
    return LIBRARIES + max(heaviest, sizes[TABLE] + 4 * rows * config.hidden_size)


class TimeEstimate:
    """Time left, estimated from the layers finished in this run."""

    def __init__(self, total: int, done: int) -> None:
        self._left, self._began, self._made = total - done, time.monotonic(), 0

    def tick(self) -> tuple[float, float]:
        """Count a finished layer; returns mean seconds a layer, and seconds left."""
        self._made += 1
        taken = time.monotonic() - self._began
        return taken / self._made, taken / self._made * (self._left - self._made)


def layer_width(model: Model) -> int:
    """Inputs of the widest matrix of the layers; the number of calibration tokens is counted in these."""
    return max(holder.n_in for path, holder in model.holders() if isinstance(holder, Linear) and path.startswith("layers."))


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


def matrix_order(segment: Segment, holders: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a layer's matrices in the order in which it multiplies by them. holders: by name."""
    names = {id(holder): name for name, holder in holders.items() if isinstance(holder, Linear)}
    used = [names[id(node.settings["w"])] for node in segment.nodes if id(node.settings.get("w")) in names]
    return tuple(dict.fromkeys([*used, *names.values()]))


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
