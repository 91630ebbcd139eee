"""2:4 sparsity: of every four neighbours of a row at most two are not zero; two are stored, with 2-bit indices of their places.

The two indices of four neighbours ascend and take four bits, the first in the low ones. The low half of a byte belongs to the
first four neighbours, as in NVIDIA's sparse tensor cores. If fewer than two are not zero, the first zeros are stored.
"""

import numpy as np

from headrace.weights.bits import blocks_with_scales, pack_halves, pack_pairs, unpack_fields, unpack_halves
from headrace.weights.kinds import KINDS

INDICES = np.array([0x4, 0x8, 0x9, 0xC, 0xD, 0xE], np.uint8)  # valid pairs of indices
ZEROS = {"S4": 8, "S8": 0}  # offset of a stored integer
DENSE = {"S4": "Q4_0", "S8": "Q8_0"}  # dense kinds with the same integers and scales


def compacted(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split numbers [n, k], k a multiple of 8, into those kept [n, k / 2] and their indices, uint8 [n, k / 8].

    Raises ValueError if more than two of four neighbours are not zero.
    """
    fours = values.reshape(len(values), -1, 4)
    full = fours != 0
    if (full.sum(2) > 2).any():
        raise ValueError("more than two of four neighbours are not zero: this is not 2:4")
    order = np.argsort(~full, axis=2, kind="stable")[:, :, :2]  # nonzeros first
    order.sort(axis=2)
    return np.take_along_axis(fours, order, 2).reshape(len(values), -1), _joined(order)


def indices_of(mask: np.ndarray) -> np.ndarray:
    """Indices, uint8 [n, k / 8], of a mask [n, k] of kept places. Raises ValueError unless it keeps two of each four."""
    fours = mask.reshape(len(mask), -1, 4)
    if (fours.sum(2) != 2).any():
        raise ValueError("a group does not keep two of four weights")
    return _joined(np.argsort(~fours, axis=2, kind="stable")[:, :, :2])


def _joined(order: np.ndarray) -> np.ndarray:
    nibbles = (order[:, :, 0] | order[:, :, 1] << 2).astype(np.uint8)
    return pack_pairs(nibbles)


def spread(kept: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The inverse of `compacted`: [n, k]. Raises ValueError for invalid indices."""
    check_indices(indices)
    nibbles = unpack_fields(indices, 4)
    dense = np.zeros((*nibbles.shape, 4), kept.dtype)
    places = np.stack([nibbles & 3, nibbles >> 2], axis=2).astype(np.int64)
    np.put_along_axis(dense, places, kept.reshape(*nibbles.shape, 2), 2)
    return dense.reshape(len(dense), -1)


def check_indices(indices: np.ndarray) -> None:
    """Raise ValueError if indices do not ascend."""
    if not (np.isin(indices & 15, INDICES).all() and np.isin(indices >> 4, INDICES).all()):
        raise ValueError("indices of four neighbours do not ascend")


def sparse_rows(kind: str, kept: np.ndarray, indices: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Rows of S4 or S8, uint8 [n, row bytes]. kept: int8 [n, k / 2]; indices: uint8 [n, k / 8]; scales: float16 [n, k / 32]."""
    n, blocks = scales.shape
    rows = blocks_with_scales(scales, KINDS[kind].nbytes)
    rows[:, :, 2:6] = indices.reshape(n, blocks, 4)
    offset = kept.reshape(n, blocks, 16).view(np.uint8) + np.uint8(ZEROS[kind])
    rows[:, :, 6:] = offset if kind == "S8" else pack_halves(offset)
    return rows.reshape(n, -1)


def from_dense(kind: str, rows: np.ndarray) -> np.ndarray:
    """Rows of S4 or S8 with the integers and scales of rows of DENSE[kind]. Raises ValueError if these are not 2:4."""
    codes, scales = _codes(kind, rows, DENSE[kind], 2)
    return sparse_rows(kind, *compacted(codes), scales)


def sparse_parts(kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The inverse of `sparse_rows`: kept, indices and scales."""
    kept, scales = _codes(kind, rows, kind, 6)
    indices = rows.reshape(len(rows), -1, KINDS[kind].nbytes)[:, :, 2:6]
    return kept, np.ascontiguousarray(indices).reshape(len(rows), -1), scales


def _codes(kind: str, rows: np.ndarray, stored: str, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers int8 [n, stored integers] and scales float16 [n, blocks]. first: byte of a block at which its integers begin."""
    n = len(rows)
    blocks = rows.reshape(n, -1, KINDS[stored].nbytes)
    codes = blocks[:, :, first:]
    codes = codes if kind == "S8" else unpack_halves(codes)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").reshape(n, -1)
    return (codes - np.uint8(ZEROS[kind])).view(np.int8).reshape(n, -1), scales
