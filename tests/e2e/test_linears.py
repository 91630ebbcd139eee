"""benchmarks.linears: speed of kernels as a share of the machine's limits."""

import json
from pathlib import Path

import pytest

from benchmarks import linears
from benchmarks.linears import TYPES, measure_linears
from headrace.bench.profile import share_of
from tests.cli_shell import Shell, check_bar

MACHINE = {"bandwidth_gb_s": 10.0, "gmacs": {"int8": 100.0, "bf16": 20.0, "f32": 10.0}}


def test_the_share_refers_to_the_tighter_limit() -> None:
    assert share_of(MACHINE, "int8", 1e9, 1e9, 0.2) == ("memory", pytest.approx(0.5))
    assert share_of(MACHINE, "int8", 1e9, 40e9, 0.5) == ("int8", pytest.approx(0.8))
    assert share_of(MACHINE, "bf16", 1e9, 40e9, 4.0) == ("bf16", pytest.approx(0.5)), "the control: another peak"
    assert share_of(MACHINE, "", 0.0, 0.0, 1.0) == ("", None)


def test_every_format_has_its_share() -> None:
    result = measure_linears(shape=(32, 256), rows=(1, 9), mebibytes=0, repeats=2, threads=1)
    assert set(result["types"]) == set(TYPES)
    for kind, by_rows in result["types"].items():
        products = "bf16" if kind == "BF16" else "int8"
        for count, figures in by_rows.items():
            macs = 32 * 256 * int(count)
            seconds = macs / figures["gmacs"] / 1e9
            assert figures["gb_s"] > 0
            assert share_of(result, products, figures["gb_s"] * seconds * 1e9, macs, seconds) == (
                figures["limit"],
                pytest.approx(figures["share"]),
            )
    with pytest.raises(ValueError, match="no kernels for 'Q1_0'"):
        measure_linears(types=["Q1_0"])


def test_the_command(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "linears.json"
    code, out, err = shell.watched(
        linears.main, "--types", "q4_0", "--rows", "2", "--repeats", "1", "--threads", "1", "--json", file
    )
    assert code == 0, err
    check_bar(err, "measuring", "of 1 format")
    assert set(json.loads(file.read_text())["types"]["Q4_0"]["2"]) == {"gmacs", "gb_s", "limit", "share"}
    assert "Q4_0" in out
    code, _, err = shell(linears.main, "--rows", "two")
    assert code == 1
    assert "--rows takes numbers" in err


def test_a_fallen_share_is_reported(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured twice, since machines pause; another instruction set, type or number of rows is not compared."""
    file, runs, isa = tmp_path / "shares.json", list[dict[str, dict[str, float]]](), "avx512"

    def measure(*, types: list[str], rows: list[int], **more: object) -> dict[str, object]:
        found = runs.pop(0)
        figures = {kind: {str(n): {"gmacs": 1.0, "share": found[kind][str(n)], "limit": ""} for n in rows} for kind in types}
        return {"isa": isa, "threads": 2, "bandwidth_gb_s": 1.0, "gmacs": {"int8": 1.0, "bf16": 1.0}, "types": figures}

    def run(*found: dict[str, dict[str, float]], options: tuple[object, ...] = ("--shares", file)) -> tuple[int, str, str]:
        runs[:] = found
        answer = shell(linears.main, "--types", "Q4_0,Q8_0", "--rows", "1,8", *options)
        assert runs == []
        return answer

    monkeypatch.setattr(linears, "measure_linears", measure)
    before = {"Q4_0": {"1": 0.8, "8": 0.6}, "Q8_0": {"1": 0.8, "8": 0.6}}
    once = {"Q4_0": {"1": 0.8, "8": 0.6}, "Q8_0": {"1": 0.8, "8": 0.4}}
    slight = {"Q4_0": {"1": 0.7, "8": 0.5}, "Q8_0": {"1": 0.7, "8": 0.5}}
    assert run(options=("--update",))[0] == 1
    assert "has no shares (" in run()[2]
    assert run(before, options=("--shares", file, "--update"))[0] == 0
    assert run(before)[0] == run(slight)[0] == 0
    assert run(once, before)[0] == 0, "only once"
    code, out, _ = run(once, once)
    assert (code, out.splitlines()[-1]) == (1, "slower: Q8_0 at 8 rows has 40% of the limit and had 60%")
    assert run(once, options=("--shares", file, "--update"))[0] == 0
    assert run(once)[0] == 0, "what it does now was kept"
    isa = "avx2"
    code, _, err = run(once)
    assert (code, "threads with avx2: nothing is compared" in err) == (0, True)
    file.write_text("[]")
    assert "has no shares by processor" in run()[2]
