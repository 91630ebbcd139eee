"""`headrace deploy` on Ray (make test-ray): one engine, two under load, one again; no request fails, all texts are right."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import ROOT
from tests.tiny_files import write_tiny_gguf

pytestmark = pytest.mark.ray
PORT = 8177
SECONDS = 120.0  # until a change of the number of engines
PROMPTS = 12


def get(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def text(number: int) -> str:
    body = {"model": "tiny", "prompt": f"Mill {number}", "max_tokens": 400, "seed": number, "ignore_eos": True}
    return str(get("/v1/completions", body)["choices"][0]["text"])


def ready() -> int:
    """Number of ready engines; 0 while the server cannot be reached."""
    try:
        states = get("/health")["replicas"]["tiny"].values()
    except (OSError, KeyError):
        return 0
    return sum(state == "ready" for state in states)


def come(engines: int) -> None:
    ends = time.monotonic() + SECONDS
    while ready() != engines:
        assert time.monotonic() < ends, f"{engines} engines are not ready within {SECONDS:g} s"
        time.sleep(0.2)


def test_one_two_and_one_engine_under_load_drop_nothing(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", context=1024)
    key = tmp_path / "link.key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    command = [sys.executable, "-m", "headrace", "deploy", str(model), "--key-file", str(key), "--port", str(PORT)]
    command += ["--replicas", "1..2", "--threads", "1", "--target", "4", "--ray-open", "--grace", "5"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"})
    try:
        come(1)
        expected = [text(number) for number in range(PROMPTS)]
        loaded, wrong, answered = threading.Event(), list[str](), list[int]()
        loaded.set()

        def client(number: int, few: bool) -> None:
            while loaded.is_set() if not few else not done.is_set():
                try:
                    found = text(number)
                except urllib.error.HTTPError as error:
                    found = f"{error.code} {error.read().decode()}"
                answered.append(number)
                if found != expected[number]:
                    wrong.append(f"{number}: {found[:200]}")

        done = threading.Event()
        # One client goes on while the second engine is stopped.
        clients = [threading.Thread(target=client, args=(number, number == 0)) for number in range(PROMPTS)]
        for one in clients:
            one.start()
        come(2)
        time.sleep(3.0)
        loaded.clear()
        come(1)
        done.set()
        for one in clients:
            one.join()
        print(f"{len(answered)} requests over 1, 2 and 1 engines, {len(wrong)} wrong")
        assert wrong == []
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
