"""The compiled C++ core: `module()` if it was built, otherwise `reason()` with the package to install."""

import importlib
import logging
import os
import platform
import shutil
from types import ModuleType

try:
    _CORE: ModuleType | None = importlib.import_module("headrace.core._core")
    _PROBLEM = ""
except ImportError as error:
    _CORE, _PROBLEM = None, str(error)

COMPILERS = ("c++", "g++", "clang++")
# Fused multiply-add, and no bfloat16 products of the CPU, which add the softmax weights of bfloat16 K/V in another order.
FUSED = ("avx512vnni", "avxvnni", "avx2", "neon", "i8mm")


def available() -> bool:
    """Whether the core was built for this Python."""
    return _CORE is not None


def reason() -> str:
    """Why the core is missing and how to install it, one line; empty if it is available."""
    if available():
        return ""
    if any(shutil.which(name) for name in COMPILERS):
        return f"the native core is not built ({_PROBLEM}); install headrace again, pip install -v shows what went wrong"
    return (
        "the native core is not built: no C++ compiler; install one (Debian, Ubuntu: g++; Fedora: gcc-c++) and headrace again"
    )


def module() -> ModuleType:
    """The extension module `headrace.core._core`. Raises RuntimeError with `reason()` if it is missing."""
    if _CORE is None:
        raise RuntimeError(reason())
    return _CORE


def order_of_sums(isa: str = "") -> str:
    """Name of the way in which sums round on an instruction set, by default the one that the core uses. Instruction sets with
    the same name give a model the same bits; two names may give other bits. Empty without the core."""
    isa = isa or (module().cpu_info()["isa"] if available() else "")
    plain_fuses = platform.machine() in ("aarch64", "arm64")
    return "fused" if isa in FUSED or (isa == "plain" and plain_fuses) else isa


def processors() -> int:
    """Number of CPUs that this process may use: its affinity mask, limited by the control group's quota. Without the compiled
    core, all CPUs of the machine."""
    return int(module().cpu_info()["threads"]) if available() else os.cpu_count() or 1


if not available():
    logging.getLogger("headrace").warning("SLOW: %s. Going on in torch.", reason())
