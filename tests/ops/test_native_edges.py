"""Arguments at the edges of the native core's calls: refused where they would be read past an end, lost or waited for."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from headrace import core

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
LAST = 2**31 - 1


@pytest.fixture(scope="module")
def pool() -> Any:
    return module.ThreadPool(1)


def started(tokens: int = 8, logits: int = 4, nodes: int = 0) -> Any:
    """A step with a feed of four known tokens before this one's, so that rows are counted from the second feed's."""
    step, sequence = module.Step(), module.Sequence(list(range(tokens)), module.SampleParams())
    step.feed(sequence, 0, 4, 4)
    step.feed(sequence, 0, 4, logits, list(range(nodes)), list(range(-1, nodes - 1)))
    return step


@pytest.mark.parametrize("row", [LAST, LAST - 3, 4, -1, -(2**31)])
def test_rows_outside_the_feeds_are_refused(row: int) -> None:
    step = started()
    for ask in (
        lambda: step.draw(row, [(1, 2)]),
        lambda: step.verify(row, (1, 2)),
        lambda: step.reject(row, (1, 2), []),
        lambda: step.propose(row, (1, 2)),
        lambda: step.top(row, 1),
        lambda: step.logits(row),
        lambda: step.combine(row, answered(), 0, "contrast", 0.1, 0.5),
    ):
        with pytest.raises(ValueError, match="rows of logits"):
            ask()
    if row < 0:
        with pytest.raises(ValueError, match="no such row"):
            step.score(row, 1)
    else:
        assert step.score(row, 1)[1] == 0
    assert step.logits(3) == 0, "the control: the last row that there is"


def tiny_program() -> Any:
    """A program of 64 tokens, all of whose logits are 0."""
    pool, arena = module.ThreadPool(1), module.Arena(1 << 21)
    program = module.Program(pool, module.KVPool(1, 1, 16, 1, 16), 32, 64)
    table = module.pack(np.zeros((64, 32), np.float32).view(np.uint8), "F32", 64, 32, arena, pool)
    program.begin("embed")
    program.embed(table, 0)
    program.begin("head")
    own, logits, maxima = program.buffer("bf16", 32, True), program.buffer("float", 64), program.buffer("float", 1)
    program.quantize((1, 0), own)
    program.linear(module.PackedLinear([table]), own, "logits", (logits, 0), maxima=maxima)
    return program


def one_token(params: Any = None) -> Any:
    """A step with one feed of one token."""
    sequence, step = module.Sequence([1], params or module.SampleParams()), module.Step()
    sequence.set_table(0, 0, [0])
    step.feed(sequence, 0, 1, 1)
    return step


def answered() -> Any:
    """A step with an answer: a row of logits."""
    step = one_token()
    step.logits(0)
    tiny_program().run(step)
    return step


def test_a_step_is_not_combined_with_itself() -> None:
    step = answered()
    with pytest.raises(ValueError, match="not combined with itself"):
        step.combine(0, step, 0, "contrast", 0.1, 0.5)


@pytest.mark.parametrize("rule", ["contrast", "chow", "opt"])
def test_a_row_is_combined_with_an_answer_that_has_logits(rule: str) -> None:
    """Those of an answer are taken from it, so a second time there are none; a drawn token never has any."""
    step, amateur = one_token(), answered()
    step.combine(0, amateur, 0, rule, 0.1, 0.5)
    drawn = one_token()
    drawn.draw(0, [(1, 2)])
    tiny_program().run(drawn)
    for other in (amateur, drawn):
        with pytest.raises(ValueError, match="an answer that has logits"):
            one_token().combine(0, other, 0, rule, 0.1, 0.5)
    number = step.draw(0, [(1, 2)])
    tiny_program().run(step)
    assert not step.error(number)
    assert len(step.tokens(number)) == 1


@pytest.mark.parametrize("rule", ["contrast", "chow", "opt"])
def test_a_failed_amateur_row_fails_every_want_of_the_row(rule: str) -> None:
    params = module.SampleParams()
    params.constrained = True
    amateur = one_token(params)
    failed = amateur.draw(0, [(1, 2)])
    tiny_program().run(amateur)
    assert amateur.error(failed)
    step = one_token()
    step.combine(0, amateur, failed, rule, 0.1, 0.5)
    first, second = step.draw(0, [(1, 2)]), step.top(0, 1)
    tiny_program().run(step)
    for number in (first, second):
        assert step.error(number) == f"the amateur model has no answer: {amateur.error(failed)}"


def test_mirostat_refuses_a_nan_mu() -> None:
    step, params, history = started(nodes=0), module.SampleParams(), module.History([1, 2])
    params.mirostat_tau = 3.0
    sampler, logits = module.Sampler(64), np.zeros((2, 64), np.float32)
    for call in (
        lambda: step.draw(3, [(1, 2)], mu=float("nan")),
        lambda: step.verify(3, (1, 2), mu=float("nan")),
        lambda: sampler.draw(logits[0], params, history, [(1, 2)], mu=float("nan")),
        lambda: sampler.verify(logits, params, history, (1, 2), [5], [-1], mu=float("nan")),
    ):
        with pytest.raises(ValueError, match="mu must be a number"):
            call()
    (report,), error = sampler.draw(logits[0], params, history, [(1, 2)], mu=6.0)
    assert not error
    assert report.mu != 6.0, "the control"


ENDLESS = """
import numpy as np, sys
from headrace import core
params, history = core.module().SampleParams(), core.module().History([1, 2])
for name, value in zip(sys.argv[1::2], map(float, sys.argv[2::2])):
    if name != "mu":
        setattr(params, name, type(getattr(params, name))(value))
