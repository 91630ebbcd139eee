"""`python -m benchmarks.peers.speech_server` on a tiny model, whose peer is Headrace's own worker."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import engines, speech_server
from benchmarks.peers.speech import Clip
from benchmarks.peers.speech_server import choose, form, main, seconds_of
from headrace.bench.competitors import worker_command
from tests.tiny_whisper import noise, write_folder, write_wav

SECONDS = (10.0, 16.0, 15.0, 17.0, 31.0)


@dataclass
class Peer:
    """Headrace's worker in the place of another engine."""

    name: str = "peer"
    place: Path = Path()

    @property
    def command(self) -> list[str]:
        return worker_command(engines.WORKERS / "ours_speech.py")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, entries = tmp_path_factory.mktemp("clips"), []
    for number, seconds in enumerate(SECONDS):
        write_wav(folder / f"{number}.wav", np.tile(noise(0.4, number), round(seconds / 0.4) + 1)[: int(seconds * 16_000)])
        entries.append({"file": f"{number}.wav", "lang": "en", "text": "the mill turns"})
    (folder / "clips.json").write_text(json.dumps(entries))
    return folder / "clips.json"


def clip(clips: Path, number: int) -> Clip:
    return Clip(clips.parent / f"{number}.wav", "en", "the mill turns", "en")


def test_recordings_of_about_a_window_are_chosen(clips: Path) -> None:
    every = [clip(clips, number) for number in range(5)]
    assert [one.path.stem for one in choose(every, 3)] == ["1", "2", "3"]
    assert [one.path.stem for one in choose(every, 1)] == ["1"]
    with pytest.raises(ValueError, match="has 3 recordings of 15 to 30 s, not 4; lower --files"):
        choose(every, 4)


def test_each_round_has_samples_of_its_own(clips: Path) -> None:
    one = clip(clips, 1)
    assert seconds_of(one.path) == 16.0
    assert form(one, 1.0) == form(one, 1.0)
    assert form(one, 1.0) != form(one, 0.999)
    assert one.path.read_bytes()[-1000:] in form(one, 1.0)


def test_files_at_once_are_measured_in_turns(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speech_server, "peer_engine", lambda place: Peer())
    model, record = str(write_folder(tmp_path / "whisper")), tmp_path / "record.json"
    command = [model, str(clips), "--files", "2", "--rounds", "2", "--logs", str(tmp_path), "--json", str(record)]
    assert main([*command, "--quantize", ""]) == 0
    result = json.loads(record.read_text())
    assert result["files"] == ["1", "2"]
    assert {name: len(each) for name, each in result["seconds"].items()} == {"headrace": 2, "peer": 2}
    pairs = [theirs / ours for ours, theirs in zip(*(result["seconds"][name] for name in ("headrace", "peer")), strict=True)]
    assert min(pairs) <= result["ratio"]["median"] <= max(pairs)
    assert set(result["errors"]) == {"headrace", "peer"}
    assert f"{result['ratio']['median']:.2f}" in capsys.readouterr().out


def test_a_server_that_ends_is_named(clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack, pytest.raises(ValueError, match="the server ended with code 1; .* says why"):
        speech_server.serve(stack, str(tmp_path / "nothing"), "", tmp_path / "log")
