"""Where real models and data lie; tests skip with a reason where they do not."""

import os
from pathlib import Path

import pytest


def model_file(name: str) -> Path:
    """A file of HEADRACE_TEST_MODELS (default ~/.cache/headrace-test-models)."""
    folder = Path(os.environ.get("HEADRACE_TEST_MODELS", "~/.cache/headrace-test-models")).expanduser()
    if not (folder / name).exists():
        pytest.skip(f"{name} is not in {folder} (HEADRACE_TEST_MODELS)")
    return folder / name


def data_folder(name: str) -> Path:
    """A folder of HEADRACE_TEST_DATA (default: shared/data beside the repository)."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("HEADRACE_TEST_DATA", beside)).expanduser()
    if not (folder / name).is_dir():
        pytest.skip(f"{name} is not in {folder} (HEADRACE_TEST_DATA)")
    return folder / name
