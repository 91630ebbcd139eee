"""Alignment of tokens to positions of an encoder-decoder's source: dynamic time warping over cross-attention weights.

The weights of each head are normalised over the tokens and smoothed over the positions, then averaged. The warping finds the
path of largest total weight that goes through all tokens and positions in order.

Source: `find_alignment` of openai-whisper; Sakoe and Chiba, "Dynamic programming algorithm optimization for spoken word
recognition", 1978.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from headrace.data.plan import Align, Aligned, Feed

SMOOTHED = 7  # positions of the median filter
BOTH, TOKEN, POSITION = 0, 1, 2  # moves of a path: to the next token, the next position, or both
SMALLEST = 1e-20  # deviation that weights are divided by


def aligns(feeds: Sequence[Feed]) -> Iterator[tuple[int, int, slice, Align]]:
    """Yields each Align want of a step: the feed's number, the want's number, the feed's rows of the step, and the want."""
    row = 0
    for number, feed in enumerate(feeds):
        count = feed.count + len(feed.nodes)
        wants = [(at, want) for at, want in enumerate(feed.wants) if isinstance(want, Align)]
        yield from ((number, at, slice(row, row + count), want) for at, want in wants)
        row += count


def queries(want: Align) -> list[str]:
    """Names of the taps with the queries of an alignment."""
    return [f"cross.{layer}" for layer in sorted({layer for layer, _ in want.heads})]


def align(want: Align, rows: Mapping[str, np.ndarray], keys: Callable[[int], np.ndarray]) -> Aligned:
    """Align the tokens of a feed.

    rows: queries [tokens, width] float32 by the name of their tap. keys: of a layer, [positions, heads, head size] float32.
    """
    total = np.zeros((0, 0), np.float32)
    for layer in sorted({layer for layer, _ in want.heads}):
        asked, known = rows[f"cross.{layer}"], keys(layer)
        size = known.shape[2]
        for head in (head for of, head in want.heads if of == layer):
            columns = asked[:, head * size : (head + 1) * size] * np.float32(size**-0.5)
            weights = smoothed(normalised(columns @ known[:, head].T))
            total = total + weights if total.size else weights
    matrix = total[want.first : -1] / np.float32(len(want.heads))
    return Aligned(tuple(first_positions(-matrix).tolist()))


def normalised(scores: np.ndarray) -> np.ndarray:
    """Softmax of scores [tokens, positions] over the positions, then with mean 0 and deviation 1 over the tokens."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    scaled: np.ndarray = (weights - weights.mean(axis=0)) / np.maximum(weights.std(axis=0), np.float32(SMALLEST))
    return scaled


def smoothed(weights: np.ndarray, width: int = SMOOTHED) -> np.ndarray:
    """Median of `width` neighbouring positions; mirrored at both ends. Rows that are too short are returned unchanged."""
    half, count = width // 2, weights.shape[1]
    if count <= half:
        return weights
    padded = np.pad(weights, ((0, 0), (half, half)), mode="reflect")
    columns = [padded[:, at : at + count] for at in range(width)]
    # Each pass moves the largest value to the end; the median is the last one after half of them.
    for last in range(width - 1, half - 1, -1):
        for at in range(last):
            low, high = columns[at], columns[at + 1]
            columns[at], columns[at + 1] = np.minimum(low, high), np.maximum(low, high)
    return columns[half]


def first_positions(cost: np.ndarray) -> np.ndarray:
    """The position at which each token begins on the cheapest path through a cost matrix [tokens, positions], int64."""
    trace = _trace(cost)
    token, position = cost.shape
    starts = np.zeros(token, np.int64)
    while token > 0 and position > 0:
        starts[token - 1] = position - 1
        move = trace[token + position, token]
        token, position = token - (move != POSITION), position - (move != TOKEN)
    return starts


def _trace(cost: np.ndarray) -> np.ndarray:
    """The last move of the cheapest path to each cell, [tokens + positions + 1, tokens + 1] by antidiagonal and token. Both are
    counted from 1 on: the path begins at token 0, position 0."""
    tokens, positions = cost.shape
    skewed = np.zeros((tokens + positions + 1, tokens + 1))
    token, position = np.indices(cost.shape)
    skewed[token + position + 2, token + 1] = cost
    trace = np.zeros(skewed.shape, np.int8)
    before, last = np.full((2, tokens + 1), np.inf, np.float32)
    before[0] = 0
    for diagonal in range(2, tokens + positions + 1):
        both, down, right = before[:-1], last[:-1], last[1:]
        diagonally, below = (both < down) & (both < right), (down < both) & (down < right)
        least = np.where(diagonally, both, np.where(below, down, right))
        here = np.full(tokens + 1, np.inf, np.float32)
        here[1:] = skewed[diagonal, 1:] + least
        # Cells outside of the matrix.
        here[diagonal:] = np.inf
        here[: max(diagonal - positions, 0)] = np.inf
        trace[diagonal, 1:] = np.where(diagonally, BOTH, np.where(below, TOKEN, POSITION))
        before, last = last, here
    return trace
