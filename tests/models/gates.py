"""What the gates of the native core are made of: logits of several computations of one file on the same tokens, compared.

Ours is the native core; float32 is torch on the dequantised weights; faked is torch with the core's int8 activations and
bfloat16 K and V (tests.native_reference); llama.cpp runs in a process of its own.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch

from headrace.backends.native.program import NativeProgram
from headrace.models.base import Model
from headrace.models.registry import describe, read_config
from headrace.weights.source import WeightSource
from tests.tiny_native import Feeder

BLOCK = 16
WORKER = Path(__file__).with_name("llama_cpp_rows.py")


def program_of(source: WeightSource, model: Model | None = None, **options: Any) -> NativeProgram:
    settings = {"num_blocks": 128, "block_size": BLOCK, "max_positions": 2048, "threads": 1, **options}
    return NativeProgram(model or describe(read_config(source)), source, **settings)


def generate(program: NativeProgram, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each fed alone."""
    tokens = list(prompt)
    (rows,) = Feeder(program, [tokens]).whole()
    while len(tokens) < len(prompt) + count:
        tokens.append(int(rows[-1].argmax()))
        (rows,) = Feeder(program, [tokens]).feed((0, len(tokens) - 1, 1))
    return tokens[len(prompt) :]


def log_softmax(rows: np.ndarray) -> np.ndarray:
    return np.asarray(torch.tensor(rows, dtype=torch.float64).log_softmax(-1).numpy())


def scores(rows: np.ndarray, tokens: Sequence[int]) -> list[float]:
    """Log-probabilities of the tokens that follow these rows."""
    return log_softmax(rows)[np.arange(len(tokens)), list(tokens)].tolist()


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


@dataclass
class Agreement:
    """How logits compare with better ones, row by row."""

    right: list[bool] = field(default_factory=list)  # the better ones' first choice
    gaps: list[float] = field(default_factory=list)  # theirs between first and second choice
    errors: list[float] = field(default_factory=list)  # of that gap
    divergences: list[float] = field(default_factory=list)  # KL(better || these), nats

    def add(self, rows: np.ndarray, better: np.ndarray) -> None:
        for start in range(0, len(rows), 64):
            self._add(rows[start : start + 64], better[start : start + 64])

    def _add(self, rows: np.ndarray, better: np.ndarray) -> None:
        at = np.arange(len(rows))
        second, first = np.argpartition(better, -2, -1)[:, -2:].T
        swap = better[at, second] > better[at, first]
        first, second = np.where(swap, second, first), np.where(swap, first, second)
        gap = better[at, first] - better[at, second]
        self.right += (rows.argmax(-1) == better.argmax(-1)).tolist()
        self.gaps += gap.tolist()
        self.errors += (rows[at, first] - rows[at, second] - gap).tolist()
        wanted = log_softmax(better)
        self.divergences += (np.exp(wanted) * (wanted - log_softmax(rows))).sum(-1).tolist()

    @property
    def top1(self) -> float:
        return float(np.mean(self.right))

    @property
    def rms(self) -> float:
        """RMS error of the gap between the two best."""
        return float(np.sqrt(np.mean(np.square(self.errors))))

    @property
    def worst(self) -> float:
        """The largest gap across which the first choice was missed."""
        return max((gap for gap, right in zip(self.gaps, self.right, strict=True) if not right), default=0.0)

    @property
    def divergence(self) -> float:
        return float(np.mean(self.divergences))

    def __str__(self) -> str:
        return (
            f"top-1 {self.top1:.2%} of {len(self.right)}, RMS error of the top-2 gap {self.rms:.4f}, "
            f"largest gap missed {self.worst:.4f} ({self.worst / (self.rms or 1):.1f} RMS), mean KL {self.divergence:.2e}"
        )


def peer_python() -> str:
    """An interpreter that has llama-cpp-python: HEADRACE_PEER_PYTHON, or this one. Skips where there is none."""
    if named := os.environ.get("HEADRACE_PEER_PYTHON"):
        return named
    if find_spec("llama_cpp") is None:
        pytest.skip("needs llama-cpp-python here (extra `peers`) or HEADRACE_PEER_PYTHON naming a Python that has it")
    return sys.executable


class LlamaCpp:
    """llama.cpp on one file, in a process that answers as long as this is open."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        self._process = subprocess.Popen(
            [peer_python(), WORKER, path, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def rows(self, tokens: list[int], count: int, vocab_size: int) -> np.ndarray:
        answer = self._request({"tokens": tokens, "rows": count}, 4 * count * vocab_size)
        return np.frombuffer(answer, np.float32).reshape(count, vocab_size)

    def scores(self, tokens: list[int], count: int) -> list[float]:
        return np.frombuffer(self._request({"tokens": tokens, "scores": count}, 8 * count), np.float64).tolist()

    def _request(self, question: dict[str, Any], size: int) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.read(size)
        assert len(answer) == size, "llama.cpp's process ended"
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def windows(tokens: list[int], start: list[int], size: int = 512) -> Iterator[list[int]]:
    """What `headrace perplexity` feeds: whole windows, each beginning with BOS where the model wants one."""
    room = size - len(start)
    for at in range(0, len(tokens) - room + 1, room + len(start)):
        yield [*start, *tokens[at : at + room]]
