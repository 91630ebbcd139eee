"""Engines held to an older CPU: a library that asks for the CPU's kind hears of no AVX-512, and everything else as it is."""

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "hold_peers.py"
SOURCE = """
#include <cpuid.h>
extern "C" void ask(unsigned leaf, unsigned sub, unsigned* out) { __cpuid_count(leaf, sub, out[0], out[1], out[2], out[3]); }
"""
ASK = """
import ctypes, sys
out = (ctypes.c_uint * 4)()
for leaf, sub in ((0, 0), (7, 0), (7, 1), (13, 0)):
    ctypes.CDLL(sys.argv[1]).ask(leaf, sub, out)
    print(*out)
"""
AVX512 = 1 << 16 | 1 << 17 | 1 << 21 | 1 << 28 | 1 << 30 | 1 << 31  # of ebx
AVX2, VNNI = 1 << 5, 1 << 4  # of ebx; of leaf 7, 1, eax

if platform.machine() != "x86_64" or not (shutil.which("g++") and shutil.which("objdump")):
    pytest.skip("needs x86-64, g++ and objdump", allow_module_level=True)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hold_peers", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_probe(library: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ASK, str(library)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def numbers(answer: subprocess.CompletedProcess[str]) -> list[list[int]]:
    assert answer.returncode == 0, answer.stderr
    return [[int(word) for word in line.split()] for line in answer.stdout.splitlines()]


def test_a_held_library_hears_of_no_avx512(tmp_path: Path) -> None:
    library, held, hold = tmp_path / "libask.so", tmp_path / "held.so", tmp_path / "hold.so"
    build = ["g++", "-O1", "-shared", "-fPIC"]
    subprocess.run([*build, "-x", "c++", "-", "-o", library], input=SOURCE, text=True, check=True)
    tool().answers(hold)
    os.link(library, held)
    assert tool().hold(held) == 1
    free = numbers(run_probe(library, LD_PRELOAD=str(hold), HEADRACE_HOLD="avx2"))
    ours = ctypes.CDLL(str(library))
    out = (ctypes.c_uint * 4)()
    ours.ask(7, 0, out)
    assert free[1][1] == out[1]  # the library itself, whose other name was changed, is as it was
    for isa in ("avx2", "avxvnni"):
        (_, (_, ebx, _, _), (eax, *_), (state, *_)) = numbers(run_probe(held, LD_PRELOAD=str(hold), HEADRACE_HOLD=isa))
        assert ebx == free[1][1] & ~AVX512 & ~(1 << 26 | 1 << 27)
        assert ebx & AVX2 == out[1] & AVX2
        assert eax & VNNI == (free[2][0] & VNNI if isa == "avxvnni" else 0)
        assert state & 0xE0 == 0
    assert numbers(run_probe(held, LD_PRELOAD=str(hold), HEADRACE_HOLD="avx2"))[0] == free[0]
    assert run_probe(held).returncode != 0  # without what answers in its place it dies
