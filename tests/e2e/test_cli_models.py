"""The commands pull, list, show, rm and inspect: exit codes, one-line errors, no leftover files."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import close_session
from safetensors.numpy import save_file

from headrace.cli.app import main
from headrace.weights import fetch
from tests.hub_server import HubServer, sha256
from tests.wheelhouse import pip_environment

ROOT = Path(__file__).parents[2]
MODELS = Path(os.environ.get("HEADRACE_TEST_MODELS") or Path.home() / ".cache" / "headrace-test-models")
BODY = bytes(range(256)) * 1200
SECONDS = 600  # after which a child that should have ended has not
REPO, FILE = "maker/tiny-GGUF", "tiny.gguf"

CATALOG = f"""
[[model]]
name = "tiny"
description = "for tests"
licence = "MIT"
file = "{FILE}"
sha256 = "{sha256(BODY)}"
size = {len(BODY)}
sampling = {{ temperature = 0.5 }}
[[model.source]]
hub = "{REPO}"
"""


class Shell:
    """Runs `headrace`: in this process, or with `start` in one of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = folder / "cache"
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str, answer: str = "") -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        code = main(arguments)
        out, err = self._capsys.readouterr()
        return code, out, err

    def start(self, *arguments: str, **more: str) -> "subprocess.Popen[str]":
        return self._begin(["-m", "headrace"], arguments, more)

    def start_patiently(self, *arguments: str) -> "subprocess.Popen[str]":
        """The same, for a download that is held up."""
        code = f"from headrace.weights import fetch; fetch.STALL = {SECONDS}\nfrom headrace.cli.app import main; exit(main())"
        return self._begin(["-c", code], arguments, {})

    @staticmethod
    def _begin(how: list[str], arguments: Sequence[str], more: dict[str, str]) -> "subprocess.Popen[str]":
        command = [sys.executable, *how, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **more}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    def files(self) -> list[str]:
        root = self.home / "models"
        return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and ".locks" not in path.parts)


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer({REPO: {FILE: BODY}}) as running:
        yield running


