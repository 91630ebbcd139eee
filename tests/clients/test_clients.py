"""Clients of the OpenAI protocol in environments of their own, against `headrace serve`: `make test-clients`.

Each client has one script, which prints a line for each check. A check may fail only if its script says how a weak model fails
it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.places import model_file
from tests.server.harness import PATIENCE, ROOT

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
CLIENTS: dict[str, dict[str, list[str]]] = tomllib.loads((HERE / "clients.toml").read_text("utf-8"))
SMALL, LARGE = "SmolLM2-135M-Instruct.Q4_1.gguf", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"
SECONDS = 900  # of one client

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.weights]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of both models."""
    folder = tmp_path_factory.mktemp("clients")
    models = "".join(
        f'[[models]]\nname = "{name}"\nmodel = "{model_file(file)}"\npreload = true\n'
        for name, file in (("small", SMALL), ("large", LARGE))
    )
    (folder / "serve.toml").write_text(f"port = 0\nmax_model_len = 4096\n{models}")
    command = [sys.executable, "-m", "headrace", "serve", "--config", str(folder / "serve.toml")]
    environment = {**os.environ, "HEADRACE_HOME": str(folder / "home")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
    try:
        yield _wait(process, folder / "log")
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _wait(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """The address, once both models can be used."""
    while process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            try:
                if httpx.get(f"{found[0]}/ready").status_code == 200:
                    return f"{found[0]}/v1"
            except httpx.TransportError:
                pass
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    pytest.fail(f"the server ended: {log.read_text()[-1000:]}")


def report(command: list[str], folder: Path, url: str) -> list[dict[str, Any]]:
    """The lines of a client's script."""
    environment = {
        **{name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")},
        "OPENAI_API_KEY": "none",
    }
    command = [*command, url, "small", "large"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    print(done.stderr[-4000:])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    assert lines, done.stderr[-2000:]
    return lines


def judge(client: str, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        fault = f" ({line['excuse']})" if line["excuse"] else ""
        print(f"{client}: {line['check']}: {'passed' if line['passed'] else line['error'] + fault}")
    print(f"{client}: {sum(line['passed'] for line in lines)} of {len(lines)}")
    assert [f"{line['check']}: {line['error']}" for line in lines if not line["passed"] and not line["excuse"]] == []


@pytest.mark.parametrize("client", sorted(CLIENTS["python"]))
def test_python(client: str, url: str) -> None:
    python = BUILD / client / "bin" / "python"
    if not (BUILD / client / ".done").exists():
        pytest.skip(f"{client} is not installed: make test-clients")
    script = HERE / f"{client.replace('-', '_')}_client.py"
    judge(client, report([str(python), str(script)], HERE, url))


@pytest.mark.parametrize("client", sorted(CLIENTS["npm"]))
def test_npm(client: str, url: str) -> None:
    folder, name = BUILD / client, f"{client.replace('-', '_')}_client.mjs"
    if not (folder / ".done").exists() or shutil.which("node") is None:
        pytest.skip(f"{client} is not installed: make test-clients (needs node and npm)")
    for file in ("checks.mjs", name):  # node looks for packages next to the script
        shutil.copyfile(HERE / file, folder / file)
    judge(client, report(["node", name], folder, url))
