"""bench linears: kernels as a share of what the machine can do."""

import json
from pathlib import Path

import pytest

from headrace.bench.linears import TYPES, measure_linears
from headrace.bench.profile import share_of
from tests.cli_shell import Shell, check_bar

MACHINE = {"bandwidth_gb_s": 10.0, "gmacs": {"int8": 100.0, "bf16": 20.0, "f32": 10.0}}


def test_the_share_is_of_what_takes_longer() -> None:
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
        "bench", "linears", "--types", "q4_0", "--rows", "2", "--repeats", "1", "--threads", "1", "--json", file
    )
    assert code == 0, err
    check_bar(err, "measuring", "of 1 format")
    assert set(json.loads(file.read_text())["types"]["Q4_0"]["2"]) == {"gmacs", "gb_s", "limit", "share"}
    assert "Q4_0" in out
    code, _, err = shell("bench", "linears", "--rows", "two")
    assert code == 1
    assert "--rows takes numbers" in err
