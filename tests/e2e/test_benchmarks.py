"""Commands of `benchmarks/`: each shows its help as a process, and runs on a tiny model."""

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import adapters
from benchmarks.peers import encoders, second_turn
from headrace.bench.synthetic import write_synthetic
from headrace.cli.commands import BENCH, MOVED
from tests.cli_shell import ROOT, Shell, environment
from tests.parallel.test_windows import GEMMA


def check_help(name: str, shown: str) -> None:
    assert shown.startswith(f"Usage: python -m benchmarks.{name} [OPTIONS]")
    assert f"\n  python -m benchmarks.{name}" in shown.partition("Examples:")[2]


@pytest.mark.parametrize("name", sorted(MOVED.values()))
def test_a_benchmark_shows_its_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # as in a new process
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    check_help(name, capsys.readouterr().out)


def test_a_benchmark_is_started_from_the_clone() -> None:
    command = [sys.executable, "-m", "benchmarks.batching", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    check_help("batching", done.stdout)


@pytest.mark.parametrize("name", MOVED)
def test_a_command_that_moved_names_its_new_place(name: str, shell: Shell) -> None:
    assert not any(name in commands for commands in BENCH.values())
    code, out, err = shell("bench", name, "MODEL", "--json", "x.json")
    assert (code, out) == (2, "")
    expected = f"headrace: bench {name} is outside the package now; in a clone: python -m benchmarks.{MOVED[name]} --help\n"
    assert err == expected
    assert "No such command 'peerz'" in shell("bench", "peerz")[2], "control: another unknown command"


def run(shell: Shell, name: str, *arguments: object) -> str:
    module = importlib.import_module(f"benchmarks.{name}")
    code, out, err = shell(module.main, *arguments)
    assert code == 0, err
    return out


def test_peers_runs_without_other_engines(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ("--engines", "", "--cells", "b1", "--rounds", 1, "--threads", 1, "--json", file)
    out = run(shell, "peers.__main__", tiny_gguf, *options)
    assert out.splitlines()[1].startswith("b1\t")
    assert json.loads(file.read_text())["cells"]["b1"]["tokens_per_s"] > 0
    code, _, err = shell(importlib.import_module("benchmarks.peers.__main__").main, tiny_gguf, "--engines", "mlx")
    assert (code, err) == (1, "headrace: there is no engine 'mlx'; choose from llama.cpp, ort, openvino, vllm\n")


def test_servers_in_turns(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = f"{sys.executable} -m headrace serve {tiny_gguf} --port {{port}} --threads 1"
    options = ("--streams", 2, "--input", 4, "--output", 3, "--rounds", 1, "--logs", tmp_path / "logs")
    out = run(shell, "peers.servers", f"one={command}", f"other={command}", *options, "--json", file)
    assert [line.split("\t")[:2] for line in out.splitlines()[1:]] == [["2", "one"], ["2", "other"]]
    cell = json.loads(file.read_text())["cells"]["2"]
    assert {name: len(rates) for name, rates in cell["rates"].items()} == {"one": 1, "other": 1}
    assert cell["ratios"]["other"]["median"] == cell["rates"]["one"][0] / cell["rates"]["other"][0]


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        (["one=serve {port}"], "1 server is given; give two or more to compare them"),
        (["one=serve {port}", "one=serve {port}"], "server 'one' is given twice; name each once"),
        (["one=serve {port}", "two=serve"], "server 'two=serve': give NAME=COMMAND, and {port} in the command"),
        (
            ["one=no-such-program {port}", "two=serve {port}"],
            "server one: cannot start no-such-program: No such file or directory",
        ),
    ],
)
def test_servers_refuses(shell: Shell, tmp_path: Path, servers: list[str], message: str) -> None:
    main = importlib.import_module("benchmarks.peers.servers").main
    code, _, err = shell(main, *servers, "--logs", tmp_path)
    assert (code, err.splitlines()[-1]) == (1, f"headrace: {message}")


def test_servers_reports_a_server_that_ends(shell: Shell, tmp_path: Path) -> None:
    main = importlib.import_module("benchmarks.peers.servers").main
    code, _, err = shell(main, "one=false {port}", "two=false {port}", "--logs", tmp_path)
    assert (code, err.splitlines()[-1]) == (1, f"headrace: server one ended with code 1; {tmp_path / 'one.log'} says why")


def test_beams_runs_without_a_peer(shell: Shell, tiny_gguf: Path) -> None:
    out = run(shell, "peers.beams", tiny_gguf, "--no-peer", "--width", 2, "--rounds", 1, "--threads", 1)
    assert [line.split("\t")[0] for line in out.splitlines()] == ["cell", "1 x beam 2", "8 x beam 2"]


def test_batching_counts_steps_of_both_policies(shell: Shell) -> None:
    out = run(shell, "batching", "--requests", 20, "--seqs", 4)
    policies, memory = (part.splitlines() for part in out.split("\n\n"))
    assert [line.split("\t")[:2] for line in policies[1:]] == [["fake model", "static"], ["fake model", "continuous"]]
    assert [line.split("\t")[0] for line in memory[1:]] == ["max", "pow2", "oracle", "paged (16)"]


def test_encoders_of_two_engines_give_the_same_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    options = ["--small", "--rounds", "1", "--threads", "1", "--tokens", "16,32"]
    assert encoders.main([*options, "--engines", "headrace,torch"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens, " in line]
    assert [line.partition(":")[0] for line in lines] == [
        f"4 x {count} tokens, {name}" for count in (16, 32) for name in ("headrace bf16", "headrace Q8_0", "torch f32")
    ]
    assert all(float(line.rpartition(" ")[2]) > 0.999 for line in lines)
    assert encoders.main(["--small", "--engines", "llama.cpp"]) == 1
    assert "llama.cpp is not installed under" in capsys.readouterr().err
    assert encoders.main(["--engines", "onnx"]) == 1
    assert capsys.readouterr().err == "--engines onnx: must be headrace, torch or llama.cpp\n"


def test_a_second_turn_over_http_computes_its_new_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    file = write_synthetic(str(tmp_path / "config.json"), tmp_path / "m.gguf", "Q8_0").path
    options = [str(file), "--first", "200", "--new", "20", "--rounds", "1", "--threads", "1"]
    assert second_turn.main(options) == 0
    (line,) = capsys.readouterr().out.splitlines()
    computed, total = map(int, re.findall(r"(\d+) of (\d+) prompt tokens computed", line)[0])
    assert total == 236
    assert computed <= 20 + 16
    assert second_turn.main([*options, "--llama-server", str(tmp_path / "none")]) == 1
    assert "none: cannot be started (No such file or directory); give the path of a llama-server" in capsys.readouterr().err


def test_adapters_run_on_a_tiny_model(tiny_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapters.main([str(tiny_gguf), "--rank", "2", "--new", "2", "--rounds", "2", "--threads", "1", "--targets", "attention"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "1 sequence, base rows", "8 sequences, base rows",
        "1 sequence, 1 adapter", "8 sequences, 1 adapter", "8 sequences, 8 adapters",
    ]  # fmt: skip
