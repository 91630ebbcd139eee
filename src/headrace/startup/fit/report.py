"""Everything that the planner says of a model, as plain data: the content of `headrace fit --json`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.backends.native import offload
from headrace.startup.fit import solve
from headrace.startup.fit.costs import Step, decode_seconds, prefill_seconds, products_of, timed
from headrace.startup.fit.machine import Machine
from headrace.startup.fit.shapes import ModelShape
from headrace.startup.fit.sizes import BLOCK, Bytes, Layout, Load, bytes_of, check_layout, largest_rank, units_of

# Sequences whose longest context is shown.
BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Question:
    """What the user asks: the load, a layout, memory in bytes a rank, number of machines, limits in seconds (0: none)."""

    load: Load
    layout: Layout
    memory: int
    devices: int = 1
    tpot: float = 0.0
    ttft: float = 0.0


def report(shape: ModelShape, question: Question, machine: Machine | None) -> dict[str, Any]:
    """All answers but the cells. Times are left out without a machine. Raises ValueError for an impossible layout."""
    check_layout(shape, question.layout)
    load = question.load
    if load.context > shape.max_position:
        raise ValueError(f"--context {load.context}: {shape.name} has {shape.max_position} positions; lower it")
    made: dict[str, Any] = {
        "model": model_record(shape, load.kv_dtype),
        "memory": memory_record(shape, question),
        "batches": [
            {
                "context": context,
                "batch": solve.largest_batch(shape, replace(load, context=context), question.memory, question.layout),
            }
            for context in contexts(shape, load.context)
        ],
        "contexts": [
            {
                "batch": batch,
                "context": solve.longest_context(shape, replace(load, batch=batch), question.memory, question.layout),
            }
            for batch in sorted({*BATCHES, load.batch})
        ],
    }
    if machine is not None and not shape.encoder:
        made |= times(shape, question, machine)
    return made


def model_record(shape: ModelShape, kv_dtype: str) -> dict[str, Any]:
    return {
        "name": shape.name,
        "architecture": shape.architecture,
        "origin": shape.origin,
        "refusal": shape.refusal,
        "parameters": shape.parameters,
        "parameters_used": shape.multiplied,
        "layers": len(shape.layers),
        "max_position": shape.max_position,
        "weights_bytes": shape.weights_bytes,
        "kv_bytes_per_token": shape.kv_block_bytes(kv_dtype) / 16,
        "state_bytes": shape.state_bytes,
        "source_bytes": shape.kv_blocks(0, 1, BLOCK) * shape.kv_block_bytes(kv_dtype, BLOCK),
    }


def memory_record(shape: ModelShape, question: Question) -> dict[str, Any]:
    """Bytes of the largest rank, of all ranks, and whether they fit."""
    layout = replace(question.layout, replicas=1)
    largest = largest_rank(shape, question.load, layout)
    ranks = [
        {"stage": stage, "rank": rank, **_parts(bytes_of(shape, question.load, layout, rank, stage))}
        for stage in range(layout.pp)
        for rank in range(layout.tp)
    ]
    room = {"available": question.memory, "fits": largest.total <= question.memory}
    return {**_parts(largest), **room, "ranks": ranks, "layout": str(question.layout)}


def offload_record(shape: ModelShape, question: Question, machine: Machine | None) -> dict[str, Any]:
    """Layer offload: bytes of weights in memory and on disk, and the time of a step, which reads the latter.

    A step takes the longer of computing and reading. Times are left out without a machine, or if its disk is not known.
    """
    load = question.load
    if question.layout.ranks > 1 or shape.encoder:
        raise ValueError("--offload is for one process and decoders; leave --tp, --pp and --replicas out, or --offload")
    need, units = largest_rank(shape, load), units_of(shape)
    room = question.memory - (need.total - sum(units))
    division, fits = offload.divide(units, room), offload.least_resident(units) <= room
    made: dict[str, Any] = {
        "memory": division.resident,
        "disk": division.streamed,
        "fits": fits,
        "bandwidth": None if machine is None else machine.disk or None,
    }
    if machine is not None and machine.disk:
        reading = division.streamed / machine.disk
        computing = decode_seconds(shape, load.batch, load.context, machine, load.kv_dtype)
        made |= {"reading_ms": 1e3 * reading, "computing_ms": 1e3 * computing, "tpot_ms": 1e3 * max(reading, computing)}
    return made


def _parts(bytes_: Bytes) -> dict[str, int]:
    names = ("weights", "kv", "state", "buffers", "process", "total")
    windows = {"kv_windows": bytes_.windows} if bytes_.windows else {}
    return {name: getattr(bytes_, name) for name in names} | windows


def contexts(shape: ModelShape, asked: int) -> list[int]:
    """Contexts of the table: usual ones within the model's, and the one asked for."""
    usual = [context for context in solve.CONTEXTS if context < shape.max_position]
    return sorted({*usual, asked, shape.max_position})


