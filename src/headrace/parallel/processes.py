"""Processes of this package that another one starts: an engine, a rank, a stage."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SECRETS = ("HEADRACE_API_KEY",)  # environment variables that they do not get


def start_module(module: str, arguments: Sequence[int], descriptors: Sequence[int], **more: Any) -> "subprocess.Popen[bytes]":
    """Start `python -m MODULE ARGUMENTS` with this process's import paths and open `descriptors`, but without its keys.

    It leads a session of its own, so a Ctrl-C does not reach it. more: arguments of Popen. Raises OSError.
    """
    environment = {name: value for name, value in os.environ.items() if name not in SECRETS}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        env=environment,
        **{"start_new_session": True, **more},
    )


def ending(code: int) -> str:
    """How a process with this return code ended."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
