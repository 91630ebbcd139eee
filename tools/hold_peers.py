#!/usr/bin/env python3
"""Hold the engines that Headrace is measured against to an older CPU's instructions, to compare both as on such a CPU.

    .venv/bin/python tools/hold_peers.py avx2 HOME        avx2 or avxvnni; HOME: a new folder
    HEADRACE_HOME=HOME HEADRACE_ISA=avx2 HEADRACE_HOLD=avx2 LD_PRELOAD=HOME/hold.so python -m benchmarks.peers MODEL

Copies `$HEADRACE_HOME/peers` as `python -m benchmarks.peers --install` made it (links, where nothing changes). In the copies of
their libraries each `cpuid` is replaced by two bytes that no CPU knows; what is preloaded answers in its place
(hold_peers.cpp), without AVX-512, and for `avx2` without VNNI. Needs g++ and objdump. Clock, caches and memory stay this
machine's.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from headrace.weights.store import home

SOURCE = Path(__file__).with_suffix(".cpp")
CPUID, UNKNOWN = b"\x0f\xa2", b"\x0f\x0a"
LIBRARIES = re.compile(r"onnxruntime|openvino|tbb")  # that choose kernels
INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\s+cpuid\b", re.MULTILINE)
SECTION = re.compile(r"^ *\d+ (\.\S+) +([0-9a-f]+) +([0-9a-f]+) +[0-9a-f]+ +([0-9a-f]+) ", re.MULTILINE)


def main(isa: str, place: Path) -> None:
    engines = [folder for folder in (home() / "peers").iterdir() if (folder / "bin" / "python").exists()]
    if not engines:
        raise SystemExit("no engine is installed: python -m benchmarks.peers MODEL --install makes them")
    (place / "peers").mkdir(parents=True)
    (place / "peers" / "models").symlink_to(home() / "peers" / "models")
    for engine in engines:
        copy = place / "peers" / engine.name
        subprocess.run(["cp", "-al", engine, copy], check=True)
        for library in copy.rglob("*.so*"):
            if LIBRARIES.search(library.name) and library.is_file():
                print(f"{library.relative_to(place)}: {hold(library)} of cpuid", flush=True)
    answers(place / "hold.so")
    variables = f"HEADRACE_HOME={place} HEADRACE_ISA={isa} HEADRACE_HOLD={isa} LD_PRELOAD={place}/hold.so"
    print(f"{variables} python -m benchmarks.peers MODEL")


def answers(library: Path) -> None:
    """Build what is preloaded."""
    subprocess.run(["g++", "-O2", "-std=c++17", "-shared", "-fPIC", "-o", library, SOURCE], check=True)


def hold(library: Path) -> int:
    """Replace each `cpuid` in a library, in a file of its own; how many there were."""
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    places = [int(address, 16) for address in INSTRUCTION.findall(listing.stdout)]
    if not places:
        return 0
    headers = subprocess.run(["objdump", "-h", library], capture_output=True, text=True, check=True).stdout
    sections = [tuple(int(value, 16) for value in numbers) for _, *numbers in SECTION.findall(headers)]
    image = bytearray(library.read_bytes())
    for address in places:
        begin = next(offset - start for size, start, offset in sections if start <= address < start + size)
        if image[address + begin : address + begin + 2] != CPUID:
            raise SystemExit(f"{library}: no cpuid at {address:#x}")
        image[address + begin : address + begin + 2] = UNKNOWN
    mode = library.stat().st_mode
    library.unlink()  # the other name of this file is the engine's own
    library.write_bytes(image)
    library.chmod(mode)
    return len(places)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("avx2", "avxvnni"):
        raise SystemExit(__doc__)
    for program in ("objdump", "g++"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not here: on Debian, apt install binutils g++")
    main(sys.argv[1], Path(sys.argv[2]).absolute())
