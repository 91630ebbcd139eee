"""Files and pairs of settings that cannot work, through the command line: one line, before a matrix of a layer is read.

Each row: what is wrong, how it is made, and the command's message. Controls: the whole model and the adapter run.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.startup import thresholds
from headrace.weights.gguf import GGUFFile
from headrace.weights.safetensors import SafetensorsFolder
from tests.cli_shell import Shell
from tests.e2e.test_adapters import KEY, change, settings, write_base
from tests.early_exits import write_exits
from tests.models.gguf_writer import write_gguf
from tests.models.zoo import oracle
from tests.tiny_adapters import write_adapter
from tests.tiny_rerankers import write_cross_encoder

Command = list[object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bad") / "base"
    return folder, write_base(folder, "llama-gqa")


@pytest.fixture(scope="module")
def exits(base: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exits(tmp_path_factory.mktemp("exits") / "exits", base[0], 1)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the matrices of layers that were read."""
    names: list[str] = []
    for kind in (GGUFFile, SafetensorsFolder):
        raw = kind.raw

        def recorded(self: Any, name: str, raw: Any = raw) -> Any:
            if "layer" in name and "lora_" not in name and len(self.info(name).shape) > 1:
                names.append(name)
            return raw(self, name)

        monkeypatch.setattr(kind, "raw", recorded)
    return names


def refused(shell: Shell, read: list[str], command: Command, says: str) -> None:
    code, out, err = shell(*command)
    assert (code, out) in ((1, ""), (2, "")), err
    *notices, error = err.splitlines()
    assert says in error
    assert error.startswith("headrace: ")
    assert not any(line.startswith("headrace: ") for line in notices), err
    assert read == []


def parts(folder: Path, name: str = "llama-gqa", tensors: int = 9) -> list[Path]:
    """A split model."""
    folder.mkdir()
    write_gguf(oracle(name), folder / "m.gguf", part_tensors=tensors)
    return sorted(folder.iterdir())


def lone_part(at: Path) -> Command:
    first, *others = parts(at / "a")
    for path in others:
        path.unlink()
    return ["run", first, "hi"]


def foreign_part(at: Path) -> Command:
    ours, theirs = parts(at / "a"), parts(at / "b", "llama-biases", 13)
    ours[1].write_bytes(theirs[1].read_bytes())
    return ["run", ours[0], "hi"]


def swapped_parts(at: Path) -> Command:
    first, second, *_ = parts(at / "a")
    second.write_bytes(first.read_bytes())
    return ["run", first, "hi"]


def configured(**changes: Any) -> Callable[[Path], Command]:
    def make(at: Path) -> Command:
        write_base(at / "m", "llama-gqa")
        config = json.loads((at / "m" / "config.json").read_text())
        (at / "m" / "config.json").write_text(json.dumps({**config, **changes}))
        return ["run", at / "m", "hi"]

    return make


def headless(at: Path) -> Command:
    write_cross_encoder(at / "m", "bert")
    tensors = load_file(at / "m" / "model.safetensors")
    del tensors["classifier.weight"]
    save_file(tensors, at / "m" / "model.safetensors", {"format": "pt"})
    return ["rerank", at / "m", "a wheel", "a mill"]


def ranker_for_text(at: Path) -> Command:
    write_cross_encoder(at / "m", "bert")
    return ["run", at / "m", "hi"]


