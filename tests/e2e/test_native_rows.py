"""A row's logits on the native core are bitwise the same for every number of rows, batch, chunking, prefix hit, draft and
number of threads: by construction, and on every instruction set."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace import core
from headrace.backends.native.lowering import FUSIONS, Lowering
from headrace.backends.native.program import NativeProgram
from headrace.models.base import Model
from tests.tiny import VOCAB
from tests.tiny_native import Feeder, native_model, native_program

LENGTH = 40
FORMS = ("", "int8")
THREADS = {"": (3, 16), "int8": (2, 7)}
ISAS = tuple(core.module().cpu_info()["isas"])


def texts(count: int, length: int = LENGTH, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, length)).tolist()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


class Rows(Feeder):
    """What a step gives for its rows: logits, then the hidden row after the last layer. Logits alone hide the last places of a
    sum, because a linear layer's input is rounded to bfloat16 or int8."""

    def feed(self, *feeds: tuple[int, int, int], nodes: Sequence[int] = (), **more: Any) -> list[np.ndarray]:
        counts = [count for _, _, count in feeds]
        counts[-1] += len(nodes)
        hidden = np.empty((sum(counts), self.program.config.hidden_size), np.float32)
        logits = super().feed(*feeds, nodes=nodes, hidden_out=hidden, **more)
        return [np.hstack(pair) for pair in zip(logits, np.split(hidden, np.cumsum(counts)[:-1]), strict=True)]


# By the order of operations: Llama's, norms around branches, LayerNorm; norms after branches, squared ReLU, half of a head
# rotated, multipliers, queries that grow with the position, layers without rotation.
MODELS = [("llama", 8), ("llama", 32), ("gemma3_text", 32), ("gpt2", 8)]
MODELS += [(name, 32) for name in ("olmo2", "arcee", "glm4", "granite", "ministral3", "exaone4")]


@pytest.fixture(params=MODELS, ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    architecture, head_dim = request.param
    return native_model(architecture, head_dim=head_dim, ffn=172)


@pytest.mark.parametrize("quantize", FORMS)
def test_rows_of_one_to_33(model: Model, quantize: str) -> None:
    """The last row of a prompt, fed alone after the rest, and together with 1 to 32 rows before it."""
    program = native_program(model, quantize=quantize)
    feeder = Rows(program, texts(1))
    (whole,) = feeder.whole()
    for rows in range(1, 34):
        feeder.feed((0, 0, LENGTH - rows))
        (last,) = feeder.feed((0, LENGTH - rows, rows))
        assert same(last, whole[-rows:]), f"{rows} rows"


@pytest.mark.parametrize("quantize", FORMS)
def test_batches_of_one_to_33(model: Model, quantize: str) -> None:
    """A sequence's next token, alone and with up to 32 others, wherever it stands among them."""
    program = native_program(model, quantize=quantize, blocks=33 * 7)
    feeder = Rows(program, texts(33))
    wholes = [feeder.feed((which, 0, LENGTH))[0] for which in range(33)]
    for count in range(2, 34):
        first = 33 - count
        batch = [(which, LENGTH - 1, 1) for which in range(first, 33)]
        for which, rows in zip(range(first, 33), feeder.feed(*batch), strict=True):
            assert same(rows, wholes[which][-1:]), f"{count} in the batch, sequence {which}"


@pytest.mark.parametrize("quantize", FORMS)
def test_threads_and_mixed_steps(model: Model, quantize: str) -> None:
    """Up to 16 threads, and chunks in a step with single tokens."""
    (alone,) = Rows(native_program(model, quantize=quantize), texts(1)).whole()
    for threads in THREADS[quantize]:
        feeder = Rows(native_program(model, quantize=quantize, threads=threads), [*texts(1), *texts(3, seed=1)])
        feeder.feed((0, 0, 9), (1, 0, 30))
        feeder.feed((2, 0, LENGTH), (0, 9, 20))
        middle, *_ = feeder.feed((0, 29, 1), (1, 30, 1), (2, 39, 1), (3, 0, LENGTH))
        (last,) = feeder.feed((0, 30, 10))
        assert same(np.concatenate([middle, last]), alone[29:])


@pytest.mark.parametrize("quantize", FORMS)
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(isa: str, quantize: str) -> None:
    """Every path keeps the rule, and with integer weights all give the same bits but for attention's bfloat16 products."""
    model = native_model("llama", head_dim=32)
    feeder = Rows(native_program(model, quantize=quantize, isa=isa), texts(2))
    wholes = feeder.whole()
    for rows in range(1, 34):
        feeder.feed((0, 0, LENGTH - rows))
        last, other = feeder.feed((0, LENGTH - rows, rows), (1, LENGTH - 1, 1))
        assert same(last, wholes[0][-rows:])
        assert same(other, wholes[1][-1:])
    best = Rows(native_program(model, quantize=quantize, isa=ISAS[0]), texts(2)).whole()
    for ours, theirs in zip(wholes, best, strict=True):
        assert np.abs(ours - theirs)[:, :VOCAB].max() < 0.05 * theirs[:, :VOCAB].std()


def test_a_draft_sees_its_ancestors_only(model: Model) -> None:
    """Each path of a tree gives what the same tokens give in a row of their own."""
    program = native_program(model)
    (text,) = texts(1, 20)
    nodes, parents = [5, 6, 7, 8, 9, 5], [-1, -1, 0, 2, 1, 4]
    paths = [[5], [6], [5, 7], [5, 7, 8], [6, 9], [6, 9, 5]]
    (rows,) = Rows(program, [text]).feed((0, 0, 20), nodes=nodes, parents=parents)
    for row, path in zip(rows[20:], paths, strict=True):
        (alone,) = Rows(program, [text + path]).whole()
        assert same(row, alone[-1]), path
    (chain,) = Rows(program, [text]).feed((0, 0, 20), nodes=[5, 7, 8], parents=[-1, 0, 1])
    (alone,) = Rows(program, [[*text, 5, 7, 8]]).whole()
    assert same(chain, alone)


SOUND = Rows


class Swayed(Rows):
    """Steps of more than 20 rows add each row's products up in another order: by a second program, whose every linear layer has
    one sum where the first one's has eight segments."""

    def __init__(self, program: NativeProgram, sequences: Sequence[Sequence[int]]) -> None:
        super().__init__(program, sequences)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Lowering, "_segment_unit", lambda self, node: 0)
            other = native_program(program.model, quantize=self.quantize, fuse=FUSIONS, blocks=program.kv.num_blocks)  # type: ignore[attr-defined]
        self.other = SOUND(other, sequences)

    def feed(self, *feeds: tuple[int, int, int], **more: Any) -> list[np.ndarray]:
        few, many = super().feed(*feeds, **more), self.other.feed(*feeds, **more)
        for a, b in zip(few, many, strict=True):
            assert np.abs(a - b).max() < 0.1 * a.std()  # nothing but rounding
        return few if sum(count for _, _, count in feeds) <= 20 else many


@pytest.mark.parametrize("quantize", FORMS)
@pytest.mark.parametrize("check", [test_rows_of_one_to_33, test_batches_of_one_to_33, test_threads_and_mixed_steps])
def test_a_kernel_with_batch_dependent_sums_fails(
    check: Callable[[Model, str], None], quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the equalities above: other sums for some numbers of rows, apart in the last places."""
    monkeypatch.setitem(globals(), "Rows", Swayed)
    monkeypatch.setattr(Swayed, "quantize", quantize, raising=False)
    with pytest.raises(AssertionError, match="rows|batch|same"):
        check(native_model("llama", head_dim=32, ffn=172), quantize)
