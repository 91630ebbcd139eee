"""Truncated, corrupted and hostile GGUF files: one clear line each, nothing else."""

import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch

from headrace.weights.gguf import GGUFFile
from headrace.weights.gguf_metadata import Cursor
from headrace.weights.loader import read_tensor
from headrace.weights.source import WeightError
from tests.unit.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    INT32,
    Q4_0,
    STRING,
    UINT8,
    UINT32,
    array,
    damaged,
    gguf,
    key,
    sample,
    tensor,
    text,
)

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack

HOSTILE = {
    "empty file": (b"", "the file is empty"),
    "another format": (b"PK\3\4" + bytes(64), "is not a GGUF file"),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer"),
    "only the magic": (b"GGUF", "needs 4 bytes and 0 are left"),
    "version 1": (gguf(version=1), "version 1 and only 2 and 3"),
    "version 4": (gguf(version=4), "version 4 and only 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge number of keys": (gguf(num_keys=2**63), "claims 9223372036854775808 metadata keys"),
    "more keys than there are": (gguf(num_keys=1000), "truncated or damaged"),
    "huge number of tensors": (gguf(num_tensors=2**64 - 1), "claims 18446744073709551615 tensors"),
    "huge key": (gguf([U64(2**40) + b"k"], num_keys=1), "1099511627776 bytes long"),
    "huge string": (gguf([key("k", STRING, U64(2**63) + b"x")]), "needs 9223372036854775808 bytes"),
    "huge array of numbers": (gguf([array("k", INT32, 2**62, b"")]), "needs 18446744073709551616 bytes"),
    "huge array of strings": (gguf([array("k", STRING, 2**61, b"")]), "claims 2305843009213693952 strings"),
    "more strings than bytes": (gguf([array("k", STRING, 1000, text("a"))]), "needs 8000 bytes"),
    "string in an array leaves": (gguf([array("k", STRING, 2, U64(2**64 - 8) + text("a"))]), "a string that leaves the file"),
    "last string leaves": (gguf([array("k", STRING, 2, text("a") + U64(2**50))]), "a string that leaves the file"),
    "array of arrays": (gguf([key("k", ARRAY, U32(ARRAY) + U64(1) + U32(ARRAY) + U64(1))]), "array of arrays"),
    "unknown value type": (gguf([key("k", 13, U64(0))]), "unknown value type 13"),
    "unknown array type": (gguf([array("k", 99, 1, U64(0))]), "unknown value type 99"),
    "truth value of 2": (gguf([key("k", BOOL, b"\2")]), "neither 0 nor 1"),
    "key twice": (gguf([key("k", UINT8, b"\1"), key("k", UINT8, b"\1")]), "'k' appears twice"),
    "key not UTF-8": (gguf([key(b"\xff", UINT8, b"\1")]), "a metadata key is not UTF-8"),
    "value not UTF-8": (gguf([key("k", STRING, text(b"\xff"))]), "'k' is not UTF-8"),
    "tensor name not UTF-8": (gguf([], [tensor(b"\xff", [1])], bytes(4)), "a tensor name is not UTF-8"),
    "control characters": (gguf([key("a\nb", 13, b"")]), r"'a\\nb' has the unknown"),
    "alignment 0": (gguf([key("general.alignment", UINT32, U32(0))]), "power of two"),
    "alignment 24": (gguf([key("general.alignment", UINT32, U32(24))]), "power of two"),
    "alignment text": (gguf([key("general.alignment", STRING, text("32"))]), "power of two"),
    "alignment true": (gguf([key("general.alignment", BOOL, b"\1")]), "power of two"),
    "one part of several": (
        gguf([key("split.count", UINT32, U32(3))]),
        "one part of a split model of 3, and the others are found by their names",
    ),
    "no dimensions": (gguf([], [tensor("t", [])], bytes(4)), "has 0 dimensions"),
    "five dimensions": (gguf([], [tensor("t", [1] * 5)], bytes(4)), "has 5 dimensions"),
    "huge number of dimensions": (gguf([], [text("t") + U32(2**32 - 1)]), "has 4294967295 dimensions"),
    "zero dimension": (gguf([], [tensor("t", [4, 0])], bytes(4)), "a dimension of size 0"),
    "sizes whose product wraps": (gguf([], [tensor("t", [2**62, 4])], bytes(64)), "bytes past the end"),
    "rows of half a block": (gguf([], [tensor("t", [48], Q4_0)], bytes(64)), "needs a multiple of 32"),
    "unread type": (gguf([], [tensor("t", [256], 16)], bytes(66)), "has the type IQ2_XXS, which is not read"),
    "unknown type": (gguf([], [tensor("t", [256], 9999)], bytes(66)), "has the type number 9999"),
    "offset past the end": (gguf([], [tensor("t", [4], offset=2**40)], bytes(16)), "bytes past the end"),
    "offset that wraps": (gguf([], [tensor("t", [4], offset=2**64 - 32)], bytes(16)), "bytes past the end"),
    "offset out of line": (gguf([], [tensor("t", [4], offset=8)], bytes(64)), "not aligned to 32"),
    "one byte short": (gguf([], [tensor("t", [4])], bytes(15)), "ends 1 bytes past the end"),
    "overlap": (gguf([], [tensor("a", [16]), tensor("b", [8], offset=32)], bytes(64)), "'b' overlaps another"),
    "same place": (gguf([], [tensor("a", [8]), tensor("b", [8])], bytes(64)), "overlaps another"),
    "tensor twice": (gguf([], [tensor("a", [8]), tensor("a", [8], F32, 32)], bytes(64)), "'a' appears twice"),
    "long tensor name": (gguf([], [tensor("a" * 300, [8])], bytes(64)), "300 bytes long"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightError, match=message) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


def test_no_file_and_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="No such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(WeightError, match="Is a directory"):
        GGUFFile(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = sample()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    assert GGUFFile(path).names() == ["a", "b", "c"]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(WeightError):
            GGUFFile(path)


def use(path: Path) -> None:
    """Open a file and touch everything in it."""
    with GGUFFile(path) as file:
        for value in file.metadata.values():
            if hasattr(value, "tolist"):
                value.tolist()
        for name in file.names():
            file.raw(name).sum()
            read_tensor(file, name, torch.float32)


def fuzz(path: Path, seeds: range) -> tuple[int, list[str]]:
    """How many damaged files still opened, and what went wrong with the others beside a WeightError of one line."""
    whole = sample()
    opened, wrong = 0, []
    tracemalloc.start()
    try:
        for seed in seeds:
            path.write_bytes(damaged(whole, random.Random(seed)))
            tracemalloc.reset_peak()
            try:
                use(path)
                opened += 1
            except WeightError as error:
                if len(str(error).splitlines()) != 1 or len(str(error)) > 600:
                    wrong.append(f"seed {seed}: message {error!r}")
            except Exception as error:
                wrong.append(f"seed {seed}: {error!r}")
            if tracemalloc.get_traced_memory()[1] > 16 << 20:
                wrong.append(f"seed {seed}: allocates {tracemalloc.get_traced_memory()[1]} bytes")
    finally:
        tracemalloc.stop()
    return opened, wrong


def test_fuzz_short(tmp_path: Path) -> None:
    opened, wrong = fuzz(tmp_path / "fuzz.gguf", range(500))
    assert not wrong
    assert 0 < opened < 250  # the damage is neither harmless nor always fatal


@pytest.mark.slow
def test_fuzz_long(tmp_path: Path) -> None:
    _, wrong = fuzz(tmp_path / "fuzz.gguf", range(500, 20_500))
    assert not wrong


def test_fuzz_finds_a_reader_without_bounds_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursor, "need", lambda *_: None)
    assert fuzz(tmp_path / "fuzz.gguf", range(500))[1]
