"""Offline batches on Ray (make test-ray): a batch whose process is killed twice has each line once, with the plain answers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.harness import ROOT
from tests.tiny_files import write_tiny_gguf

pytestmark = pytest.mark.ray
LINES = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("batch")
    write_tiny_gguf(made / "tiny.gguf", context=1024)
    rows = [{"id": f"r{one}", "prompt": f"The mill {one}", "max_tokens": 40, "seed": one} for one in range(LINES)]
    (made / "in.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{broken\n")
    return made


def start(folder: Path, target: str, *more: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "headrace", "generate", "tiny.gguf", "-i", "in.jsonl", "-o", target, "--threads", "1"]
    return subprocess.Popen(
        [*command, "--max-num-seqs", "4", *more], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
    )


def records(path: Path) -> list[dict[str, object]]:
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [json.loads(line) for line in whole]


def test_a_batch_that_is_killed_twice_has_each_line_once(folder: Path) -> None:
    assert start(folder, "plain.jsonl").wait() == 1  # one line is broken
    expected = {str(one["id"]): one for one in records(folder / "plain.jsonl")}
    assert len(expected) == LINES + 1
    ray = ["--ray", "--ray-open", "--actors", "1..2"]
    target, done = folder / "ray.jsonl", 0
    for _ in range(2):
        process = start(folder, "ray.jsonl", *ray)
        while not (target.exists() and len(records(target)) > done + 20):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        done = len(records(target))
        print(f"killed after {done} of {LINES + 1} lines")
        assert done <= LINES
    began = time.monotonic()
    assert start(folder, "ray.jsonl", *ray).wait() == 1
    print(f"the rest in {time.monotonic() - began:.1f} s")
    found = records(target)
    assert len(found) == LINES + 1
    assert {str(one["id"]): one for one in found} == expected


def test_an_open_ray_must_be_asked_for(folder: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": "", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "headrace", "generate", "tiny.gguf", "-i", "in.jsonl", "-o", "refused.jsonl", "--ray"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "listens on every network of this machine; set RAY_ADDRESS" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (folder / "refused.jsonl").exists()