mu = dict(zip(sys.argv[1::2], map(float, sys.argv[2::2]))).get("mu")
logits = np.arange(300, dtype=np.float32) / 10
(report,), error = core.module().Sampler(300).draw(logits, params, history, [(1, 2)], mu=mu)
print(report.id, error)
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"mirostat_tau": 3.0, "mu": float("inf")},
        {"mirostat_tau": 3.0, "mu": float("-inf")},
        {"mirostat_tau": float("inf")},
        {"min_p": 2.0},
        {"min_p": float("inf")},
        {"top_n_sigma": float("inf")},
        {"no_repeat_ngram": -3},
        {"no_repeat_ngram": LAST},
    ],
)
def test_no_setting_is_drawn_with_for_ever(settings: dict[str, float]) -> None:
    """In a process of its own, as it may not come back; a token comes whatever the settings."""
    words = [str(word) for pair in settings.items() for word in pair]
    command = [sys.executable, "-c", ENDLESS, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert 0 <= int(done.stdout) < 300


def test_missing_arguments_are_refused(pool: Any) -> None:
    x = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match="no layer may be missing"):
        module.time_linears([None], x, pool, 1)
    with pytest.raises((TypeError, ValueError)):
        module.PackedLinear([None])
    with pytest.raises(ValueError, match="no sequence may be missing"):
        module.Step().draw_each([None], [0])
    for call in (
        lambda: module.Step().feed(None, 0, 1),
        lambda: module.Program(None, module.KVPool(1, 1, 16, 1, 16), 32, 64),
        lambda: module.Program(pool, None, 32, 64),
        lambda: module.Packer(None),
        lambda: module.AttentionStep(None, pool),
        lambda: module.pack(x.view(np.uint8), "F32", 1, 64, None, pool),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_taps_are_filled_where_they_are(pool: Any) -> None:
    """What would have to be converted would be filled as a copy, and lost: refused."""
    arena = module.Arena(1 << 21)
    program = module.Program(pool, module.KVPool(1, 1, 16, 1, 16), 32, 64)
    table = module.pack(np.ones((64, 32), np.float32).view(np.uint8), "F32", 64, 32, arena, pool)
    program.begin("embed")
    program.embed(table, 0)
    program.copy_to_tap((0, 0), program.tap())
    sequence, step = module.Sequence([1, 2], module.SampleParams()), module.Step()
    sequence.set_table(0, 0, [0])
    step.feed(sequence, 0, 2)
    for wrong in (np.zeros((2, 32)), np.zeros((32, 2), np.float32).T):
        with pytest.raises(TypeError):
            program.run(step, taps=[(0, wrong)])
    right = np.zeros((2, 32), np.float32)
    program.run(step, taps=[(0, right)])
    assert (right == 1).all(), "the control"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 1, 16, 1, 2**26), "dimensions"),
        ((1, 1, 16, 2**20, 64), "heads"),
        ((1, 2**20, 2**12, 1, 16), "2\\^31 positions"),
        ((1, 1, LAST, 1, 16), "multiple of 16"),
        ((1, 1, 16, 1, 1024, "int8"), "up to 512 dimensions"),
    ],
)
def test_pools_that_32_bits_cannot_count(sizes: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        module.KVPool(*sizes)


def test_attention_looks_at_its_feeds(pool: Any) -> None:
    kv = module.KVPool(1, 4, 16, 2, 16)
    step, ints = module.AttentionStep(kv, pool), lambda *values: np.array(values, np.int32)
    with pytest.raises(IndexError, match="do not fit the step"):
        step.begin(ints(0), ints(0, 1), ints(LAST), ints(1), ints(0).reshape(1, 1))
    step.begin(ints(0), ints(0, 1), ints(0), ints(1), ints(0).reshape(1, 1))
    for heads in (0, 1, 3, -2):
        options = module.AttentionOptions()
        options.heads = heads
        with pytest.raises(ValueError, match="multiple of the 2 KV heads"):
            step.items(options)
    options.heads = 4
    assert step.items(options) > 0, "the control"


@pytest.mark.parametrize(("n", "k"), [(LAST, 64), (16, LAST), (-1, 64), (0, 0)])
def test_tensors_that_32_bits_cannot_count(n: int, k: int, pool: Any) -> None:
    with pytest.raises(ValueError, match="positive"):
        module.pack(np.zeros((1, 4), np.uint8), "F32", n, k, module.Arena(1 << 21), pool)


def test_tokens_are_at_least_one(pool: Any) -> None:
    kv = module.KVPool(1, 1, 16, 1, 16)
    for hidden, vocab_size in ((0, 64), (32, 0), (32, -1), (LAST, 64)):
        with pytest.raises(ValueError, match="at least one token|columns wide"):
            module.Program(pool, kv, hidden, vocab_size)
