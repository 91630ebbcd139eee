"""The parts of a deployment on Ray that need no Ray: which engines are known, how many are wanted, refusals of the commands."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli.app import main
from headrace.cli.generate import parse_range
from headrace.server import ray_serve
from headrace.server.ray_serve import Directory, Scaling


def test_an_engine_that_does_not_report_leaves_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(ray_serve.time, "monotonic", lambda: now)
    directory = Directory()
    directory.put("b:1")
    directory.put("a:1")
    assert directory.addresses() == ["a:1", "b:1"]
    now += ray_serve.GONE_AFTER - 1
    directory.put("a:1")
    now += 2
    assert directory.addresses() == ["a:1"]
    directory.drop("a:1")
    assert directory.addresses() == []


@pytest.mark.parametrize(("requests", "expected"), [([], 1), ([0.0], 1), ([4.0], 1), ([5.0], 2), ([5.0, 9.0], 4), ([90.0], 4)])
def test_open_requests_decide_the_number_of_engines(requests: list[float], expected: int) -> None:
    context = SimpleNamespace(
        aggregated_metrics={"requests": dict(enumerate(requests))},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert Scaling(4)(context) == (expected, {})


def test_ranges() -> None:
    assert parse_range("1..4") == (1, 4)
    assert parse_range("2") == (2, 2)


@pytest.mark.parametrize("text", ["", "0", "4..1", "a..b", "1..", "1.5"])
def test_a_range_that_is_none_is_one_line(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    assert main(["generate", "m", "-i", str(source), "-o", str(tmp_path / "out"), "--ray", "--actors", text]) == 2
    assert "must be two numbers A..B with 1 ≤ A ≤ B, such as 1..4" in capsys.readouterr().err


def test_deploy_needs_a_key_and_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["deploy", "m"]) == 1
    assert "--key-file is missing; give the file with the key of links" in capsys.readouterr().err
    key = tmp_path / "link.key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    assert main(["deploy", "m", "--key-file", str(key)]) == 1
    error = capsys.readouterr().err
    assert "listens on every network of this machine; set RAY_ADDRESS to a running cluster, or add --ray-open" in error
    assert len(error.splitlines()) == 1
