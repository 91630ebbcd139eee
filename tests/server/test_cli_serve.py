"""The command `headrace serve`: output, SIGTERM, exit codes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from headrace.cli.app import main
from headrace.cli.serve_models import served_name
from headrace.host import end_with
from tests.server.harness import PATIENCE, ROOT, Paused, next_match, until

KEY = "a-long-enough-key"
BODY = {"model": "mill", "prompt": "The mill", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
# The server, which stops its engine when an answer has begun: what comes next comes in the middle of it.
STOPPING = """
import os, signal, sys
from headrace.cli.app import main
from headrace.server import serving
from headrace.server.engines.engine_requests import EngineRequests
serving.LAST_BYTES = 600
take = EngineRequests.take
def taken(self, message):
    take(self, message)
    if getattr(message, "deltas", None) and EngineRequests.take is taken:
        EngineRequests.take = take
        os.kill(self.replica.pid, signal.SIGSTOP)
EngineRequests.take = taken
sys.exit(main())
"""


@pytest.fixture
def process(endless: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    key = tmp_path / "key"
    key.write_text(f"{KEY}\n")
    command = [
        sys.executable, "-c", STOPPING, "serve", str(endless), "--port", "0", "--served-model-name", "mill",
        "--api-key-file", str(key), "--dtype", "float32", "--threads", "1", "--grace", "3000",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    yield running
    running.kill()
    running.wait()


def engine_of(process: "subprocess.Popen[str]") -> int:
    """The engine process's id."""
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for pid in (task / "children").read_text().split():
                if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
    raise AssertionError("there is no engine process")


def test_sigterm_finishes_running_requests_and_refuses_new_requests(process: "subprocess.Popen[str]") -> None:
    address = next_match(process, r"^mill on (http://127\.0\.0\.1:\d+)/v1$")[1]
    next_match(process, "^loading; requests get a 503 until it is ready$")
    client = httpx.Client(base_url=address, timeout=PATIENCE, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
    next_match(process, r"^mill: temperature 0\.8, top_k 40, top_p 0\.95, min_p 0\.05 \(default\)$")
    next_match(process, r"^ready: .*context")
    next_match(process, f"^ready: the page is {re.escape(address)}/$")
    assert client.get("/health").json()["status"] == "ready"
    engine = engine_of(process)
    assert not loads_torch(process.pid), "the web process answers without it, and starts at once"
    assert os.getpgid(engine) != os.getpgid(process.pid), "Ctrl-C is for the web process alone"
    assert loads_torch(engine)
    with client.stream("POST", "/v1/completions", json=BODY | STREAM) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        with Paused(engine):  # as it is already
            for pid in (process.pid, engine):  # as a service manager does it
                os.kill(pid, signal.SIGTERM)
            until(lambda: client.get("/health").json()["status"] == "draining")
            refused = client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the server is shutting down")
            assert int(refused.headers["retry-after"]) > 0
        pieces = [first, *lines]
    said_last = "".join(pieces)[-1000:]
    assert '"finish_reason":"length"' in said_last
    assert '"completion_tokens":600' in said_last
    assert said_last.rstrip().endswith("[DONE]")
    assert process.wait(PATIENCE) == 0
    assert not Path(f"/proc/{engine}").exists()


def test_a_killed_server_leaves_no_engine_behind(process: "subprocess.Popen[str]") -> None:
    next_match(process, r"^ready: ")
    engine = engine_of(process)
    process.kill()
    until(lambda: ended(engine))


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends a busy process with its parent on Linux")
@pytest.mark.parametrize("bound", [True, False])
def test_a_stopped_engine_ends_with_a_killed_server(bound: bool) -> None:
    """A process that does not come to look at its socket, as one in a long step; stopped, it would be there for ever. The
    control is one that the system was not told about."""
    bind = "end_with(os.getppid())" if bound else "None"
    child = f"import os; from headrace.host import end_with; {bind}; print(os.getpid(), flush=True); "
    child += "os.kill(os.getpid(), 19)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        engine = int(running.stdout.readline())
        stat = Path(f"/proc/{engine}/stat")
        until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")
        running.kill()
        running.wait()
        if bound:
            until(lambda: ended(engine))
        else:
            assert stat.read_text().rsplit(")", 1)[1].split()[0] == "T"
            os.kill(engine, signal.SIGKILL)


def test_an_engine_exits_if_its_server_ended_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(prctl=lambda *numbers: None))
    end_with(os.getppid())
    with pytest.raises(SystemExit):
        end_with(os.getppid() + 1)


def loads_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "a key is needed"),
        (["--tls-cert", "KEY"], "both --tls-cert and --tls-key"),
        (["--api-key-file", "EMPTY"], "is empty"),
        (["--port", "70000"], "'--port'"),
        (["--tls-cert", "KEY", "--tls-key", "KEY"], "headrace: "),
    ],
)
def test_unusable_arguments_are_a_one_line_error(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    files = {"KEY": "not a certificate", "EMPTY": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = [str(tmp_path / one) if one in files else one for one in arguments]
    assert main(["serve", str(tiny), *(["--port", "0"] if "--port" not in given else []), *given]) in (1, 2)
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_the_served_name_hides_the_path(tiny: Path) -> None:
    assert served_name(str(tiny)) == "tiny"
    assert served_name(str(tiny.parent)) == tiny.parent.name
    assert served_name("smollm2-135m") == "smollm2-135m"
