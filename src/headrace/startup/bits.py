"""Digest of all that decides the bits of a model's outputs: a request may go on in another process only if it has the same."""

import hashlib
from pathlib import Path

from headrace import __version__
from headrace.data.settings import ModelSettings
from headrace.startup.classifier import fingerprint
from headrace.startup.opening import Opened
from headrace.weights import hub


def bits_digest(opened: Opened, settings: ModelSettings, numbers: str) -> str:
    """Digest of program version, settings, model files and number formats (`numbers`: back end and dtypes, as loaded).

    A file is identified by name, size and time of change.
    """
    others = [hub.resolve(str(one), download=False) for one in (settings.amateur, settings.cascade) if one is not None]
    folders = [] if settings.exits is None else [Path(settings.exits)]
    facts = [__version__, fingerprint(opened), numbers, repr(settings)]
    for model in (opened.path, *others, *folders):
        for file in [model] if model.is_file() else sorted(model.iterdir()):
            state = file.stat()
            facts.append(f"{file} {state.st_size} {state.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