@pytest.fixture
def headrace(tmp_path: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    config = tmp_path / "config" / "headrace"
    config.mkdir(parents=True)
    (config / "mine.toml").write_text(CATALOG)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HEADRACE_LOG", "HEADRACE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    settings = {
        "HOME": str(tmp_path / "home"),
        "HEADRACE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HF_ENDPOINT": server.url,
        "HF_HUB_ETAG_TIMEOUT": str(SECONDS),  # this hub answers, however long a busy machine makes it wait
        "NO_PROXY": "127.0.0.1,localhost",
        **pip_environment(tmp_path / "wheels"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetch, "STALL", SECONDS)
    close_session()
    return Shell(tmp_path, monkeypatch, capsys)


def test_from_pull_to_rm(headrace: Shell) -> None:
    code, out, err = headrace("list")
    assert code == 0
    assert "tiny\t307.2 kB\tMIT\tavailable\tfor tests" in out.splitlines()

    code, out, err = headrace("pull", "tiny")
    assert code == 0
    path = Path(out.strip())
    assert path.read_bytes() == BODY
    assert "licence MIT" in err
    assert "100 %" in err
    assert "\x1b" not in err, "no bar where there is no terminal"

    code, out, err = headrace("show", "tiny")
    assert code == 0
    assert str(path) in out
    assert sha256(BODY) in out
    assert "temperature=0.5" in out
    assert "tiny\t307.2 kB\tMIT\tinstalled\tfor tests" in headrace("list")[1].splitlines()

    code, out, err = headrace("rm", "tiny", answer="n\n")
    assert (code, path.exists()) == (1, True)
    code, out, err = headrace("rm", "tiny", answer="y\n")
    assert (code, headrace.files()) == (0, [])
    code, out, err = headrace("rm", "--yes", "tiny")
    assert code == 1
    assert err == "headrace: tiny is not on this machine; headrace list shows what is\n"


def test_a_repository_of_the_hub_is_listed_and_removed_by_its_name(headrace: Shell) -> None:
    assert headrace("pull", f"{REPO}:{FILE}")[0] == 0
    assert any(line.startswith(f"{REPO}:{FILE}\t") for line in headrace("list")[1].splitlines())
    assert headrace("rm", "-y", f"{REPO}:{FILE}")[0] == 0
    assert headrace.files() == []


def test_ctrl_c_keeps_a_partial_file_for_the_next_pull(headrace: Shell, server: HubServer) -> None:
    server.hold_after = 200_000
    process = headrace.start_patiently("pull", "tiny")
    folder = headrace.home / "models" / ".tiny.partial"
    # All that comes has come; the last of it need not be on the disk yet.
    while sum(path.stat().st_size for path in folder.glob("*")) < server.hold_after - io.DEFAULT_BUFFER_SIZE:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-2:] == ["tiny: stopped; the same command continues", "headrace: interrupted"]
    (partial,) = headrace.files()
    assert partial.startswith(f".tiny.partial/{FILE}.")
    size = (headrace.home / "models" / partial).stat().st_size
    assert 0 < size <= 200_000
    assert "so far" in headrace("list")[1]

    server.release.set()
    server.log.clear()
    code, out, err = headrace("pull", "tiny")
    assert code == 0
    assert Path(out.strip()).read_bytes() == BODY
    assert [range_ for _, range_ in server.downloads()] == [f"bytes={size}-"]
    assert headrace.files() == ["tiny/.headrace.json", f"tiny/{FILE}"]


def test_a_wrong_hash_is_a_one_line_error_and_leaves_an_empty_store(headrace: Shell, server: HubServer) -> None:
    server.served_instead[FILE] = BODY[::-1]
    code, out, err = headrace("pull", "tiny")
    assert (code, out) == (1, "")
    assert "has the wrong hash and was deleted" in err.splitlines()[-1]
    assert headrace.files() == []


@pytest.mark.parametrize(
    ("arguments", "code", "clue"),
    [
        (("pull",), 2, "Missing argument"),
        (("pull", "--colour", "tiny"), 2, "--colour"),
        (("lits",), 2, "Did you mean 'list'?"),
        (("pull", "tinny"), 1, "did you mean tiny?"),
        (("pull", "--catalog", "/none.toml", "tiny"), 2, "/none.toml"),
        (("show", "nothing"), 1, "'nothing' is neither a model of the catalog nor a path"),
        (("show", "./mill.gguf"), 1, "there is no file or folder ./mill.gguf"),
        (("pull", "./mill.gguf"), 1, "there is no file or folder ./mill.gguf"),
        (("run", "./mill.gguf", "hi"), 1, "there is no file or folder ./mill.gguf"),
        (("run", "~/no/mill", "hi"), 1, "there is no file or folder ~/no/mill"),
        (("rm", ".."), 1, "not a valid name of a model"),
        (("inspect", "tiny"), 1, "headrace pull tiny"),
        (("inspect", "/none.gguf"), 1, "there is no file or folder"),
    ],
)
def test_invalid_arguments_are_a_one_line_error(arguments: tuple[str, ...], code: int, clue: str, headrace: Shell) -> None:
    found, out, err = headrace(*arguments)
    assert (found, out) == (code, "")
    assert err.startswith("headrace: ")
    assert clue in err
    assert len(err.splitlines()) == 1


def test_a_broken_catalog_of_the_user_is_named(headrace: Shell, tmp_path: Path) -> None:
    file = tmp_path / "config" / "headrace" / "other.toml"
    file.write_text("[[model]")
    code, _, err = headrace("list")
    assert code == 1
    assert err.startswith(f"headrace: {file}: ")
    assert len(err.splitlines()) == 1


def test_log_level(headrace: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG", "loud")
    code, out, err = headrace("list")
    assert (code, out) == (2, "")
    assert "set it to one of debug, info, warning, error" in err
    monkeypatch.setenv("HEADRACE_LOG", "DEBUG")
    assert headrace("list")[0] == 0
    assert logging.getLogger("headrace").level == logging.DEBUG


def test_debug_shows_the_traceback(headrace: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in headrace("rm", "nothing")[2]
    monkeypatch.setenv("HEADRACE_DEBUG", "1")
    assert "Traceback" in headrace("rm", "nothing")[2]


def test_a_bug_is_a_one_line_error(headrace: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.models.Store", lambda: {}["gone"])
    code, _, err = headrace("list")
    assert code == 1
    assert err == "headrace: KeyError: 'gone' (a bug in Headrace; HEADRACE_DEBUG=1 shows where)\n"


def test_help_and_version(headrace: Shell) -> None:
    code, version, _ = headrace("--version")
    assert (code, version.split()[0]) == (0, "headrace")
    code, out, _ = headrace("--help")
    assert code == 0
    for word in ("pull", "list", "show", "rm", "inspect", "Exit codes", "HEADRACE_HOME", "--install-completion"):
        assert word in out
    assert headrace() == (0, out, "")


def test_the_module_is_the_command(headrace: Shell) -> None:
    out, err = headrace.start("lits").communicate(timeout=SECONDS)
    assert out == ""
    assert "Did you mean 'list'?" in err


def test_a_closed_pipe_is_no_crash(headrace: Shell) -> None:
    process = headrace.start("list")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (1, "")


def test_the_shell_completes_names_of_models(headrace: Shell) -> None:
    words = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": "headrace show tin", "COMP_CWORD": "2"}
    assert headrace.start(**words).communicate(timeout=SECONDS)[0].split() == ["tiny"]


CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 16,
}


def test_inspect_of_a_folder(headrace: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}\x1b[2J\n"}))
    save_file({"embed": np.zeros((16, 8), np.float32), "head": np.zeros((16, 8), np.float16)}, folder / "model.safetensors")
    code, out, err = headrace("inspect", "--json", str(folder))
    assert (code, err) == (0, "")
    found = json.loads(out)
    expected = {"architecture": "llama", "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 2, "context_length": 64}
    assert {key: found[key] for key in expected} == expected
    assert found["types"] == {"F32": 1, "F16": 1}
    assert (found["parameters"], found["bytes"]) == (256, 16 * 8 * 6)
    core = {"int8": 2 * 2 * (2 * 16 + 8), "int4": 2 * 2 * (16 + 12)}  # heads padded to 16, with their scales
    assert found["kv_bytes_per_token"] == {"float16": 2 * 2 * 2 * 2 * 2, "float32": 2 * 2 * 2 * 2 * 4, **core}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "kv_share": 2}))
    shared = json.loads(headrace("inspect", "--json", str(folder))[1])["kv_bytes_per_token"]
    assert shared == {name: size // 2 for name, size in found["kv_bytes_per_token"].items()}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    code, out, _ = headrace("inspect", "--tensors", str(folder))
    assert code == 0
    assert "KV per token:    32 bytes in 16 bit, 64 in 32 bit, 160 in int8, 112 in int4" in out.splitlines()
    assert "embed\tF32\t16 × 8\t512" in out.splitlines()
    assert headrace("inspect", "--template", str(folder))[1] == "{{ messages }}\\x1b[2J\n\n", (
        "what steers a terminal is shown, not done"
    )


@pytest.mark.weights
def test_inspect_of_a_real_file(headrace: Shell) -> None:
    file = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        pytest.skip(f"{file} is not here; HEADRACE_TEST_MODELS names the folder")
    found = json.loads(headrace("inspect", "--json", str(file))[1])
    assert found["types"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert found["kv_bytes_per_token"]["float16"] == 2 * 30 * 3 * 64 * 2
    expected = {"architecture": "llama", "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "context_length": 8192}
    assert {key: found[key] for key in expected} == expected
    assert (found["tokenizer"], found["vocab_size"]) == ("gpt2 smollm", 49152)
    assert found["chat_template"].startswith("{% for message in messages %}")
