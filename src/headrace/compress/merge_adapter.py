"""Merging of an adapter into a GGUF file: an adapted tensor is decoded, changed in float32 and encoded again in its format."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.compress.grids.encode import WRITTEN, encode
from headrace.models.base import Model
from headrace.weights.decode import read_floats
from headrace.weights.gguf import DEFAULT_ALIGNMENT, GGUFFile, write_gguf
from headrace.weights.kinds import FLOATS
from headrace.weights.lora import Adapter, LowRank
from headrace.weights.parts import WeightPart, layout
from headrace.weights.source import WeightError

Change = tuple[WeightPart, LowRank]


def merge_gguf(source: GGUFFile, described: Model, adapter: Adapter, out: Path, *, requantise: bool) -> int:
    """Write a GGUF file with the adapter added to a model's weights. Returns the number of changed tensors.

    described: the model of `source`, for which the adapter was read. requantise: encode quantised tensors again, which rounds
    all their values anew. Raises WeightError for quantised tensors without `requantise`, and for sums that are not finite.
    """
    parts = layout(described, "gguf")
    holders = dict(described.holders())
    changes: dict[str, list[Change]] = {}
    for path, adapted in adapter.layers.items():
        named = getattr(holders[path], "parts", ())
        for (name, _), part in zip(named, parts[f"{path}.weight"], strict=True):
            if name in adapted:
                changes.setdefault(part.source, []).append((part, adapted[name]))
    _check_kinds(source, changes, requantise)
    kept = [key for key in source.metadata if not key.startswith("split.")]
    alignment = int(source.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    infos = [source.info(name) for name in source.names()]
    write_gguf(out, [source.entry(key) for key in kept], infos, _chunks(source, changes), alignment)
    return len(changes)


def _check_kinds(source: GGUFFile, changes: dict[str, list[Change]], requantise: bool) -> None:
    kinds = {source.info(name).kind for name in changes}
    if not requantise and (packed := sorted(kinds - set(FLOATS))):
        raise WeightError(
            f"{source.path}: its weights are {', '.join(packed)}; --requantise rounds them a second time, "
            "or merge into the original model and compress that"
        )
    if unwritten := sorted(kinds - set(WRITTEN)):
        raise WeightError(f"{source.path}: {unwritten[0]} cannot be written; merge into the original model and compress that")


def _chunks(source: GGUFFile, changes: dict[str, list[Change]]) -> Iterator[tuple[str, np.ndarray]]:
    for name in source.names():
        if name not in changes:
            yield name, np.ascontiguousarray(source.raw(name)).reshape(-1)
            continue
        values = read_floats(source, name)
        for part, pair in changes[name]:
            rows = values.T if part.transpose else values
            rows = rows if part.rows is None else rows[slice(*part.rows)]
            delta = (pair.up.T @ pair.down.astype(np.float64)).astype(np.float32)
            if part.row_order is None:
                rows += delta
            else:
                rows[list(part.row_order)] += delta
        if not np.isfinite(values).all():
            raise WeightError(f"{source.path}: {name!r} and the adapter together are not finite")
        yield name, encode(values, source.info(name).kind).reshape(-1)
