"""Damaged or hostile folders of trained parts: one clear line that names the folder."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.runner.classifier import ExitClassifiers
from headrace.startup import classifier as classifiers
from headrace.startup import heads, thresholds
from headrace.startup.opening import Opened, open_model
from tests.cli_shell import Shell
from tests.early_exits import write_exits
from tests.tiny_bert import HIDDEN, LAYERS, write_tiny_bert
from tests.tiny_files import write_tiny_gguf

Load = Callable[[Path, Opened], Any]
WRONG: list[Any] = [None, [], {}, "x", -1, 0, 1.5, True, 10**500, ["\n"], [10**500], [[]], "x\n" * 1000]
# What is for people alone, or has a default.
HARMLESS = {"model", "trained", "version", "prompts"}  # prompts: missing in folders of earlier versions
DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {"heads": write_tiny_gguf(place / "tiny.gguf"), "classifier": write_tiny_bert(place / "bert")}


@pytest.fixture(scope="module", params=["heads", "classifier"])
def whole(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> "Whole":
    place, kind = tmp_path_factory.mktemp("whole"), request.param
    model = models[kind]
    if kind == "heads":
        write_exits(place, model)
        return Whole(place, model, heads.load, heads.HEADS_INFO, heads.WEIGHTS)
    rng, labels = np.random.default_rng(3), ("bad", "fine")
    made = ExitClassifiers((1, LAYERS), labels, "mean", rng.normal(size=(2, 2, HIDDEN)), np.zeros((2, 2)))
    classifiers.save(
        place, made, open_model(model), {}, [classifiers.ClassifierThreshold("max_prob", 0.5, 0.1, 0.05, "hb", 100, 0.02, 2.0)]
    )
    return Whole(place, model, classifiers.load, classifiers.INFO, classifiers.WEIGHTS)


class Whole:
    """A folder that loads, and how."""

    def __init__(self, place: Path, model: Path, load: Load, info: str, weights: str) -> None:
        self.place, self.model, self.info, self.weights = place, model, info, weights
        self._load, self._opened = load, open_model(model)

    def copied(self, to: Path) -> Path:
        shutil.copytree(self.place, to, dirs_exist_ok=True)
        return to

    def error_of(self, place: Path) -> str:
        """What is said of a folder; empty where it loads. Anything but a ValueError is a failure of the test."""
        try:
            self._load(place, self._opened)
        except ValueError as error:
            return str(error)
        return ""


def is_clear(line: str, place: Path) -> bool:
    return str(place) in line and len(line.splitlines()) == 1 and len(line) < 600


def changed(info: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in info:
        yield name, {key: value for key, value in info.items() if key != name}
        yield from ((name, info | {name: value}) for value in WRONG if value != info[name])


def test_every_invalid_field_is_reported(whole: Whole, tmp_path: Path) -> None:
    place = whole.copied(tmp_path / "a")
    assert whole.error_of(place) == ""
    info = json.loads((place / whole.info).read_text())
    accepted = set()
    for name, given in changed(info):
        (place / whole.info).write_text(json.dumps(given))
        if line := whole.error_of(place):
            assert is_clear(line, place), (name, given.get(name), line)
        else:
            accepted.add(name)
    assert accepted <= HARMLESS
    (place / whole.info).write_text(json.dumps(info | {"model": "a\n\x1b[31m" * 200, "fits": "x"}))
    assert is_clear(whole.error_of(place), place)
    for data in (b"", b"{", b"[]", b"null", b"\xff", DEEP, b'{"x": ' + DEEP, b'{"model": 1' + b"0" * 5000 + b"}"):
        (place / whole.info).write_bytes(data)
        assert is_clear(whole.error_of(place), place), data[:20]


def test_every_invalid_tensor_is_reported(whole: Whole, tmp_path: Path) -> None:
    place = whole.copied(tmp_path / "a")
    file = place / whole.weights
    tensors = load_file(file)
    for name, tensor in tensors.items():
        others = [
            None, tensor[None], tensor.reshape(-1)[0].clone(), tensor.new_zeros(0), tensor.to(torch.int64),
            tensor.to(torch.bool), tensor.to(torch.float16), tensor.to(torch.float64), tensor.to(torch.float8_e4m3fn),
        ]  # fmt: skip
        if tensor.is_floating_point():
            others += [tensor[:-1], *(torch.full_like(tensor, number) for number in (torch.nan, torch.inf))]
        for other in others:
            given = {key: value for key, value in tensors.items() if key != name} | ({} if other is None else {name: other})
            save_file({key: value.contiguous() for key, value in given.items()}, file)
            line = whole.error_of(place)
            assert is_clear(line, place), (name, other, line)


def test_every_truncation_is_reported(whole: Whole, tmp_path: Path) -> None:
    place = whole.copied(tmp_path / "a")
    for name in (whole.info, whole.weights):
        data = (place / name).read_bytes()
        for size in {0, 1, 7, 8, 9, 40, len(data) // 2, len(data) - 3}:
            (place / name).write_bytes(data[:size])
            assert is_clear(whole.error_of(place), place), (name, size)
        (place / name).unlink()
        assert is_clear(whole.error_of(place), place), name
        (place / name).mkdir()
        assert is_clear(whole.error_of(place), place), name
        (place / name).rmdir()
        (place / name).write_bytes(data)
    for header in (
        b'{"a":',
        b'{"a":1}',
        DEEP,
        b'{"weight":{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,4]}}',
    ):
        (place / whole.weights).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        assert is_clear(whole.error_of(place), place), header[:20]


def test_every_invalid_rule_is_reported(whole: Whole, tmp_path: Path) -> None:
    """Thresholds beside them, which have another form each."""
    place = whole.copied(tmp_path / "a")
    rule = thresholds.CalibratedThreshold("max_prob", 0.5, 0.0, 8, "text", 0.1, 0.05, 100, 0.01, 1.5, 0.25, "0" * 64)
    file = place / thresholds.CALIBRATION
    if whole.info == heads.HEADS_INFO:
        thresholds.save(place, rule)
    (known,) = json.loads(file.read_text())

    def rule_error() -> str:
        if whole.info != heads.HEADS_INFO:
            return whole.error_of(place)
        try:
            thresholds.load(place)
        except ValueError as error:
            return str(error)
        return ""

    assert rule_error() == ""
    for _, given in changed(known):  # some may be: another loss, another n
        file.write_text(json.dumps([given]))
        line = rule_error()
        assert is_clear(line, place) or not line, (given, line)
    for text in ("", "{", "[1]", "null", '[{"x": ' + DEEP.decode(), DEEP.decode()):
        file.write_text(text)
        assert is_clear(rule_error(), place), text[:20]
    for name in ("criterion", "threshold"):
        for value in ("x", "x\n" * 1000, -1, 10**400):
            file.write_text(json.dumps([known | {name: value}]))
            assert is_clear(rule_error(), place), (name, value)


def test_commands_report_damage_in_one_line(whole: Whole, shell: Shell, tmp_path: Path) -> None:
    place = whole.copied(tmp_path / "a")
    tensors = load_file(place / whole.weights)
    save_file(tensors | {next(iter(tensors)): torch.zeros(3, dtype=torch.float8_e4m3fn)}, place / whole.weights)
    ways = [("classify", "-c", place, "a")]
    if whole.info == heads.HEADS_INFO:
        ways = [("run", f"--{role}", place, "a", "--raw") for role in ("exits", "draft")]
        ways.append(("calibrate", "--exits", place, "-i", whole.model))
    for command, *more in ways:
        code, _, said = shell(command, whole.model, *more, "--threads", "1")
        assert code in (1, 2), said
        last = [line for line in said.splitlines() if line.startswith("headrace: ")]
        assert len(last) == 1, said
        assert "a bug in Headrace" not in said, said
