"""GGUF models that are split over several files: found by their names, checked against each other, read as one."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.startup.model_folder import models_in
from headrace.weights.gguf import GGUFFile
from headrace.weights.model_files import part_name, part_paths
from headrace.weights.source import WeightError
from tests.unit.gguf_bytes import STRING, UINT32, gguf, key, tensor, text

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a part with one tensor of four numbers, as it should be but for the arguments; return its path."""

    def written(
        number: int, *, count: int = 3, no: int | None = None, says: int | None = None, total: int = 3, name: str = ""
    ) -> Path:
        numbers = {"split.no": number - 1 if no is None else no, "split.count": says or count, "split.tensors.count": total}
        keys = [key("general.name", STRING, text("whole"))] if number == 1 else []
        keys += [key(one, UINT32, struct.pack("<I", value)) for one, value in numbers.items()]
        path = tmp_path / f"mill-{number:05d}-of-{count:05d}.gguf"
        path.write_bytes(gguf(keys, [tensor(name or f"t{number}", [4])], np.full(4, number, "<f4").tobytes()))
        return path

    return written


def test_any_part_opens_all(write: Write) -> None:
    paths = [write(number) for number in (1, 2, 3)]
    for path in paths:
        with GGUFFile(path) as file:
            assert file.path == path
            assert file.names() == ["t1", "t2", "t3"]
            assert [file.raw(name).view("<f4")[0, 0] for name in file.names()] == [1, 2, 3]
            assert file.metadata["general.name"] == "whole"
            assert file.entry("general.name").endswith(b"whole")
            file.release("t3")
            assert file.raw("t3").view("<f4")[0, 0] == 3
    assert part_paths(paths[1]) == paths


def test_one_line_for_parts_that_do_not_fit(write: Write) -> None:
    first, second, third = (write(number) for number in (1, 2, 3))

    def refused(match: str) -> None:
        with pytest.raises(WeightError, match=match) as error:
            GGUFFile(first)
        assert "\n" not in str(error.value)

    second.unlink()
    refused("part 2 of 3 is missing; put mill-00002-of-00003.gguf into the same folder")
    write(2, no=2)
    refused("00002-of-00003.gguf: holds part 3 of 3 and has the name of another")
    write(2, says=4)
    refused("00002-of-00003.gguf: holds part 2 of 4 and has the name of another")
    write(2, total=9)
    refused("00002-of-00003.gguf: belongs to a model of 9 tensors and the parts hold 3; the parts are of different models")
    write(2, name="t1")
    refused("00002-of-00003.gguf: tensor 't1' is in mill-00001-of-00003.gguf too")
    write(2)
    third.write_bytes(third.read_bytes()[:-1])
    refused("00003-of-00003.gguf: tensor 't3' ends 1 bytes past the end")
    third.write_bytes(gguf([key("split.no", STRING, text("2"))], [tensor("t3", [4])], bytes(16)))
    refused("00003-of-00003.gguf: split.no is not an integer")


@pytest.mark.parametrize(
    "name", ["mill-0001-of-0003.gguf", "mill-00004-of-00003.gguf", "mill-00000-of-00003.gguf", "mill-00001-of-99999.gguf"]
)
def test_other_names_are_those_of_whole_files(name: str) -> None:
    assert part_name(name) is None
    assert part_paths(Path(name)) == [Path(name)]


def test_a_folder_of_models_has_a_split_model_once(write: Write, tmp_path: Path) -> None:
    first, *_ = [write(number) for number in (1, 2, 3)]
    folder = models_in(tmp_path)
    assert [line.partition(" ")[0] for line in folder.skipped] == [first.name]  # without an architecture it cannot be opened
    write(2).unlink()
    assert "part 2 of 3 is missing" in models_in(tmp_path).skipped[0]
