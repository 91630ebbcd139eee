"""Descriptions of programs as plain data: a right one, ways to spoil it, and a child process that builds and runs them.

A call is [method of Program, arguments by name]; arguments that begin with "@" are weights of the child. A spoilt program
may crash, so none is built in the process of the tests.
"""

import contextlib
import json
import subprocess
import sys
import threading
from typing import Any

Call = tuple[str, dict[str, Any]]

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCAB, ROWS = 64, 4, 2, 32, 96, 130, 40
QKV = (HEADS + 2 * KV_HEADS) * DIM


def right_calls() -> list[Call]:
    """A model of one layer with a rope and a gated MLP. Buffers: 2 qkv, 3 input, 4 attended, 5 wide; 6 to 8 of the head."""
    norm, rows = {"norm": "@norm"}, {"source": [0, 0]}
    return [
        ("buffer", {"kind": "float", "width": QKV}),
        ("buffer", {"kind": "a8", "width": HIDDEN, "local": True}),
        ("buffer", {"kind": "a8", "width": HEADS * DIM}),
        ("buffer", {"kind": "a8", "width": FFN}),
        ("rope", {"frequencies": [0.5] * (DIM // 2), "positions": 64, "interleaved": False}),
        ("begin", {"segment": "embed"}),
        ("embed", {"table": "@tokens", "out": 0}),
        ("begin", {"segment": "layer"}),
        ("quantize", {**rows, "out": 3, **norm}),
        ("linear", {"linear": "@qkv", "source": 3, "kind": "store", "out": [2, 0]}),
        ("attention", attention()),
        ("linear", {"linear": "@out", "source": 4, "kind": "add", "out": [0, 0]}),
        ("quantize", {**rows, "out": 3, **norm}),
        ("linear", {"linear": "@gate_up", "source": 3, "kind": "gated", "out": [5, 0], "act": "silu"}),
        ("linear", {"linear": "@down", "source": 5, "kind": "add", "out": [0, 0]}),
        ("begin", {"segment": "head"}),
        ("buffer", {"kind": "a8", "width": HIDDEN, "local": True}),
        ("buffer", {"kind": "float", "width": VOCAB}),
        ("buffer", {"kind": "float", "width": -(-VOCAB // 64)}),
        ("quantize", {"source": [1, 0], "out": 6, **norm}),
        ("linear", {"linear": "@head", "source": 6, "kind": "logits", "out": [7, 0], "maxima": 8}),
    ]


def attention(**changes: Any) -> dict[str, Any]:
    places = {"q": [2, 0], "k": [2, HEADS * DIM], "v": [2, (HEADS + KV_HEADS) * DIM], "out": [4, 0]}
    return {"layer": 0, "heads": HEADS, **places, "scale": 0.2, "rope": 0, "window": 0, "causal": True, **changes}


def changed(at: str, number: int = 0, **arguments: Any) -> list[Call]:
    """The right program with arguments of its `number`th call of one method changed."""
    calls = right_calls()
    place = [i for i, (method, _) in enumerate(calls) if method == at][number]
    calls[place] = (at, {**calls[place][1], **arguments})
    return calls


def inserted(before: int, *calls: Call) -> list[Call]:
    """The right program with more calls before one of its own."""
    right = right_calls()
    return [*right[:before], *calls, *right[before:]]


class Builder:
    """A child process that builds and runs programs. After a crash there is a new one."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Builder":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run_calls(self, calls: list[Call], seconds: float = 600) -> str:
        """ "ran", the name of what was raised and its words, or "died: CODE" where the process did not survive."""
        if self._child is None:
            command = [sys.executable, "-c", "from tests.native_builder import serve; serve()"]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        alarm = threading.Timer(seconds, child.kill)
        alarm.start()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(calls) + "\n")
            child.stdin.flush()
        answer = child.stdout.readline().strip()
        alarm.cancel()
        return answer or f"died: {self._end()}"

    def _end(self) -> int:
        if self._child is None:
            return 0
        child, self._child = self._child, None
        with child:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            return child.wait(timeout=600)


def serve() -> None:
    """The child: a line of calls in, a line of what came of them out."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # a buffer of 2^28 columns is refused, not filled
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    made = _weights()
    for line in sys.stdin:
        try:
            _build_and_run(json.loads(line), made)
            said = "ran"
        except Exception as error:
            said = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(said, flush=True)


def _weights() -> dict[str, Any]:
    import numpy as np

    from headrace import core

    rng = np.random.default_rng(1)
    pool, arena = core.module().ThreadPool(3), core.module().Arena(1 << 21)

    def packed(n: int, k: int, quantize: str = "int8") -> Any:
        rows = (rng.standard_normal((n, k)) * 0.2).astype(np.float32).view(np.uint8)
        return core.module().pack(rows, "F32", n, k, arena, pool, quantize=quantize)

    def linear(*sizes: tuple[int, int], quantize: str = "int8", **settings: Any) -> Any:
        return core.module().PackedLinear([packed(n, k, quantize) for n, k in sizes], **settings)

    def norm(kind: str, width: int) -> Any:
        return core.module().NormWeights(kind, np.ones(width, np.float32), None, 1e-5)

    gate, up = (rng.standard_normal((FFN, HIDDEN)).astype(np.float32).view(np.uint8) for _ in range(2))
    pair = core.module().pack_pair(gate, "F32", up, "F32", FFN, HIDDEN, arena, pool, quantize="int8")
    return {
        "pool": pool,
        "@tokens": packed(VOCAB, HIDDEN),
        "@positions": packed(50, HIDDEN),
        "@wide_table": packed(20, 2 * HIDDEN),
        "@qkv": linear((QKV, HIDDEN)),
        "@out": linear((HIDDEN, HEADS * DIM)),
        "@gate_up": core.module().PackedLinear(list(pair), gated=True),
        "@down": linear((HIDDEN, FFN)),
        "@head": linear((VOCAB, HIDDEN)),
        "@square": linear((HIDDEN, HIDDEN)),
        "@halves": linear((HIDDEN, HIDDEN), (VOCAB - HIDDEN, HIDDEN)),
        "@bf16": linear((HIDDEN, HIDDEN), quantize=""),
        "@norm": norm("rms", HIDDEN),
        "@layer_norm": norm("layer", HIDDEN),
        "@head_norm": norm("rms", DIM),
        "@narrow": norm("rms", 3),
        "@sinks": np.zeros(HEADS, np.float32),
        "@few": np.zeros(3, np.float32),
        "@distances": np.zeros((HEADS, 2 * 9 + 1), np.float32),
        "@even": np.zeros((HEADS, 4), np.float32),
    }


def _build_and_run(calls: list[Call], made: dict[str, Any]) -> None:
    from headrace import core

    program = core.module().Program(made["pool"], core.module().KVPool(1, 8, 16, KV_HEADS, DIM), HIDDEN, VOCAB)
    for method, arguments in calls:
        values = {name: _value(value, made) for name, value in arguments.items()}
        getattr(program, method)(**values)
    sequence = core.module().Sequence(list(range(ROWS + 4)), core.module().SampleParams(), 30)
    sequence.set_table(0, 0, [3, 1, 2])
    sequence.set_table(1, 0, [4, 5])
    for start, count in ((0, ROWS), (ROWS, 1), (ROWS + 1, 2)):
        step = core.module().Step()
        step.feed(sequence, start, count, 1)
        step.draw(0, [(1, 2)])
        program.run(step)


def _value(value: Any, made: dict[str, Any]) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        return made[value]
    return tuple(value) if isinstance(value, list) and len(value) == 2 else value
