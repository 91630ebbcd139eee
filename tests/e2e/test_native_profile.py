"""The profile: bytes read and products of each phase, in the core and in bench local --profile."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace import core
from headrace.backends.native.program import NativeProgram
from tests.cli_shell import Shell
from tests.tiny_native import Feeder, native_model, native_program

TEXT = list(range(40))
HIDDEN, FFN, HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 32, 48, 4, 2, 8, 2, 97
PRODUCTS = {  # of one row: outputs times inputs
    "qkv": (HEADS + 2 * KV_HEADS) * DIM * HIDDEN,
    "out": HEADS * DIM * HIDDEN,
    "gate_up": 2 * FFN * HIDDEN,
    "down": FFN * HIDDEN,
}


def profiled(quantize: str = "int8", steps: tuple[tuple[int, int], ...] = ((0, 9),), **options: Any) -> NativeProgram:
    """A program after steps [start, end) of one text."""
    program = native_program(native_model("llama"), quantize=quantize, **options)
    program.core.clear_profile()
    program.core.profiling = True
    feeder = Feeder(program, [TEXT])
    for start, end in steps:
        feeder.feed((0, start, end - start))
    program.core.profiling = False
    return program


def by_phase(program: NativeProgram, rows: int) -> dict[str, dict[str, Any]]:
    return {line["phase"]: line for line in program.core.profile if line["step_rows"] == rows}


@pytest.mark.parametrize("threads", [1, 3])
def test_products_and_weights_of_linear_layers(threads: int) -> None:
    lines = by_phase(profiled(threads=threads), 9)
    assert set(PRODUCTS) | {"attention", "prepare", "answers"} <= set(lines)
    for name, products in PRODUCTS.items():
        assert lines[name]["macs"] == LAYERS * 9 * products
        assert lines[name]["kernel"].startswith("Q8_0 ")
        assert lines[name]["products"] == "int8"
        assert lines[name]["calls"] == LAYERS
    packed = core.module().packed_bytes("F32", VOCAB, HIDDEN, "int8")
    assert lines["head"]["weight_bytes"] == packed * lines["head"]["calls"]
    # 32 columns of int8 with what belongs to them, and 48 floats of the MLP's input to come.
    assert lines["down"]["row_bytes"] == LAYERS * 9 * (104 + 4 * HIDDEN)


def test_the_profile_counts_bytes_and_macs_of_attention() -> None:
    """Rows 20 to 24 of a text: row i sees i + 1 keys, and the five together three pages of 16."""
    line = by_phase(profiled(steps=((0, 20), (20, 25))), 5)["attention"]
    keys = sum(range(21, 26))
    assert line["macs"] == LAYERS * keys * HEADS * DIM * 2
    page = 2 * 16 * 16 * 2  # K and V of 16 tokens, heads padded to 16, bfloat16
    assert line["weight_bytes"] == LAYERS * KV_HEADS * 2 * page
    assert (line["kernel"], line["products"]) == ("attention bf16", "bf16")
    for kv_dtype, page in (("int8", 2 * 16 * 16 + 128), ("int4", 16 * 16 + 192)):
        integers = by_phase(profiled(steps=((0, 20), (20, 25)), kv_dtype=kv_dtype), 5)["attention"]
        assert integers["macs"] == 2 * line["macs"], "two bytes for each number beside K and V"
        assert (integers["kernel"], integers["weight_bytes"]) == (f"attention {kv_dtype}", LAYERS * KV_HEADS * 2 * page)


def test_the_profile_separates_steps_by_their_rows() -> None:
    program = profiled(steps=((0, 9), (9, 10), (10, 11), (11, 12)))
    assert by_phase(program, 9)["prepare"]["calls"] == 1
    assert by_phase(program, 1)["prepare"]["calls"] == 3
    assert by_phase(program, 1)["down"]["macs"] == 3 * LAYERS * PRODUCTS["down"]
    program.core.clear_profile()
    assert program.core.profile == []
    Feeder(program, [TEXT]).feed((0, 0, 4))
    assert program.core.profile == [], "the control: nothing is gathered where nobody asked"


def test_times_are_within_the_step() -> None:
    for threads in (1, 3):
        for line in profiled(threads=threads, steps=((0, 9), (9, 18))).core.profile:
            assert line["seconds"] >= 0
            assert line["idle"] > -1e-9, line
        waits = sum(line["idle"] for line in profiled(threads=threads).core.profile)
        assert waits > 0


@pytest.mark.parametrize("isa", core.module().cpu_info()["isas"])
def test_machine_limits_are_measured(isa: str) -> None:
    pool = core.module().ThreadPool(1)
    for products in ("int8", "bf16", "f32"):
        assert min(core.module().dot_rate(pool, products, 3, isa)) > 1e6
    assert min(core.module().read_bandwidth(pool, 4, 2, isa)) > 1e6
    with pytest.raises(ValueError, match="products are int8, bf16 or f32, not int4"):
        core.module().dot_rate(pool, "int4", 1, isa)


def test_the_command(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    code, out, err = shell("bench", "local", tiny_gguf, "--profile", "--rounds", "2", "--threads", "1", "--json", file)
    assert code == 0, err
    found = json.loads(file.read_text())
    assert list(found["steps"]) == ["1", "4", "8", "16", "32", "256"]
    assert found["isa"] == core.module().cpu_info()["isa"]
    assert found["bandwidth_gb_s"] > 0
    assert set(found["gmacs"]) == {"int8", "bf16", "f32"}
    for step in found["steps"].values():
        assert step["ms"] >= sum(line["ms"] for line in step["phases"])
        of_phases = sum(line["mmacs"] for line in step["phases"])
        assert of_phases == pytest.approx(sum(line["mmacs"] for line in step["kernels"]))
        assert all(line["share"] > 0 for line in step["phases"] if line["mmacs"])
    one, four = (by_name(found["steps"][rows]) for rows in ("1", "4"))
    assert four["down"]["mmacs"] == pytest.approx(4 * one["down"]["mmacs"])
    assert four["down"]["weight_mb"] == pytest.approx(one["down"]["weight_mb"])
    assert f"{found['isa']}, 1 threads: memory read at" in out
    assert "down" in out
    code, _, err = shell("bench", "local", tiny_gguf, "--profile", "--cells", "b1")
    assert code == 1
    assert "--profile measures one build" in err


def by_name(step: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["phase"]: line for line in step["phases"]}


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
def test_blocks_that_several_hold_are_read_once_and_change_no_bit(kv_dtype: str) -> None:
    """Five texts with 530 tokens in common, in blocks of their own and in the same ones: the same logits, less to read."""
    prefix, ends = [number % VOCAB for number in range(530)], range(3, 8)
    texts = [prefix + list(range(40, 40 + end)) for end in ends]
    read, logits = [], []
    for shared in (0, 33):  # blocks
        program = native_program(native_model("llama"), quantize="int8", blocks=200, max_positions=704, kv_dtype=kv_dtype)
        feeder = Feeder(program, texts)
        for number, (sequence, text) in enumerate(zip(feeder.sequences, texts, strict=True)):
            own = range(40 * number, 40 * number + 38)
            sequence.set_table(0, 0, [*range(shared), *own[shared:]])
            start = 16 * shared if number else 0
            feeder.feed((number, start, len(text) - 1 - start))
        program.core.clear_profile()
        program.core.profiling = True
        logits.append(feeder.feed(*((number, len(text) - 1, 1) for number, text in enumerate(texts))))
        read.append(by_phase(program, len(texts))["attention"]["weight_bytes"])
    assert all((one == other).all() for one, other in zip(*logits, strict=True))
    page = read[0] / (5 * 34)  # of all layers and heads; each reads 34 of them
    assert read[1] == pytest.approx(read[0] - 4 * 32 * page), "two stretches of 256 tokens, once instead of five times"