def times(shape: ModelShape, question: Question, machine: Machine) -> dict[str, Any]:
    """Machine, operations and roofline of both phases, limits that were asked for, and layouts."""
    load, layout = question.load, replace(question.layout, replicas=1)
    decode = Step(1, load.batch, load.context - 1, kv_dtype=load.kv_dtype)
    prefill = Step(min(load.chunk, load.context), 1, 0, kv_dtype=load.kv_dtype)
    made: dict[str, Any] = {
        "machine": {
            "name": machine.name,
            "label": machine.label,
            "source": machine.source,
            "bandwidth": machine.bandwidth,
            "peak": machine.peak,
            "ridge": {name: machine.ridge(name) for name in machine.peak},
        },
        "phases": {name: phase_record(shape, step, machine) for name, step in (("prefill", prefill), ("decode", decode))},
        "predicted": {
            "tpot_ms": 1e3 * decode_seconds(shape, load.batch, load.context, machine, load.kv_dtype, layout),
            "ttft_ms": 1e3 * prefill_seconds(shape, load.context, machine, load.chunk, load.kv_dtype, layout),
        },
    }
    if question.tpot:
        made["batch_under_tpot"] = solve.batch_under(shape, load, machine, question.tpot, question.memory, layout)
    if question.ttft:
        chunk, seconds = solve.chunk_under(shape, load, machine, question.ttft, layout)
        made["chunk_under_ttft"] = {"chunk": chunk, "ttft_ms": 1e3 * seconds}
    choices = solve.best(shape, load, machine, question.memory, question.devices)
    made["layouts"] = [_choice(choice) for choice in choices]
    made["advice"] = solve.advice(shape, load, question.memory, question.devices, choices)
    return made


def phase_record(shape: ModelShape, step: Step, machine: Machine) -> dict[str, Any]:
    """Operations, bytes and time of a step, and the roofline of each kind of operation."""
    lines: dict[str, dict[str, Any]] = {}
    for each in timed(shape, step, machine):
        operation = each.operation
        line = lines.setdefault(
            operation.name,
            {"operations": 0.0, "bytes": 0.0, "ms": 0.0, "limit": each.limit, "products": products_of(operation)},
        )
        line["operations"] += operation.operations * operation.calls
        line["bytes"] += operation.nbytes * operation.calls
        line["ms"] += 1e3 * each.seconds
    for line in lines.values():
        line["intensity"] = line["operations"] / line["bytes"] if line["bytes"] else None
    total = {name: sum(line[name] for line in lines.values()) for name in ("operations", "bytes", "ms")}
    return {"rows": step.tokens, "past": step.past, **total, "by_operation": lines}


def _choice(choice: solve.Choice) -> dict[str, Any]:
    layout = choice.layout
    return {
        "layout": str(layout),
        **{name: getattr(layout, name) for name in ("tp", "pp", "replicas")},
        "bytes": choice.total,
        "batch": choice.batch,
        "tpot_ms": 1e3 * choice.tpot,
        "ttft_ms": 1e3 * choice.ttft,
        "tokens_per_s": choice.tokens_per_s,
        "binding": choice.binding,
    }


def cells_record(
    predicted: dict[str, dict[str, float]], measured: dict[str, dict[str, float]] | None = None
) -> dict[str, dict[str, Any]]:
    """By cell `predicted`, `measured` (None if it was not) and `error` of the predicted time.

    The predicted time of a measured cell is scaled by `slowness` of the machine next to it.
    """
    made: dict[str, dict[str, Any]] = {}
    for name, cell in predicted.items():
        found = (measured or {}).get(name)
        if found is not None and cell:
            slowness = found.get("slowness", 1.0)
            cell = {"ms": cell["ms"] * slowness, "tokens_per_s": cell["tokens_per_s"] / slowness}
        made[name] = {"predicted": cell, "measured": found, "error": cell["ms"] / found["ms"] - 1 if found and cell else None}
    return made


def kinds(shape: ModelShape) -> Sequence[str]:
    """Number formats of the matrices that a token is multiplied by."""
    every = [linear for layer in shape.layers for linear in layer.linears] + [shape.head]
    return list(dict.fromkeys(part.label for linear in every for part in linear.parts))
