"""The C++ core: `core()` where it was built, else a line that says what to install."""

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


class NativeError(RuntimeError):
    """The native core is not there."""


def available() -> bool:
    """Whether the native core was built for this Python."""
    return _CORE is not None


def reason() -> str:
    """Why there is no native core and what to do about it, one line; empty when there is one."""
    if available():
        return ""
    if any(shutil.which(name) for name in COMPILERS):
        return f"the native core is not built ({_PROBLEM}); install headrace again, pip install -v shows what went wrong"
    return (
        "the native core is not built: no C++ compiler; install one (Debian, Ubuntu: g++; Fedora: gcc-c++) and headrace again"
    )


def module() -> ModuleType:
    """The module `headrace.core._core`. Raises NativeError with `reason()` where it is missing."""
    if _CORE is None:
        raise NativeError(reason())
    return _CORE


def processors() -> int:
    """How many processors' time this process may use: the cores of its affinity mask, no more than the control group's quota;
    where there is no core, as many as there are."""
    return int(module().cpu_info()["threads"]) if available() else os.cpu_count() or 1


if not available():
    logging.getLogger("headrace").warning("SLOW: %s. Going on in torch.", reason())
