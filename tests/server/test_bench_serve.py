"""`headrace bench serve` and `bench latency` against our own server."""

import json
import os
from pathlib import Path

import pytest

from tests.cli_shell import Shell, check_bar
from tests.server.harness import Running


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_a_sweep_gives_every_figure(server: Running, shell: Shell, tmp_path: Path) -> None:
    before = server.figure("generation_tokens_total")
    options = "--kind text --concurrency 1,2 --requests 4 --input 20 --output 6 --cap-input 12 --warmup 1 --slo ttft:60".split()
    files = (
        "--json",
        tmp_path / "x.json",
        "--plots",
        tmp_path / "plots",
        "--watch",
        os.getpid(),
        "--report",
        tmp_path / "x.html",
    )
    code, out, err = shell.watched("bench", "serve", f"{server.base}/v1", *options, *files)
    assert code == 0, err
    check_bar(err, "1 at once ", "2 at once ", "of 4 requests")
    assert "1 at once, 2 at once: 4 requests, 4 prompts shortened by 32 tokens in all each" in err
    told = json.loads((tmp_path / "x.json").read_text())
    assert list(told["loads"]) == ["1 at once", "2 at once"]
    for load in told["loads"].values():
        assert (load["requests"], load["failed"], load["output_tokens"], load["slo"]["share"]) == (4, 0, 24, 1.0)
        for name in ("ttft", "itl", "tpot", "e2e"):
            assert 0 <= load[name]["p50"] <= load[name]["p99"] <= load[name]["max"]
        assert load["ttft"]["p50"] <= load["e2e"]["p50"]  # equal where a busy machine read an answer in one piece
    assert server.figure("generation_tokens_total") - before == 48 + 6
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        *(f"{name}.svg" for name in ("ttft", "itl", "e2e", "ttft-load", "itl-load"))
    }
    page = (tmp_path / "x.html").read_text()
    assert (page.count("<svg"), page.count("tiny") > 5, "goodput" in page) == (5, True, True)
    assert "goodput, requests/s" in out
    assert "us a token" in out


def test_prompts_differ_by_run_unless_they_are_to_repeat(wide: Running, shell: Shell, tmp_path: Path) -> None:
    """A second run must not measure the prefix cache that the first one filled."""
    options = ("--concurrency", 1, "--requests", 3, "--input", 60, "--output", 2, "--warmup", 0, "--json", tmp_path / "x.json")

    def cached(*more: object) -> int:
        code, out, err = shell("bench", "serve", f"{wide.base}/v1", "--kind", "text", *options, *more)
        assert code == 0, err
        (load,) = json.loads((tmp_path / "x.json").read_text())["loads"].values()
        assert load["failed"] == 0
        assert f"prompt tokens cached\t{load['cached_tokens']} of {load['prompt_tokens']}" in out
        return int(load["cached_tokens"])

    assert [cached() for _ in range(2)] == [0, 0]
    assert cached("--repeat-prompts") == 0
    assert cached("--repeat-prompts") > 100  # the control: the same prompts are found


def test_poisson_and_a_trace(server: Running, shell: Shell, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": n * 1000, "input_length": 9, "output_length": 40} for n in range(9)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    common = ("--kind", "text", "--warmup", 0, "--json", tmp_path / "x.json")
    cut = ("--trace", trace, "--trace-scale", 0.001, "--limit", 3, "--cap-output", 2)
    code, _, err = shell("bench", "serve", f"{server.base}/v1", *common, *cut)
    assert code == 0, err
    assert "t.jsonl: the first 3 of 9 requests, 3 outputs shortened by 114 tokens in all" in err
    assert json.loads((tmp_path / "x.json").read_text())["loads"]["t.jsonl"]["output_tokens"] == 6
    code, _, err = shell(
        "bench", "serve", f"{server.base}/v1", *common, "--rate", 200, "--requests", 3, "--input", 4, "--output", 2
    )
    assert code == 0, err
    assert json.loads((tmp_path / "x.json").read_text())["loads"]["200/s"]["requests"] == 3


def test_first_tokens_and_sampling(wide: Running, shell: Shell, tmp_path: Path) -> None:
    options = "--kind text --lengths 4,32 --at-once 1 --output 8 --rounds 1".split()
    code, out, err = shell("bench", "latency", f"{wide.base}/v1", *options, "--json", tmp_path / "x.json")
    assert code == 0, err
    assert "prompt tokens\t" in out
    assert "at once\t" in out
    told = json.loads((tmp_path / "x.json").read_text())
    assert set(told["ttft"]) == {"4", "32"}
    assert told["ttft"]["4"] > 0
    assert set(told["greedy"]) == set(told["sampled"]) == {"1"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rate", "1", "--concurrency", "2"), "give one of"),
        (("--rate", "fast"), "numbers with commas"),
        (("--rate", "0"), "numbers above 0"),
        (("--slo", "fast:1"), "there is no limit"),
        (("--kind", "picture"), "--kind is one of"),
        (("--model", "other", "--kind", "text"), "is not served here"),
    ],
)
def test_invalid_options_are_refused_with_a_message(server: Running, shell: Shell, options: tuple[str, ...], said: str) -> None:
    code, _, err = shell("bench", "serve", f"{server.base}/v1", *options)
    assert code != 0
    assert said in err


def test_a_server_that_is_not_there(shell: Shell) -> None:
    code, _, err = shell("bench", "serve", "http://127.0.0.1:9/v1")
    assert code != 0
    assert "cannot be reached" in err
