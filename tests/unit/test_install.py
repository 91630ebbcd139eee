"""What `make run` does before it runs: which torch, which compiler, and what happens without."""

import importlib.util
import socket
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "install.py"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_comes_from_the_cpu_index_without_a_gpu(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert install.torch_index({}, gpu=False) == install.CPU_INDEX
    assert install.torch_index({}, gpu=True) == ""
    assert install.torch_index({"TORCH_INDEX": "https://mirror"}, gpu=True) == "https://mirror"
    assert install.torch_index({"TORCH_INDEX": ""}, gpu=False) == ""
    monkeypatch.setattr("sys.platform", "darwin")
    assert install.torch_index({}, gpu=False) == ""


def pip_calls(install: ModuleType, monkeypatch: pytest.MonkeyPatch, results: list[int]) -> list[tuple[str, ...]]:
    """What `install_torch` asks pip for, pip ending with these results."""
    calls: list[tuple[str, ...]] = []

    def pip(python: Path, *arguments: str) -> int:
        calls.append(arguments)
        return results[len(calls) - 1]

    monkeypatch.setattr(install, "pip", pip)
    return calls


def test_an_index_out_of_reach_falls_back_to_the_plain_name(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pip_calls(install, monkeypatch, [0])
    install.install_torch(Path("python"), "http://localhost:1/simple")  # nothing listens there
    assert calls == [("torch",)]
    assert "cannot be used from here" in capsys.readouterr().out


def test_an_index_that_fails_falls_back_to_the_plain_name(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "reachable", lambda index: True)
    calls = pip_calls(install, monkeypatch, [1, 0])
    install.install_torch(Path("python"), "https://mirror")
    assert [call[-2:] for call in calls] == [("https://mirror", "torch"), ("torch",)]
    pip_calls(install, monkeypatch, [1, 1])
    with pytest.raises(install.InstallError, match="torch could not be installed"):
        install.install_torch(Path("python"), "https://mirror")


def test_a_silent_index_times_out(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "PATIENCE", 0.2)
    answered: list[bool] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()  # accepts, and never answers
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        asking = threading.Thread(target=lambda: answered.append(install.reachable(address)), daemon=True)
        asking.start()
        asking.join(300)  # without an end it would wait for ever
    assert answered == [False]


def test_a_slow_index_is_tried_again(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> SimpleNamespace:
        asked.append(url)
        if len(asked) == 1:
            raise TimeoutError
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(install, "PATIENCE", 600)
    monkeypatch.setattr(install.urllib.request, "urlopen", urlopen)
    assert install.reachable("https://mirror")
    assert asked == ["https://mirror/torch/"] * 2


# A stand-in for the environment's Python: it counts how often it is asked, and fails with these words so many times.
PIP = """#!/bin/sh
echo asked >> {folder}/asked
test $(wc -l < {folder}/asked) -gt {failures} && exit
echo "ERROR: {words}" >&2
exit 1
"""


@pytest.mark.parametrize(
    ("words", "failures", "asked", "code"),
    [
        ("", 0, 1, 0),
        ("IncompleteRead(99 bytes read, 1 more expected)", 1, 2, 0),
        ("Read timed out.", 9, 2, 1),
        ("ResolutionImpossible: for help visit the documentation", 1, 1, 1),
        ("Failed to build installable wheels", 1, 1, 1),
    ],
)
def test_pip_is_run_again_after_a_network_error(
    words: str, failures: int, asked: int, code: int, install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(PIP.format(folder=tmp_path, failures=failures, words=words))
    python.chmod(0o755)
    assert install.pip(python, "torch") == code
    assert (tmp_path / "asked").read_text() == "asked\n" * asked
    assert capsys.readouterr().err == f"ERROR: {words}\n" * min(failures, asked)


@pytest.mark.parametrize("compiler", ["g++", None])
def test_a_compilation_is_announced_before_it_begins(
    compiler: str | None,
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It takes minutes, in which nothing else is seen."""
    (tmp_path / "pyproject.toml").write_text('[build-system]\nrequires = ["tool"]\n')
    monkeypatch.setattr(install, "ROOT", tmp_path)
    calls = pip_calls(install, monkeypatch, [0, 0])
    install.install_headrace(Path("python"), [], compiler)
    assert calls == [("tool", "cmake", "ninja"), ("--no-build-isolation", "--editable", ".")]
    assert ("the C++ core is compiled" in capsys.readouterr().out) is (compiler is not None)


def test_the_compiler_is_the_one_that_was_named(install: ModuleType, tmp_path: Path) -> None:
    assert install.find_compiler({"CXX": str(tmp_path / "no-such-compiler")}) is None
    named = tmp_path / "compiler"
    named.write_text("#!/bin/sh\n")
    named.chmod(0o755)
    assert install.find_compiler({"CXX": str(named)}) == str(named)
