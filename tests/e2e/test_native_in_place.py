"""Layers that add to the rows of their own input: the same bits for every number of threads, rows and repetitions."""

from typing import Any

import numpy as np
import pytest

from headrace import core
from headrace.backends.native.program import thread_pool
from headrace.data.config import ModelConfig
from headrace.models import registry
from headrace.models.base import Model
from headrace.models.families import FAMILIES
from headrace.models.layers import Embedding, Group, Linear, Norm
from headrace.ops.vocabulary import embed, head, linear, norm, residual
from tests.tiny import tiny_config, tiny_model
from tests.tiny_native import Feeder, as_bfloat16, family, native_program

WIDTH, LAYERS = 512, 8
TEXT = np.random.default_rng(5).integers(0, 97, 40).tolist()


class StraightBlock(Group):
    def __init__(self, c: ModelConfig) -> None:
        self.norm = Norm(c.hidden_size, 1e-5)
        self.out = Linear(c.hidden_size, c.hidden_size)


class Straight(Model):
    """Layers of a norm and one linear layer, whose result is added to what the norm was taken of."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [StraightBlock(config) for _ in range(config.num_layers)]
        self.norm = Norm(config.hidden_size, 1e-5)

    def embed(self, ctx: Any) -> Any:
        return embed(ctx.ids, self.tokens)

    def layer(self, i: int, x: Any, ctx: Any) -> Any:
        block = self.layers[i]
        return residual(x, linear(norm(x, block.norm), block.out, ctx))

    def head(self, x: Any) -> Any:
        return head(norm(x, self.norm), self.tokens)


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setitem(registry.MODELS, "straight", Straight)
    monkeypatch.setitem(FAMILIES, "straight", family("straight"))
    config = tiny_config(architecture="straight", rope=None, tied_head=True, hidden_size=WIDTH, num_layers=LAYERS)
    return as_bfloat16(tiny_model(config))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("quantize", ["int8", ""])
def test_threads_write_disjoint_rows(straight: Model, quantize: str, threads: int) -> None:
    one, many = (native_program(straight, quantize=quantize, threads=n) for n in (1, threads))
    many.core.profiling = True
    for rows in (1, 2, 3):
        (wanted,) = Feeder(one, [TEXT]).feed((0, 0, rows))
        feeder = Feeder(many, [TEXT])
        other = sum(not np.array_equal(feeder.feed((0, 0, rows))[0], wanted) for _ in range(200))
        assert other == 0, f"{rows} rows: {other} of 200 steps differ"
    assert "residual" not in {line["phase"] for line in many.core.profile}, "the control: the layers add to the rows themselves"


def test_a_linear_input_uses_the_rows_before_they_change() -> None:
    """Rows that change between the phase that makes an input and the layer that reads it: few rows, whose input is made
    when it is read, get what many get. The control: the layer sees the rows as they were, and the rows have changed."""
    pool, arena = thread_pool(1), core.module().Arena(1 << 21)
    values = np.random.default_rng(1).standard_normal((97, 64)).astype(np.float32)
    table = core.module().pack(values.view(np.uint8), "F32", 97, 64, arena, pool)
    square = core.module().pack(np.eye(64, dtype=np.float32).view(np.uint8), "F32", 64, 64, arena, pool)

    def rows_after(count: int) -> np.ndarray:
        program = core.module().Program(pool, core.module().KVPool(1, 4, 16, 1, 16), 64, 97)
        own, out = program.buffer("bf16", 64, True), program.buffer("float", 64)
        program.begin("embed")
        program.embed(table, 0)
        program.begin("layer")
        program.quantize((0, 0), own)
        program.residual((0, 0), (0, 0), (0, 0), 64)
        program.linear(core.module().PackedLinear([square]), own, "store", (out, 0))
        program.residual((0, 0), (out, 0), (0, 0), 64)
        sequence, step = core.module().Sequence(TEXT, core.module().SampleParams()), core.module().Step()
        sequence.set_table(0, 0, [0, 1, 2])
        step.feed(sequence, 0, count)
        found = np.empty((count, 64), np.float32)
        program.run(step, hidden_out=found)
        return found

    first = table.unpack()[TEXT[0]]
    assert np.array_equal(rows_after(40)[0], 3 * first), "what was, and twice that"
    assert np.array_equal(rows_after(1)[0], 3 * first)
