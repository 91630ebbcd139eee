"""The process a chat template is rendered in: started, asked, and ended when it uses more than it may."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("template_worker.py")
KEPT_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")
PATIENCE = 180.0  # seconds of the clock, beyond the CPU limit: a start on a busy machine is no fault of the template


def worker_environment() -> dict[str, str]:
    """What a confined process inherits: where its libraries are, and no secrets."""
    environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return environment


class TemplateError(ValueError):
    """A chat that cannot become a prompt; one line that says what to change."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What a template may use. On systems without POSIX limits only the clock bounds time and memory."""

    source: int = 256 << 10  # characters
    output: int = 8 << 20  # characters
    seconds: float = 2.0  # CPU time of one rendering
    memory: int = 512 << 20  # bytes of address space


class TemplateProcess:
    """One process of template_worker.py. Raises TemplateError."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.owner = os.getpid()
        self._limits = limits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-B", str(WORKER), str(limits.memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=worker_environment(),
                start_new_session=True,  # Ctrl-C is for the program, not for this process
            )
        except OSError as error:
            raise TemplateError(f"cannot start the process that renders chat templates: {error.strerror or error}") from None
        self.stop = weakref.finalize(self, _stop, self._process)

    def ask(self, line: bytes) -> dict[str, str]:
        """One request, one reply: {"text"} or {"error"}. After an exception the process is no longer usable."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        clock = threading.Timer(PATIENCE + 10 * self._limits.seconds, process.kill)
        clock.daemon = True
        clock.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        finally:
            clock.cancel()
        if not reply.endswith(b"\n"):
            raise TemplateError(self._why_ended(process.wait()))
        answer: dict[str, str] = json.loads(reply)
        return answer

    def _why_ended(self, code: int) -> str:
        limits = self._limits
        if code in (-getattr(signal, "SIGPROF", 0), -signal.SIGKILL):
            why = f"it takes more than {limits.seconds:g} s and may loop without end"
        else:
            why = f"its process ended early (code {code}); it may need more than {limits.memory >> 20} MiB"
        return f"chat template: {why}; use another template"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
