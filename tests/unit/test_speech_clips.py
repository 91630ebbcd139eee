"""The list of recordings that `benchmarks.peers.speech` reads."""

import json
from pathlib import Path

import pytest

from benchmarks.peers.speech import errors, read_clips


def write(folder: Path, *entries: dict[str, str]) -> Path:
    (folder / "a.wav").write_bytes(b"")
    (folder / "long.wav").write_bytes(b"")
    (folder / "clips.json").write_text(json.dumps(entries))
    return folder / "clips.json"


def test_joined_recordings_are_groups_of_their_own(tmp_path: Path) -> None:
    one = {"file": "a.wav", "lang": "fr", "text": "Bonjour."}
    clips = read_clips(write(tmp_path, one, {**one, "file": "long.wav", "source": "joined"}))
    assert [clip.group for clip in clips] == ["fr", "long"]
    edits = errors(clips, ["bonjour", "bonsoir"])
    assert [edits["fr"][0].edits, edits["long"][0].edits] == [0, 1], "case and full stops are no errors, words are"


def test_an_entry_without_a_text_or_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="entry 1 lacks text"):
        read_clips(write(tmp_path, {"file": "a.wav", "lang": "fr"}))
    with pytest.raises(ValueError, match=r"entry 1: no file .*b\.wav"):
        read_clips(write(tmp_path, {"file": "b.wav", "lang": "fr", "text": ""}))
