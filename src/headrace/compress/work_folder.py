"""Work folder of a pass: finished layers on disk, so that a stopped run can resume.

    plan.json        what is compressed and how, with hashes
    texts.json       the calibration tokens
    layer_0003.safetensors    a finished layer: float32 tensors, or rows of a kind (uint8); its report is in the metadata
    rows.a, rows.b   float32 [tokens, hidden]: inputs and outputs of a layer, alternating
    state.json       number of finished layers, SHA-256 of their files and of the next rows; written after these files
    written.json     OUT is complete, and still to be judged

Every file is written under a temporary name and then renamed.
"""

import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from headrace.weights.atomic_file import PART, atomic_write
from headrace.weights.source import WeightError
from headrace.weights.store import sha256_of

VERSION = 3  # of the file format and of the algorithms
PLAN, TEXTS, STATE, WRITTEN = "plan.json", "texts.json", "state.json", "written.json"


class WorkFolder:
    """A work folder; see the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, plan: Mapping[str, Any]) -> int:
        """Start or resume; returns the number of finished layers.

        Raises WeightError if the folder belongs to another plan, is damaged, or is not a work folder.
        """
        if not self.folder.exists() or all(path.suffix == PART for path in self.folder.iterdir()):
            self.write(PLAN, plan)
            return 0
        if not (self.folder / PLAN).is_file():
            raise WeightError(f"{self.folder} holds no work of compress; remove it, or name another OUT")
        before = self.read(PLAN)
        if changed := [key for key in {**before, **plan} if before.get(key) != plan.get(key)]:
            differences = "; ".join(f"{key}: {_short(before.get(key))} then, {_short(plan.get(key))} now" for key in changed)
            raise WeightError(
                f"{self.folder} was started with other settings ({differences}); remove it, or use the same settings"
            )
        for name, digest in self._sums().items():
            self.check(name, digest)
        return self.done

    @property
    def done(self) -> int:
        """Number of finished layers."""
        return max(0, len(self._sums()) - 1)

    def _sums(self) -> dict[str, str]:
        """SHA-256 of every finished layer's file and of the next rows, by file name; empty before the first."""
        if not (self.folder / STATE).is_file():
            return {}
        state = self.read(STATE)
        sums, layers = state.get("sha256"), state.get("layers")
        if not isinstance(layers, int) or not isinstance(sums, dict):
            raise self.damaged(STATE)
        if list(sums) != [*(self.layer(number).name for number in range(layers)), self.rows(layers).name]:
            raise self.damaged(STATE)
        return sums

    def check(self, name: str, digest: object) -> None:
        """Raise WeightError unless a file has this SHA-256."""
        try:
            digest_now = sha256_of(self.folder / name)
        except OSError:
            digest_now = None
        if digest_now is None or digest_now != digest:
            raise self.damaged(name)

    def layer(self, number: int) -> Path:
        return self.folder / f"layer_{number:04}.safetensors"

    def rows(self, number: int) -> Path:
        """File of a layer's inputs."""
        return self.folder / ("rows.a" if number % 2 == 0 else "rows.b")

    def finish_layer(self, number: int, tensors: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
        """Write a layer; its output rows are already written."""
        with self.writing(self.layer(number)) as part:
            save_file(dict(tensors), part, {"about": json.dumps(about)})
        sums = self._sums()
        sums.pop(self.rows(number).name, None)
        for path in (self.layer(number), self.rows(number + 1)):
            sums[path.name] = sha256_of(path)
        self.write(STATE, {"layers": number + 1, "sha256": sums})

    def about(self, number: int) -> dict[str, Any]:
        """Report of a finished layer. Raises WeightError if its file is damaged."""
        with self._open(number) as file:
            report: dict[str, Any] = json.loads(file.metadata()["about"])
        return report

    def tensor(self, number: int, name: str) -> np.ndarray:
        """A tensor of a finished layer."""
        with self._open(number) as file:
            tensor: np.ndarray = file.get_tensor(name)
        return tensor

    @contextmanager
    def _open(self, number: int) -> Iterator[Any]:
        try:
            with safe_open(self.layer(number), "np") as file:
                yield file
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            raise self.damaged(self.layer(number).name) from None

    def read(self, name: str) -> Any:
        """A JSON file of the folder. Raises WeightError if it is damaged."""
        try:
            values = json.loads((self.folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            raise self.damaged(name) from None
        if not isinstance(values, dict):
            raise self.damaged(name)
        return values

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        with self.writing(self.folder / name) as part:
            part.write_text(json.dumps(values, indent=1), "utf-8")

    @contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """Yield a temporary name that becomes `path` at the end. Raises WeightError if the disk is full."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as part:
                yield part
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error)
            if not full:
                raise
            raise WeightError(
                f"{self.folder}: the disk is full; what is done is kept: make room, then run the same command again"
            ) from None

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def damaged(self, name: str) -> WeightError:
        return WeightError(f"{self.folder / name} is damaged; remove {self.folder} to begin again")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
