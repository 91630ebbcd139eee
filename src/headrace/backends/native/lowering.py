"""Lowering of a recording to a Program of the native core: phases, the buffers between them, and four fusions.

Each fusion computes the same as the phases it replaces, without storing the intermediate result:

* norm_linear: a norm is applied while a linear layer's input is quantised;
* linear_act_mul: gate and up are multiplied tile by tile and return act(gate) * up as the next layer's quantised input;
* attention_linear: attention writes its result as the next layer's quantised input;
* linear_residual: a linear layer adds its result to the hidden rows in place.

Sequence parallelism: in a long step of a model that several ranks share, each rank sums, normalises and quantises its part of
the rows (`by_rows`), and receives the others as quantised inputs (`gather`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace import core
from headrace.backends.native.buffers import HEAD_ROWS, HIDDEN, Buffers, Floats, Input, Normed, Ropes, Values
from headrace.backends.native.distances import bias_by_distance
from headrace.backends.native.weights import PackedPart, PackedWeights
from headrace.backends.protocol import RankGroup
from headrace.data.config import ModelConfig
from headrace.kv.layout import KVPlace, kv_places
from headrace.models.layers import Sinusoids
from headrace.parallel.ranks.share import Share, head_unit
from headrace.runner.centring import k_shift
from headrace.runner.last_use import ValueUses, leading_to_kv, stores_kv
from headrace.runner.record import Node, RecordError, Recording, Segment
from headrace.weights.bits import bfloat16_bits
from headrace.weights.lora import Adapter, adapted_parts

FUSIONS = frozenset({"norm_linear", "linear_act_mul", "attention_linear", "linear_residual"})
# Activations that the phase of a gated linear layer applies.
GATES = ("silu", "gelu_tanh")
# Rows of a step from which the ranks split them. Below, an exchange of rows costs more than computing them on every rank.
SPLIT_FROM = 64


@dataclass(slots=True)
class Lowered:
    """A program, and the numbers of its taps by name. share: of a program that other ranks compute with."""

    program: Any
    taps: dict[str, int] = field(default_factory=dict)
    share: Share | None = None


def lower(
    recording: Recording,
    weights: PackedWeights,
    config: ModelConfig,
    *,
    pool: Any,
    kv: Any,
    max_positions: int,
    fuse: frozenset[str] = FUSIONS,
    isa: str = "",
    activations: str = "group",
    threshold: float = 0.0,
    head_ids: np.ndarray | None = None,
    enter: "Callable[[Lowered, Ropes, Buffers], None] | None" = None,
    centre: Mapping[int, np.ndarray] | None = None,
    windows: Any = None,
    places: Mapping[int, KVPlace] | None = None,
    group: RankGroup | None = None,
    entry_width: int = 0,
    adapters: Sequence[Adapter] = (),
) -> Lowered:
    """Lower a recorded model to a program over the KV pool `kv`, and the pool `windows` of layers with a window.

    places: pool and layer of the K/V of the model's layers; None: all are in `kv`. head_ids: token ids (ascending) with logits,
    None for all. enter: adds phases before the first layer. centre: shift of K for `k_shift`. entry_width: columns of the input
    rows that the first layer reads; 0: all. activations, threshold: rounding of the inputs of integer layers (group, token,
    split, tensor). Except for groups the scale depends on a whole row, or on the layer, so attention and gates return rows that
    are quantised in a phase of their own. group: the ranks that share the model; `config` and `weights` are then this rank's.
    adapters: of the model; the layers that they adapt read float rows, so only residual additions are fused. Raises RecordError
    for an operation without a phase in the native core.
    """
    fuse, sizes = (fuse & {"linear_residual"} if adapters else fuse), (config.hidden_size, config.vocab_size)
    more = ({} if group is None else {"ranks": group.core}) | ({} if windows is None else {"windows": windows})
    made = Lowered(core.module().Program(pool, kv, *sizes, isa, activations, threshold, **more))
    made.share = None if group is None else group.share
    ropes = Ropes(made.program, max_positions)
    buffers = Buffers(made.program)
    for name, segments in (("embed", (recording.embed,)), ("layer", recording.layers), ("head", (recording.head,))):
        if name == "head":
            # The head has fewer rows than the layers, so its buffers are others.
            buffers = Buffers(made.program)
        for segment in segments:
            made.program.begin(name)
            if enter is not None and name == "layer" and segment is segments[0]:
                enter(made, ropes, buffers)
            one = Lowering(made, segment, weights, config, ropes, buffers, fuse, head_ids, activations, centre, places)
            one.adapters = adapters
            one.run(HEAD_ROWS if name == "head" else HIDDEN, entry_width)
    if group is not None:
        made.program.split_from(SPLIT_FROM)
    made.program.seal()
    return made


class Lowering:
    """One segment on its way into a program."""

    def __init__(
        self,
        made: Lowered,
        segment: Segment,
        weights: PackedWeights,
        config: ModelConfig,
        ropes: Ropes,
        buffers: Buffers,
        fuse: frozenset[str],
        head_ids: np.ndarray | None = None,
        activations: str = "group",
        centre: Mapping[int, np.ndarray] | None = None,
        places: Mapping[int, KVPlace] | None = None,
    ) -> None:
        self.made = made
        self.program = made.program
        self.segment = segment
        self.weights = weights
        self.config = config
        self.ropes = ropes
        self.buffers = buffers
        self.fuse = fuse
        self.head_ids = head_ids
        self.by_group, self.static = activations == "group", activations == "tensor"
        self.centre = centre
        self.places = dict(enumerate(kv_places(config, 0))) if places is None else places
        self.share = made.share
        self.inputs: dict[tuple[int, str, tuple[int, ...], float], int] = {}  # quantised values, by form, order and scale
        self.fused: set[int] = set()  # nodes that earlier ones did already
        self.uses = ValueUses(segment)
        self.values = Values(buffers, self.uses)
        # Values of which a rank has its own rows only, in a step that splits its rows.
        self.split: set[int] = set()
        self.fills = _fills(segment)
        self.adapters: Sequence[Adapter] = ()

    def run(self, entry: int, width: int = 0) -> None:
        if self.segment.entry is not None:
            self.values.places[self.segment.entry] = Floats(entry, 0, width or self.config.hidden_size)
            if self.share is not None and entry == HIDDEN:
                self.split.add(self.segment.entry)
        for index, node in enumerate(self.segment.nodes):
            if index not in self.fused:
                step = getattr(self, f"_{node.op}", None)
                if step is None:
                    raise RecordError(f"the native core has no phase for {node.op!r}")
                step(index, node)
            self.values.retire(index)
        result = self.values.places.get(self.segment.result)
        if isinstance(result, Floats) and entry == HIDDEN and result.at != (HIDDEN, 0):
            self.program.copy(result.at, (HIDDEN, 0), result.width, name="copy", **self._by_rows(self.segment.result))
        self.values.retire(len(self.segment.nodes))

    # -- ops, in the order of the vocabulary ---------------------------------------------------------------------------
    def _embed(self, index: int, node: Node) -> None:
        table = node.settings["w"]
        scale = float(node.settings["scale"])
        if scale != 1.0 and not node.settings["exact"] and self.weights.rounds_to_bfloat16(table):
            scale = _bfloat16(scale)
        positions, types = node.settings["pos"], node.settings["types"]
        computed = positions if isinstance(positions, Sinusoids) else None
        numbers = None if types is None else self.weights.numbers(types)
        pair = types is not None and types.separator is not None
        self.program.embed(
            self.weights.table(table),
            HIDDEN,
            scale,
            None if positions is None or computed is not None else self.weights.table(positions),
            None if numbers is None else numbers[0],
            sinusoids=self.ropes.number(computed),
            name="embed",
            **({"second": numbers[1], "separator": types.separator} if pair and numbers is not None else {}),
            **({} if self.share is None else {"borders": self.share.borders}),
        )
        self.values.put(node.outputs[0], Floats(HIDDEN, 0, self.config.hidden_size))

    def _norm(self, index: int, node: Node) -> None:
        source, norm = self.values.rows(node.inputs["x"]), self._norm_weights(node.settings["w"])
        by_rows = self._by_rows(node.inputs["x"], to=node)
        if "norm_linear" in self.fuse and self.uses.by_linears(node.outputs[0]):
            self.values.put(node.outputs[0], Normed(source, norm))
            return
        out = self.values.fresh(node.outputs[0], source.width)
        self.program.norm(source.at, out.at, source.width, norm, **by_rows, **self._mark(index, "norm"))

    def _linear(self, index: int, node: Node) -> None:
        if self._gated(index, node):
            return
        layer = node.settings["w"]
        parts = self.weights.linear(layer, self._segment_unit(node))
        residual = self._residual_after(index, node)
        partial = None
        if self.share is not None and layer.columns is not None:
            if layer.split:
                raise RecordError("a layer whose inputs are divided between ranks has one output")
            partial = Floats(self.buffers.take("partial", layer.n_out), 0, layer.n_out)
        if residual is not None:
            out, kind = self.values.rows(self.segment.nodes[residual].inputs["x"]), "add"
            self.fused.add(residual)
            self.values.put(self.segment.nodes[residual].outputs[0], out)
            self._by_rows(self.segment.nodes[residual].inputs["x"], to=self.segment.nodes[residual])
        else:
            out, kind = Floats(self.buffers.take("float", layer.n_out), 0, layer.n_out), "store"
            column = 0
            for value, width in zip(node.outputs, layer.sizes if layer.split else (layer.n_out,), strict=True):
                self.values.put(value, Floats(out.buffer, column, width))
                column += width
        if partial is None:
            self._multiply(index, node, parts, kind, out)
            if self.adapters:
                self._adapt(index, node, out)
            return
        self._multiply(index, node, parts, "store", partial)
        # The bias is added once, after the sum over ranks.
        more = {"add": kind == "add", "bias": self.weights.bias(layer), **self._mark(index, "reduce")}
        self.program.reduce(partial.buffer, out.at, layer.n_out, by_rows=True, **more)
        self.split.update(self.segment.nodes[index if residual is None else residual].outputs)
        self.buffers.give(partial.buffer)

    def _multiply(self, index: int, node: Node, parts: list[PackedPart], kind: str, out: Floats) -> None:
        name = self.weights.name(node.settings["w"])
        for part in parts:
            source = self._input(index, node.inputs["x"], part.form, part.order, part.scale)
            at = (out.buffer, out.column + part.column)
            self.program.linear(part.linear, source, kind, at, **self._mark(index, name))

    def _adapt(self, index: int, node: Node, out: Floats) -> None:
        """Add one phase for the adapters of a linear layer, with the parts that an adapter has."""
        layer, x = node.settings["w"], self.values.rows(node.inputs["x"])
        parts, ranks = adapted_parts(self.adapters, self.weights.path(layer), layer.parts)
        if ranks:
            low = self.buffers.take("float", ranks)
            self.program.adapter(x.at, x.width, out.at, layer.n_out, low, parts, **self._mark(index, "adapter"))
            self.buffers.give(low)

    def _gated(self, index: int, node: Node) -> bool:
        """linear_act_mul, where it can be: returns whether it was."""
        follower = self.uses.only(node.outputs[0])
        if "linear_act_mul" not in self.fuse or follower is None:
            return False
        act_mul = self.segment.nodes[follower]
        if act_mul.op != "act_mul" or act_mul.settings["kind"] not in GATES:
            return False
        linear = self.weights.gated(node.settings["w"])
        if linear is None:
            return False
        (form,), (order,) = self.weights.form(node.settings["w"]), self.weights.order(node.settings["w"])
        source = self._input(index, node.inputs["x"], form, order, self.weights.scale(node.settings["w"]))
        out = self._result(act_mul.outputs[0], linear.n, "linear_act_mul")
        name = self.weights.name(node.settings["w"])
        self.program.linear(linear, source, "gated", out, act=act_mul.settings["kind"], **self._mark(index, name))
        self.fused.add(follower)
        return True

    def _attention(self, index: int, node: Node) -> None:
        settings, head_dim = node.settings, self.config.layers[node.settings["layer"]].head_dim
        q, *stored = self._side_by_side(index, node)
        k, v = stored or (None, None)
        q_norm, k_norm = (self._head_norm(settings[name]) for name in ("q_norm", "k_norm"))
        if settings["q_norm"] and settings["k_norm"] and settings["q_norm"].eps != settings["k_norm"].eps:
            raise RecordError("the norms of q and k have different eps, which the native core does not support")
        scale = head_dim**-0.5 if settings["scale"] is None else settings["scale"]
        out = self._result(node.outputs[0], q.width, "attention_linear", head_dim % 32 == 0)
        place = self.places[settings["layer"]]
        self.program.attention(
            place.layer,
            q.width // head_dim,
            q.at,
            k and k.at,
            v and v.at,
            out,
            scale=scale,
            rope=self.ropes.number(settings["rope"]),
            q_norm=q_norm,
            k_norm=k_norm,
            window=self._window(settings["window"], place.pool),
            softcap=settings["softcap"] or 0.0,
            sinks=None if settings["sinks"] is None else self.weights.vector(settings["sinks"]),
            k_shift=k_shift(self.segment, node, self.weights.bias, self.config, self.centre),
            causal=settings["causal"],
            source=settings["source"],
            pool=place.pool,
            bias=self._bias(settings["bias"], settings["softcap"] or scale),
            **self._heads(settings),
            **self.ropes.of_queries(settings["rope"], head_dim),
            **self._mark(index, "attention"),
        )

    def _heads(self, settings: dict[str, Any]) -> dict[str, int]:
        """How the rank's query heads read its K/V heads; empty without ranks."""
        if self.share is None:
            return {}
        if settings["sinks"] is not None or settings["bias"] is not None:
            raise RecordError("attention with sinks or a bias by distance is not divided between ranks")
        held = self.share.layers[settings["layer"]]
        return {"group": held.group, "skipped": held.first}

    def _window(self, window: int | None, pool: int) -> int:
        """The window as the core takes it: 0 if no sequence is longer. Files write the largest integer for "no window". Layers
        of the window pool always have one."""
        longest = self.ropes.positions
        return 0 if window is None or (window >= longest and not pool) else min(window, longest)

    def _bias(self, relative: Any, unit: float) -> np.ndarray | None:
        """What distances add to scores that are then scaled by `unit`."""
        if relative is None:
            return None
        return bias_by_distance(self.weights.numbers(relative), relative.distance, relative.both) / np.float32(unit)

    def _store(self, index: int, node: Node) -> None:
        if node.settings["rope"] is not None or node.settings["k_norm"] is not None:
            raise RecordError("the native core applies rotation and norm of K only inside attention")
        k, v = self._side_by_side(index, node)
        pool, layer = self.places[node.settings["layer"]]
        self.program.store(layer, k.at, v.at, pool=pool, **self._mark(index, "store"))

    def _act_mul(self, index: int, node: Node) -> None:
        source = self._all_rows(node.inputs["gate_up"])
        out = self.values.fresh(node.outputs[0], source.width // 2)
        self.program.act_mul(node.settings["kind"], source.at, out.at, out.width, **self._mark(index, "act_mul"))

    def _act(self, index: int, node: Node) -> None:
        source = self._all_rows(node.inputs["x"])
        out = self.values.fresh(node.outputs[0], source.width)
        self.program.act(node.settings["kind"], source.at, out.at, out.width, **self._mark(index, "act"))

    def _residual(self, index: int, node: Node) -> None:
        x, y = self.values.rows(node.inputs["x"]), self.values.rows(node.inputs["y"])
        if self.uses.last[node.inputs["x"]] == index:
            out = x
            self.values.put(node.outputs[0], x)
        else:
            out = self.values.fresh(node.outputs[0], x.width)
        post_norm = node.settings["post_norm"]
        norm = None if post_norm is None else self._norm_weights(post_norm)
        by_rows = self._by_rows(node.inputs["x"], node.inputs["y"], to=node)
        self.program.residual(x.at, y.at, out.at, x.width, norm, **by_rows, **self._mark(index, "residual"))

    def _tap(self, index: int, node: Node) -> None:
        x = self.values.rows(node.inputs["x"])
        if x.width != self.config.hidden_size:
            raise RecordError(f"the native core taps hidden rows only, and {node.settings['name']!r} is {x.width} wide")
        tap = self.made.taps.setdefault(node.settings["name"], len(self.made.taps))
        if tap == len(self.made.taps) - 1:
            self.program.tap()
        self.program.copy_to_tap(x.at, tap, name="tap")
        self.values.put(node.outputs[0], x)
        self._by_rows(node.inputs["x"], to=node)

    def _head(self, index: int, node: Node) -> None:
        part = self.weights.head(node.settings["w"], self.head_ids)
        source = self._input(index, node.inputs["x"], part.form, part.order)
        vocab_size, ids = self.config.vocab_size, self.head_ids
        logits, maxima = self._logits(vocab_size if ids is None else len(ids))
        scale, softcap = node.settings["scale"], node.settings["softcap"] or 0.0
        more = {"scale": scale, "softcap": softcap, "maxima": maxima, "name": "head"}
        first = 0 if self.share is None else self.share.vocab.start
        self.program.linear(part.linear, source, "logits", (logits, first), **more)
        if self.share is not None:
            self.program.gather(logits, name="gather")
        if ids is not None:
            self.program.scatter(logits, *self._logits(vocab_size), ids.tolist(), vocab_size, name="scatter")

    def _logits(self, width: int) -> tuple[int, int]:
        """Buffers of logits and of their block maxima. Ranks write their columns of common buffers."""
        more = {} if self.share is None else {"shared": True}
        blocks = -(-width // core.module().VOCAB_BLOCK)
        return self.buffers.take("float", width, **more), self.buffers.take("float", blocks, **more)

    # -- values --------------------------------------------------------------------------------------------------------
    def _result(self, value: int, width: int, fusion: str, possible: bool = True) -> tuple[int, int]:
        """Where attention or a gate leaves a value: as an input where only linear layers of one form read it, else as rows."""
        forms = self._forms(value)
        if fusion in self.fuse and len(forms) == 1 and ((possible and self.by_group) or forms == {"bf16"}):
            (form,) = forms
            buffer = self.buffers.take(form, width)
            self.values.put(value, Input(buffer, form))
            return buffer, 0
        return self.values.fresh(value, width).at

    def _input(self, index: int, value: int, form: str, order: tuple[int, ...], scale: float = 0.0) -> int:
        """The buffer with a value as a linear layer's quantised input. The first use adds the phase that fills it."""
        place = self.values.places[value]
        if isinstance(place, Input):
            return place.buffer
        key = (value, form, order, scale if self.static else 0.0)
        if key not in self.inputs:
            rows, norm = (place.rows, place.norm) if isinstance(place, Normed) else (place, None)
            buffer = self.buffers.take(form, rows.width, local=True)
            self.inputs[key] = buffer
            self.values.hold(buffer, value)
            # A phase that also stores K and V must run when only they are computed.
            reader = next((at for at in self.uses.of(value) if at in self.fills), index)
            mark = self._mark(reader, "quantize")
            more = self._extreme(rows, mark) if form == "a8" and not key[-1] and self._divided(value) else {}
            by_rows = self._by_rows(value)
            self.program.quantize(rows.at, buffer, norm, order=order, scale=key[-1], **more, **by_rows, **mark)
            if by_rows:
                self.program.gather(buffer, **{**mark, "name": "gather"})
        return self.inputs[key]

    def _divided(self, value: int) -> bool:
        """Whether each rank has columns of a value whose scale depends on the whole row."""
        if self.share is None or self.by_group:
            return False
        readers = (node for node in self.uses.by_linears(value) if node.op == "linear")
        return any(node.settings["w"].columns is not None for node in readers)

    def _extreme(self, rows: Floats, mark: dict[str, Any]) -> dict[str, int]:
        """Add the phase that takes the largest absolute value of each row over all ranks."""
        buffer = self.buffers.take("float", 1)
        self.program.extreme(rows.at, buffer, rows.width, **{**mark, "name": "extreme"})
        return {"extremes": buffer}

    def _side_by_side(self, index: int, node: Node) -> list[Floats]:
        """q, k and v of a node as columns of one buffer, as attention needs them. They are copied if they are not."""
        parts = [self._all_rows(node.inputs[name]) for name in "qkv" if name in node.inputs]
        if len({rows.buffer for rows in parts}) == 1:
            return parts
        buffer = self.buffers.take("float", sum(rows.width for rows in parts))
        self.values.hold(buffer, *node.inputs.values())
        made: list[Floats] = []
        for rows in parts:
            made.append(Floats(buffer, sum(other.width for other in made), rows.width))
            self.program.copy(rows.at, made[-1].at, rows.width, **self._mark(index, "copy"))
        return made

    def _by_rows(self, *values: int, to: Node | None = None) -> dict[str, bool]:
        """How a phase reads rows: the rank's own rows in a step that splits them, if it has no others of one of the values.
        `to`: the node with the result, of which the rank then has no others either."""
        if self.split.isdisjoint(values):
            return {}
        self.split.update(() if to is None else to.outputs)
        return {"by_rows": True}

    def _all_rows(self, value: int) -> Floats:
        """The float rows of a value. Raises RecordError if a rank has its own rows only, in a step that splits them."""
        if value in self.split:
            raise RecordError("a model that ranks share reads hidden rows in norms, linear layers and residuals alone")
        return self.values.rows(value)

    # -- what is around a node -----------------------------------------------------------------------------------------
    def _mark(self, index: int, name: str) -> dict[str, Any]:
        return {"sublayer": self.uses.sublayer[index], "name": name, "fills": index in self.fills}

    def _forms(self, value: int) -> set[str]:
        """The inputs wanted of a value that only linear layers read; empty where something else reads it, or one reads its
        columns in an order of its own."""
        layers = [node.settings["w"] for node in self.uses.by_linears(value)]
        if any(self.weights.order(layer) != {()} for layer in layers):
            return set()
        return {form for layer in layers for form in self.weights.form(layer)}

    def _residual_after(self, index: int, node: Node) -> int | None:
        """The residual that this linear layer can add itself into: x is not needed otherwise any more."""
        follower = self.uses.only(node.outputs[0])
        if "linear_residual" not in self.fuse or node.settings["w"].split or follower is None:
            return None
        residual = self.segment.nodes[follower]
        if residual.op != "residual" or residual.settings["post_norm"] is not None or residual.inputs["y"] != node.outputs[0]:
            return None
        x = residual.inputs["x"]
        return follower if self.uses.free_for(x, index, follower) and isinstance(self.values.places.get(x), Floats) else None

    def _segment_unit(self, node: Node) -> int:
        """Columns of a unit of the fixed segments that a row-parallel layer is summed in; 0 for the others."""
        columns = node.settings["w"].columns
        if columns is None:
            return 0
        layer = next(other.settings["layer"] for other in self.segment.nodes if other.op == "attention")
        return head_unit(self.config.layers[layer].head_dim) if columns == "heads" else 64

    def _norm_weights(self, norm: Any) -> Any:
        return core.module().NormWeights(norm.kind, self.weights.vector(norm), self.weights.vector(norm, "bias"), norm.eps)

    def _head_norm(self, norm: Any) -> Any:
        if norm is not None and norm.kind != "rms":
            raise RecordError(f"the native core normalises heads by rms, not {norm.kind!r}")
        return None if norm is None else self._norm_weights(norm)


def _fills(segment: Segment) -> set[int]:
    """The nodes that K and V of a layer need, by index; none of what stores none."""
    return set(leading_to_kv(segment)) if stores_kv(segment) else set()


def _bfloat16(value: float) -> float:
    """Rounded to nearest even."""
    bits = bfloat16_bits(np.array([value])).astype(np.uint32) << 16
    return float(bits.view(np.float32)[0])