UNKNOWN_ROPE = {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 4.0}}
FILES: dict[str, tuple[Callable[[Path], Command], str]] = {
    "a part without its siblings": (lone_part, "is missing"),
    "a part of another model": (foreign_part, "download"),
    "a part in place of another": (swapped_parts, "holds part 1 of"),
    "an unknown rope scaling": (configured(**UNKNOWN_ROPE), "the rotary scaling 'ntk'; known are"),
    "layer_types of another length": (configured(layer_types=["full_attention"]), "must have layer_types for its 3 layers"),
    "a known architecture": (configured(model_type="llama4"), "llama4 is not supported, Headrace lacks"),
    "an unknown architecture": (configured(model_type="nameless"), "unknown architecture 'nameless'; known are"),
    "a reranker without a head": (headless, "this file cannot rank"),
    "text of a reranker": (ranker_for_text, "is an encoder and cannot generate text"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_cannot_run(what: str, shell: Shell, read: list[str], tmp_path: Path) -> None:
    make, says = FILES[what]
    refused(shell, read, make(tmp_path), says)


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another base": (lambda f: change(f, lambda t: t.update({KEY.format("A"): torch.zeros(4, 32)})), "it is of another base"),
    "NaN": (lambda f: change(f, lambda t: t[KEY.format("B")].fill_(math.nan)), "NaN"),
    "rank 0": (lambda f: settings(f, r=0), "r must be a number above 0"),
    "rank above the limit": (lambda f: None, "--max-lora-rank"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_an_adapter_that_cannot_be_used(
    what: str, base: tuple[Path, Any], shell: Shell, read: list[str], tmp_path: Path
) -> None:
    damage, says = DAMAGED[what]
    damage(write_adapter(tmp_path / "a", base[1], 1))
    limit = ["--max-lora-rank", "2"] if "limit" in what else []
    refused(shell, read, ["run", base[0], "hi", "--adapter", tmp_path / "a", *limit], says)


PAIRS: dict[str, tuple[Command, str]] = {
    "exits": (["--exits", "exits"], "adapter does not go with exits: the confidence of exits was calibrated without it"),
    "a cascade": (["--cascade", "base"], "adapter does not go with cascade"),
    "offload": (["--offload"], "adapter does not go with offload"),
    "ranks": (["--tp", "2"], "--tp 2 does not run adapters"),
    "stages": (["--pp", "2"], "--pp 2 does not run adapters"),
}


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize("what", PAIRS)
def test_settings_that_do_not_go_with_an_adapter(
    what: str, command: str, base: tuple[Path, Any], exits: Path, shell: Shell, read: list[str], tmp_path: Path
) -> None:
    """Refused once, when the model is opened, by the command and by the server."""
    options, says = PAIRS[what]
    adapter = write_adapter(tmp_path / "a", base[1], 1)
    given = [base[0] if option == "base" else exits if option == "exits" else option for option in options]
    text: Command = ["hi"] if command == "run" else ["--port", "0"]
    refused(shell, read, [command, base[0], *text, "--adapter", adapter, *given], says)


@pytest.mark.parametrize("command", ["run", "serve"])
def test_calibrated_exits_do_not_go_with_an_adapter(
    command: str, base: tuple[Path, Any], exits: Path, shell: Shell, read: list[str], tmp_path: Path
) -> None:
    """Refused although the thresholds are calibrated for this model. Control: it runs with them and without the adapter."""
    place, prompts = tmp_path / "calibrated", tmp_path / "prompts.txt"
    shutil.copytree(exits, place)
    prompts.write_text("\n".join(f"line {number}" for number in range(6)))
    given = ("--exits", place, "--threads", "1")
    code, _, err = shell("calibrate", base[0], *given, "-i", prompts, "-m", "4", "--delta", "0.9")
    assert code == 0, err
    (rule,) = thresholds.load(place)
    code, _, err = shell("run", base[0], "hi", "--raw", "-m", "2", *given)
    assert code == 0, err
    assert f"calibrated: {rule.summary()}" in " ".join(err.split())
    read.clear()
    adapter = write_adapter(tmp_path / "a", base[1], 1)
    text: Command = ["hi"] if command == "run" else ["--port", "0"]
    refused(shell, read, [command, base[0], *text, *given, "--adapter", adapter], PAIRS["exits"][1])


def test_the_same_model_and_adapter_run(base: tuple[Path, Any], shell: Shell, read: list[str], tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base[1], 1)
    code, _, err = shell("run", base[0], "hi", "--raw", "--adapter", adapter, "--max-tokens", "2", "--threads", "1")
    assert code == 0, err
    assert len(read) > 20
