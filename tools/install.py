#!/usr/bin/env python3
"""Install Headrace from this folder into its own virtual environment: what `make run` and `make test` do first.

    python3 tools/install.py [EXTRA]...     extras of pyproject.toml: serve, ground, docs, dev, peers

Environment: VENV (.venv), TORCH_INDEX (source of torch; docs/en/reference/environment.md). The install is editable: changing a
Python file takes effect at once, changing the C++ core after the next run. Needs the standard library alone.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
COMPILERS = ("c++", "g++", "clang++")
BUILD_TOOLS = ("cmake", "ninja")
PATIENCE = 5  # seconds to wait for an index before asking again, or doing without it
TRIES = 2  # of what the network may have spoilt
# What pip says where it would say the same again: versions that exclude each other, a build that fails.
FINAL = ("ResolutionImpossible", "No matching distribution", "subprocess-exited-with-error", "Failed to build")


class InstallError(Exception):
    """What stops the installation, and what to do about it: one line."""


def main(extras: list[str]) -> int:
    try:
        python = make_venv(ROOT / os.environ.get("VENV", ".venv"))
        compiler = find_compiler(os.environ)
        if compiler is None:
            loud("no C++ compiler: Headrace will run in torch, which is SLOW. Better: apt install g++, then make native")
        if not has_torch(python):
            install_torch(python, torch_index(os.environ, gpu=has_gpu()))
        install_headrace(python, extras, compiler)
        if compiler is not None and not has_core(python):
            loud("the native core did not build: Headrace will run in torch, which is SLOW. `make native` shows why")
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


def make_venv(folder: Path) -> Path:
    """The environment's Python; the environment is made where it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        if importlib.util.find_spec("ensurepip") is None:
            raise InstallError("this Python cannot make virtual environments; Debian, Ubuntu: apt install python3-venv")
        say(f"virtual environment {folder.name}, Python {platform.python_version()}")
        venv.create(folder, with_pip=True)
    return python


def has_gpu() -> bool:
    """Whether the NVIDIA driver sees a GPU."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).stdout.startswith(b"GPU ")


def torch_index(environment: Mapping[str, str], *, gpu: bool) -> str:
    """The package index for torch; "" is pip's own. TORCH_INDEX rules; else PyTorch's CPU index on Linux without a GPU."""
    if "TORCH_INDEX" in environment:
        return environment["TORCH_INDEX"]
    return CPU_INDEX if sys.platform == "linux" and not gpu else ""


def find_compiler(environment: Mapping[str, str]) -> str | None:
    """The C++ compiler CMake will take, or None."""
    names = (environment["CXX"],) if environment.get("CXX") else COMPILERS
    return next((path for name in names if (path := shutil.which(name))), None)


def has_torch(python: Path) -> bool:
    """Whether the environment has the torch that constraints.txt names, in whatever build."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    code = "from importlib.metadata import version; print(version('torch').split('+')[0])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return pinned is not None and done.stdout.strip() == pinned[1]


def install_torch(python: Path, index: str) -> None:
    """torch from `index`, or by its plain name where that cannot be used."""
    if index:
        say(f"torch from {index}: about 200 MB for the CPU (TORCH_INDEX names another index)")
        if reachable(index) and pip(python, "--retries", "2", "--index-url", index, "torch") == 0:
            return
        say(f"{index} cannot be used from here; going on with pip's own index")
    say("torch by its plain name: several GB where pip takes the CUDA build, about 200 MB else")
    if pip(python, "torch") != 0:
        raise InstallError("torch could not be installed; the lines above say why")


def reachable(index: str) -> bool:
    """Whether an index answers within seconds; pip itself would try for minutes. A refusal is an answer: pip reports it."""
    answers: list[bool] = []  # none: it was waited for in vain

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=PATIENCE).close()
        except urllib.error.HTTPError:
            answers.append(True)
        except (OSError, ValueError) as error:
            if not isinstance(getattr(error, "reason", error), TimeoutError):
                answers.append(False)
        else:
            answers.append(True)

    for _ in range(TRIES):
        thread = threading.Thread(target=ask, daemon=True)  # looking up a name knows no timeout of its own
        thread.start()
        thread.join(PATIENCE)
        if answers:
            return answers[0]
    return False


def install_headrace(python: Path, extras: list[str], compiler: str | None) -> None:
    """Headrace itself, editable, with its libraries. Built without isolation: with the tested tools, and only what changed."""
    say("libraries, about 70 MB" + (", and what the tests need, about 120 MB" if "dev" in extras else ""))
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    what = f".[{','.join(extras)}]" if extras else "."
    if compiler is not None:
        for old in (ROOT / "src/headrace/core").glob("_core*.so"):  # must not stand in for one that fails to build
            old.unlink()
    failed = InstallError("Headrace could not be installed; the lines above say why. The same command then goes on")
    if pip(python, *tools, *BUILD_TOOLS) != 0:
        raise failed
    if compiler is not None:
        say("the C++ core is compiled, which takes some minutes the first time")
    if pip(python, "--no-build-isolation", "--editable", what) != 0:
        raise failed


def pip(python: Path, *arguments: str) -> int:
    """pip install with the tested versions, once more where the network may have spoilt it; its progress is shown where
    somebody watches."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    options = ["--disable-pip-version-check", "-c", "constraints.txt", *quiet]
    command = [str(python), "-m", "pip", "install", *options, *arguments]
    for _ in range(TRIES):
        code, errors = run_aloud(command)
        if code == 0 or any(words in errors for words in FINAL):
            break
    return code


def run_aloud(command: list[str]) -> tuple[int, str]:
    """Run a command in this folder; its exit code, and what it wrote to stderr, which is shown as it comes."""
    errors = []
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            errors.append(line)
    return process.returncode, "".join(errors)


def has_core(python: Path) -> bool:
    """Whether the installed package has its compiled core."""
    code = "import sys, headrace.core; sys.exit(not headrace.core.available())"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def say(line: str) -> None:
    print(f"install: {line}", flush=True)


def loud(line: str) -> None:
    print(f"\n*** {line} ***\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
