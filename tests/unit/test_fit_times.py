"""Times, solvers and layouts of `headrace fit`: worked numbers by hand, and brute force as the oracle."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import core
from headrace.bench.fit_cells import NAMES, predict
from headrace.startup.fit import machine as machines
from headrace.startup.fit import report, solve
from headrace.startup.fit.costs import ATTENTION, LINEAR, Step, decode_seconds, operations, prefill_seconds, step_seconds, timed
from headrace.startup.fit.machine import Attention, Curve, Machine, line_through, published
from headrace.startup.fit.shapes import ModelShape
from headrace.startup.fit.sizes import Layout, Load, largest_rank, units_of
from tests.unit.test_fit_sizes import DEEPSEEK_V3, LLAMA2_7B, LLAMA2_70B, LLAMA31_8B, MAMBA, SMOLLM2, shape

pytestmark = pytest.mark.skipif(not core.available(), reason="the packed sizes are the core's")

A100 = published()["a100"]
FLAT = Curve((1, 512), (1e-6, 1e-6), (1e-10, 1e-8))
MEASURED = Machine(
    name="a machine of this test",
    memory=1 << 34,
    bandwidth=1e10,
    peak={"int8": 1e12, "bf16": 1e11},
    link=(1e-6, 1e9),
    measured="today",
    linear={"BF16": FLAT, "Q8_0": FLAT},
    cache=1 << 20,
    attention=(Attention(64, 3, "bfloat16", (1e-6, 1e-7, 1e-10), (0.0, 1e-11)),),
    host=(1e-4, 1e-5),
)


def of(found: list[Any], kind: str) -> tuple[float, float]:
    """Bytes and operations of all operations of a kind."""
    mine = [each for each in found if each.kind == kind]
    return sum(each.calls * each.nbytes for each in mine), sum(each.calls * each.operations for each in mine)


def test_a5_a_decoded_token_by_hand(tmp_path: Path) -> None:
    """Llama-2-7B, batch 1, context 1,024: 2 · 6.607·10⁹ operations and 13.2 GB in linears, 512 MiB of K and V, 4·T·h·d·L."""
    seven = shape(tmp_path, LLAMA2_7B)
    found = operations(seven, Step(1, 1, 1023))
    assert of(found, LINEAR) == (2 * 6_607_077_376, 2 * 6_607_077_376)
    assert of(found, ATTENTION) == (1024 * 524288, 4 * 1024 * 4096 * 32)


def test_a5_attention_has_the_intensity_of_its_groups(tmp_path: Path) -> None:
    """2 g / b operations a byte: 1 for 7B, 8 for 70B, whatever the batch; linears have 2 B / b."""
    for keys, group in ((LLAMA2_7B, 1), (LLAMA2_70B, 8)):
        for batch in (1, 16):
            found = operations(shape(tmp_path, keys), Step(1, batch, 2047))
            nbytes, work = of(found, ATTENTION)
            assert work / nbytes == group
            nbytes, work = of(found, LINEAR)
            assert work / nbytes == pytest.approx(batch)


def test_a5_prefill_by_hand(tmp_path: Path) -> None:
    """2 · P · T and 2 · L · T² · h · d, causal; in chunks the sum is the same. The head multiplies one row."""
    seven = shape(tmp_path, LLAMA2_7B)
    whole = operations(seven, Step(2048, 1, 0, 1))
    body = 6_607_077_376 - 32000 * 4096
    assert of(whole, LINEAR)[1] == 2 * 2048 * body + 2 * 32000 * 4096
    pairs = 2048 * 2049 / 2
    assert of(whole, ATTENTION)[1] == 4 * pairs * 4096 * 32
    assert of(whole, ATTENTION)[1] == pytest.approx(2 * 32 * 2048**2 * 4096, rel=1e-3)
    chunks = [operations(seven, Step(512, 1, past, 0)) for past in range(0, 2048, 512)]
    assert sum(of(found, ATTENTION)[1] for found in chunks) == of(whole, ATTENTION)[1]


@pytest.mark.parametrize(("rows", "past"), [(1, 0), (1, 9), (7, 0), (7, 2), (20, 3), (5, 100)])
def test_a_window_limits_the_keys(rows: int, past: int) -> None:
    assert Step(rows, 1, past).seen(6) == sum(min(past + row + 1, 6) for row in range(rows))
    assert Step(rows, 1, past).seen(None) == sum(past + row + 1 for row in range(rows))


def test_experts_are_read_as_tokens_choose_them(tmp_path: Path) -> None:
    """One token reads 8 of 256 experts; 2,048 tokens nearly all of them. Operations grow with the tokens alone."""
    deepseek = shape(tmp_path, DEEPSEEK_V3, "Q8_0")
    one, many = (operations(deepseek, Step(rows, 1, 0, 1)) for rows in (1, 2048))
    reads = [next(each for each in found if each.name == "experts down") for found in (one, many)]
    assert reads[1].nbytes / reads[0].nbytes == pytest.approx(256 / 8, rel=1e-3)
    assert reads[1].operations == 2048 * reads[0].operations
    assert of(one, LINEAR)[1] == 2 * deepseek.multiplied
    state = [each for each in operations(shape(tmp_path, MAMBA), Step(1, 4, 99)) if each.kind == "state"]
    assert sum(each.calls * each.nbytes for each in state) == 2 * 4 * shape(tmp_path, MAMBA).state_bytes


def test_roofline_of_published_machines(tmp_path: Path) -> None:
    """Ridges of 153, 295 and 206 operations a byte; 13.2 GB take 6.5 ms on an A100, at least."""
    assert [round(published()[name].ridge("bf16")) for name in ("a100", "h100", "h200")] == [153, 295, 206]
    seven = shape(tmp_path, LLAMA2_7B)
    assert decode_seconds(seven, 1, 1, A100) == pytest.approx((2 * 6_607_077_376 + 524288) / 2.039e12, rel=1e-3)
    limits = {each.operation.name: each.limit for each in timed(seven, Step(1, 1, 99), A100)}
    assert limits["down"] == "memory"
    assert {each.operation.name: each.limit for each in timed(seven, Step(2048), A100)}["down"] == "products"
    for machine in published().values():
        assert not machine.measured
        assert machine.label == "published, not measured here"
        assert machine.source
    # All of them have bounds, whatever the model.
    assert all(step_seconds(seven, Step(1), machine) > 0 for machine in published().values())


def test_measured_times_by_hand(tmp_path: Path) -> None:
    """Every operation has its own line: a call, and its bytes; the host adds a step and a sequence."""
    smol = shape(tmp_path, SMOLLM2, "Q8_0")
    lines = {each.operation.name: each.seconds for each in timed(smol, Step(1, 1, 99), MEASURED)}
    down = smol.layers[0].linears[3].nbytes
    assert lines["down"] == pytest.approx(30 * (1e-6 + 1e-10 * down))
    assert lines["attention"] == pytest.approx(30 * (1e-6 + 1e-7 + 1e-10 * 100 * 768))
    assert lines["host"] == pytest.approx(1.1e-4)
    slower = msgspec.structs.replace(MEASURED, from_memory=3e-10, program=Curve((1,), (1.5,), (0.0,)))
    again = {each.operation.name: each.seconds for each in timed(smol, Step(1, 1, 99), slower)}
    assert again["down"] == pytest.approx(1.5 * 30 * 3e-10 * down)
    assert again["host"] == lines["host"]
    # With four rows multiplying takes longer than reading; a third of the shorter time is added to the longer.
    apart = msgspec.structs.replace(slower, apart=Curve((1, 4), (0.0, 1 / 3), (0.0, 0.0)))
    again = {each.operation.name: each.seconds for each in timed(smol, Step(1, 4, 99), apart)}
    multiplying = MEASURED.curve("Q8_0").seconds(4, down)  # type: ignore[union-attr]
    assert multiplying > 3e-10 * down
    assert again["down"] == pytest.approx(1.5 * 30 * (multiplying + 3e-10 * down / 3))


def test_memory_nodes_share_bytes_and_wait_at_barriers(tmp_path: Path) -> None:
    """Two nodes: half of the time of each byte, the fixed parts as before, 12 us of barriers a layer."""
    smol = shape(tmp_path, SMOLLM2, "Q8_0")
    down, two = smol.layers[0].linears[3].nbytes, MEASURED.of_nodes(2)
    lines = {each.operation.name: each.seconds for each in timed(smol, Step(1, 1, 99), two)}
    assert lines["down"] == pytest.approx(30 * (1e-6 + 1e-10 * down / 2))
    assert lines["attention"] == pytest.approx(30 * (1e-6 + 1e-7 / 2 + 1e-10 * 100 * 768 / 2))
    assert lines["host"] == pytest.approx(1.1e-4)
    assert lines["barriers"] == pytest.approx(30 * 8 * 1.5e-6)
    assert (two.memory, two.bandwidth) == (2 * MEASURED.memory, 2 * MEASURED.bandwidth)
    # One node is the machine itself, without barriers.
    assert MEASURED.of_nodes(1) is MEASURED
    assert "barriers" not in {each.operation.name for each in timed(smol, Step(1, 1, 99), MEASURED)}


def test_memory_nodes_gain_by_the_bandwidth_and_not_for_small_models(tmp_path: Path) -> None:
    """A published bound: 13.2 GB are read twice as fast; a model of a few MB waits longer at the barriers than it gains."""
    xeon = published()["xeon-8592"]
    seven = shape(tmp_path, LLAMA2_7B)
    one, two = (decode_seconds(seven, 1, 1, xeon.of_nodes(count)) for count in (1, 2))
    assert two == pytest.approx(one / 2 + 32 * 8 * 1.5e-6)
    smol = shape(tmp_path, SMOLLM2, "Q8_0")
    assert decode_seconds(smol, 1, 1, xeon.of_nodes(2)) > decode_seconds(smol, 1, 1, xeon) / 2 + 30 * 8 * 1.5e-6 - 1e-9


@pytest.mark.parametrize(("name", "count", "most"), [("h100", 2, "one memory node"), ("xeon-8592", 3, "1 to 2 memory nodes")])
def test_a_host_has_the_memory_nodes_that_it_can_have(name: str, count: int, most: str) -> None:
    with pytest.raises(ValueError, match=rf"^--nodes {count}: a host of .* has {most}; lower it$"):
        published()[name].of_nodes(count)


def test_offload_takes_the_longer_of_computing_and_reading(tmp_path: Path) -> None:
    seven = shape(tmp_path, LLAMA2_7B)
    units = units_of(seven)
    assert len(units) == 34
    room = largest_rank(seven, Load(1024)).total - sum(units) // 2
    fast = msgspec.structs.replace(MEASURED, disk=1e12)
    for machine, limit in ((MEASURED, None), (fast, "computing_ms"), (msgspec.structs.replace(fast, disk=1e9), "reading_ms")):
        found = report.offload_record(seven, report.Question(Load(1024), Layout(), room), machine)
        assert found["fits"]
        assert found["memory"] <= sum(units) / 2
        assert found["disk"] > sum(units) / 2
        assert found.get("tpot_ms") == (None if limit is None else found[limit])
    assert found["reading_ms"] == pytest.approx(1e3 * found["disk"] / 1e9)
    assert report.offload_record(seven, report.Question(Load(1024), Layout(), 1 << 36), fast)["disk"] == 0
    assert not report.offload_record(seven, report.Question(Load(1024), Layout(), 1 << 30), fast)["fits"]
    with pytest.raises(ValueError, match="--offload is for one process and decoders"):
        report.offload_record(seven, report.Question(Load(1024), Layout(2), room), fast)


def test_curves_and_lines() -> None:
    curve = Curve((1, 4, 16), (0.0, 0.0, 0.0), (1.0, 3.0, 5.0))
    assert [curve.seconds(rows, 2.0) for rows in (1, 2, 4, 8, 16, 32)] == [2.0, 4.0, 6.0, 8.0, 10.0, 20.0]
    assert line_through([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)]) == pytest.approx((1.0, 2.0))
    assert line_through([(1.0, 1.0), (2.0, 3.0)])[0] == 0.0  # no negative part
    for arguments in (((), (), ()), ((1, 1), (0.0, 0.0), (0.0, 0.0)), ((1,), (-1.0,), (0.0,)), ((1, 2), (0.0,), (0.0,))):
        with pytest.raises(ValueError, match="a curve has|rows must|seconds must"):
            Curve(*arguments)


@pytest.mark.parametrize("keys", [SMOLLM2, LLAMA31_8B], ids=["135M", "8B"])
@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(1, 2)], ids=str)
def test_solvers_are_brute_force(tmp_path: Path, keys: dict[str, Any], layout: Layout) -> None:
    found = shape(tmp_path, keys, "Q8_0")
    load = Load(777, 3, 256)
    memory = largest_rank(found, replace(load, batch=9), layout).total + 12345
    batches = [batch for batch in range(1, 40) if largest_rank(found, replace(load, batch=batch), layout).total <= memory]
    assert solve.largest_batch(found, load, memory, layout) == max(batches) >= 9
    contexts = [
        context
        for context in range(16, 4096, 16)
        if largest_rank(found, replace(load, context=context), layout).total <= memory
    ]
    assert solve.longest_context(found, load, memory, layout) == max(contexts)
    assert solve.largest_batch(found, load, 1000, layout) == solve.longest_context(found, load, 1000, layout) == 0
    tpot = decode_seconds(found, 5, 777, A100, layout=layout)
    assert solve.batch_under(found, load, A100, tpot, memory, layout) == max(
        batch for batch in batches if decode_seconds(found, batch, 777, A100, layout=layout) <= tpot
    )
    ttft = prefill_seconds(found, 777, A100, 128, layout=layout)
    chunk, seconds = solve.chunk_under(found, load, A100, ttft, layout)
    assert seconds <= ttft
    smaller = [size for size in (16, 32, 64, 128) if prefill_seconds(found, 777, A100, size, layout=layout) <= ttft]
    assert chunk == min(smaller)
    assert solve.chunk_under(found, load, A100, 1e-9, layout)[0] == 0


def test_chunks_in_stages_take_the_formula(tmp_path: Path) -> None:
    """C equal chunks on p equal stages: C + p - 1 times a stage (GPipe), so C·p / (C + p - 1) times as fast."""
    even = replace(
        shape(tmp_path, LLAMA2_7B), head=replace(shape(tmp_path, LLAMA2_7B).head, parts=shape(tmp_path, SMOLLM2).head.parts)
    )
    alone = prefill_seconds(even, 2048, A100, 256)
    staged = prefill_seconds(even, 2048, A100, 256, layout=Layout(pp=2))
    assert alone / staged == pytest.approx(8 * 2 / (8 + 2 - 1), rel=0.06)


def test_layouts_and_advice(tmp_path: Path) -> None:
    """Two sockets: nothing to do. Weights beyond one machine: the smallest layout that fits. Dominated layouts are dropped."""
    smol = shape(tmp_path, SMOLLM2, "Q8_0")
    (only,) = solve.best(smol, Load(2048), A100, 1 << 33, 1)
    assert solve.advice(smol, Load(2048), 1 << 33, 1, [only]) == [
        "two sockets: nothing to do, one process uses both",
        "three hosts: replicas, 3 times the sequences",
    ]
    choice = solve.choose(smol, Load(2048), A100, 1 << 33, Layout(4))
    assert choice.binding == "9 query heads on 3 KV heads: tp 4 keeps 5"
    seventy = shape(tmp_path, LLAMA2_70B)
    choices = solve.best(seventy, Load(2048), A100, A100.memory, 4)
    assert all(choice.total <= A100.memory for choice in choices)
    assert min(choice.layout.ranks for choice in choices) == 2
    assert "one is too small" in solve.advice(seventy, Load(2048), A100.memory, 4, choices)[0]
    assert not any(one.dominates(other) for one in choices for other in choices)
    assert all(
        any(kept.dominates(each) or kept.layout == each.layout for kept in choices)
        for layout in solve.layouts(seventy, 4)
        if (each := solve.choose(seventy, Load(2048), A100, A100.memory, layout)).batch
    )
    assert solve.advice(seventy, Load(2048), 1 << 30, 1, solve.best(seventy, Load(2048), A100, 1 << 30, 1))[0].startswith(
        "nothing fits"
    )
    latent = solve.choose(shape(tmp_path, DEEPSEEK_V3), Load(2048), A100, A100.memory, Layout(8))
    assert latent.binding == "the weights do not fit"


def test_a_machine_file(tmp_path: Path) -> None:
    place = machines.save(MEASURED, tmp_path / "machine.json")
    assert machines.find(str(place)) == MEASURED
    lines = json.loads(place.read_text())
    for change, message in (
        ({"bandwidth": None}, "is not a machine file"),
        ({"linear": {}}, "a measured machine has linear, attention and cache"),
        ({"other": 1}, "unknown field"),
        ({"memory": 0}, "must be above 0"),
    ):
        place.write_text(json.dumps({**lines, **change}))
        with pytest.raises(ValueError, match=message):
            machines.find(str(place))
    del lines["bandwidth"]
    place.write_text(json.dumps(lines))
    with pytest.raises(ValueError, match="missing required field `bandwidth`.*write it again: headrace fit --calibrate"):
        machines.find(str(place))
    with pytest.raises(ValueError, match="cannot be read"):
        machines.find(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="--machine h10: unknown machine"):
        machines.find("h10")


def test_the_report_has_a_predicted_and_a_measured_value_in_every_cell(tmp_path: Path) -> None:
    smol: ModelShape = shape(tmp_path, SMOLLM2)
    found = report.report(smol, report.Question(Load(4096), Layout(), 1 << 33, 2, 0.01, 1.0), MEASURED)
    assert set(found) == {
        *("model", "memory", "batches", "contexts", "machine", "phases", "predicted"),
        *("batch_under_tpot", "chunk_under_ttft", "layouts", "advice"),
    }
    predicted = predict(smol, MEASURED, 2048)
    assert tuple(predicted) == NAMES
    cells = report.cells_record(predicted, {"b1": {"ms": 2.0, "tokens_per_s": 500.0}})
    assert cells["b1"]["error"] == pytest.approx(cells["b1"]["predicted"]["ms"] / 2 - 1)
    assert all(set(cell) == {"predicted", "measured", "error"} for cell in cells.values())
    assert cells["b4"]["measured"] is None
    # A machine that is slower next to the cell than when it was calibrated is expected to be slower.
    slow = report.cells_record(predicted, {"b1": {"ms": 2.0, "tokens_per_s": 500.0, "slowness": 1.5}})
    assert slow["b1"]["error"] + 1 == pytest.approx(1.5 * (cells["b1"]["error"] + 1))
    assert slow["b1"]["predicted"]["tokens_per_s"] == pytest.approx(predicted["b1"]["tokens_per_s"] / 1.5)
    assert report.cells_record({"b1": {}}, {"b1": {"ms": 2.0, "tokens_per_s": 500.0}})["b1"]["error"] is None
    json.dumps(found)
    with pytest.raises(ValueError, match="--context 5000: .* has 4096 positions"):
        report.report(smol, report.Question(Load(5000), Layout(), 1), None)
