"""Digest of a model's files, by which two hosts compare them."""

import hashlib
from pathlib import Path

from headrace.weights.model_files import CTRANSLATE2, model_files

# Files of a model's folder that decide its outputs or its tokens.
READ = (".safetensors", ".json", ".jinja", ".model", ".spm", ".txt", ".gguf", ".npz")
CHUNK = 1 << 20  # bytes


def files_digest(model: Path) -> str:
    """SHA-256 of the contents of a model's files, the same on every host. Raises OSError, WeightError."""
    digest = hashlib.sha256()
    for file in (one for one in model_files(model) if model.is_file() or one.suffix in READ or one.name == CTRANSLATE2):
        with file.open("rb") as data:
            name = "" if model.is_file() else file.name
            digest.update(f"{name} {file.stat().st_size}\n".encode())
            while chunk := data.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
