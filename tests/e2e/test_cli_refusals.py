"""Settings that cannot work are refused before a model is loaded and without torch, whose import takes seconds."""

from pathlib import Path

import pytest

from tests.cli_shell import Shell

WITHOUT_TORCH = "sys.modules['torch'] = None  # its import raises ImportError"
SETTINGS = [
    ("--device cuda", "device cuda: this machine has no GPU; use --device cpu"),
    ("--quantize int3", "quantize must be int8 or int4, not 'int3'"),
    ("--max-model-len 999999", "--max-model-len 999999 is larger than the model's context"),
    ("--dtype f9", "unknown dtype 'f9'"),
    ("--kv-dtype int9", "unknown --kv-dtype 'int9'"),
    ("--backend abacus", "unknown backend 'abacus'"),
    ("--activations row", "activations must be"),
    ("--kv-cache-memory 3Q", "'3Q' is not a size"),
    ("--speculate guess", "unknown speculation 'guess'"),
    ("--draft-tokens 99", "--draft-tokens must be between 1 and 16, not 99"),
]


@pytest.mark.parametrize("command", ["run MODEL hi", "serve MODEL --port 0"])
@pytest.mark.parametrize(("setting", "message"), SETTINGS, ids=[one for one, _ in SETTINGS])
def test_a_bad_setting_is_refused_before_loading(
    command: str, setting: str, message: str, shell: Shell, tiny_gguf: Path
) -> None:
    hide_gpus = "import headrace.startup.loading; headrace.startup.loading.GPUS = ()" if "cuda" in setting else ""
    arguments = command.replace("MODEL", str(tiny_gguf)).split() + setting.split()
    done = shell.forked(*arguments, before=f"{WITHOUT_TORCH}\n{hide_gpus}")
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[-1].startswith(f"headrace: {message}")
    assert not any(line.startswith(("loading", "tiny on")) for line in lines), done.stderr


@pytest.mark.parametrize("out", ["out.gguf", "out"])
def test_an_unknown_format_of_compress_is_refused_without_torch(out: str, shell: Shell, tiny_gguf: Path) -> None:
    done = shell.forked("compress", tiny_gguf, "-o", shell.folder / out, "-f", "Q9", before=WITHOUT_TORCH)
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: unknown format 'Q9'"), done.stderr


def test_serve_takes_its_model_from_the_command_line_or_a_file(shell: Shell) -> None:
    code, out, err = shell("serve")
    assert (code, out) == (2, "")
    assert "there is no model; give MODEL, --models-dir, or --config with a model" in err
    assert "[MODEL]" in shell("serve", "--help")[1]
    empty = shell.folder / "empty.toml"
    empty.write_text("port = 0\n")
    assert "there is no model; give MODEL" in shell("serve", "--config", empty)[2]
