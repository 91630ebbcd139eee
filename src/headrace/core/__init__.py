"""The compiled C++ core: `module()` if it was built, otherwise `reason()` with the package to install."""

import importlib
import logging
import os
import shutil
from types import ModuleType

try:
    _CORE: ModuleType | None = importlib.import_module("headrace.core._core")
    _PROBLEM = ""
except ImportError as error:
    _CORE, _PROBLEM = None, str(error)

COMPILERS = ("c++", "g++", "clang++")


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


def order_of_sums() -> str:
    """Name of the order in which bfloat16 products are summed: "amx", "amxall", or "common" of the other instruction sets."""
    isa = module().cpu_info()["isa"] if available() else ""
    return isa if isa in ("amx", "amxall") else "common"


def processors() -> int:
    """Number of CPUs that this process may use: its affinity mask, limited by the control group's quota. Without the compiled
    core, all CPUs of the machine."""
    return int(module().cpu_info()["threads"]) if available() else os.cpu_count() or 1


if not available():
    logging.getLogger("headrace").warning("SLOW: %s. Going on in torch.", reason())
