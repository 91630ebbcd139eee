"""Digest of all that decides the bits of a model's outputs: a begun output may go on in another process only if it has the
same digest."""

import hashlib
from pathlib import Path

from headrace import __version__
from headrace.data.settings import ModelSettings
from headrace.weights import hub


def bits_digest(model: Path, settings: ModelSettings, numbers: str) -> str:
    """Digest of program version, settings, model files and number formats (`numbers`: back end and dtype, as loaded).

    A file is identified by name, size and time of change. Empty, which equals no other, if a file cannot be found any more.
    """
    try:
        others = [hub.resolve(str(one), download=False) for one in (settings.amateur, settings.cascade) if one is not None]
        folders = [] if settings.exits is None else [Path(settings.exits)]
        facts = [__version__, numbers, repr(settings)]
        for path in (model, *others, *folders):
            for file in [path] if path.is_file() else sorted(path.iterdir()):
                state = file.stat()
                facts.append(f"{file} {state.st_size} {state.st_mtime_ns}")
    except (OSError, ValueError):
        return ""
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
