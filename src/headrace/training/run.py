"""The training loop of all trainers: AdamW on named tensors, which can be stopped and resumed to the same bytes."""

import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headrace.compress.export import write_json
from headrace.data.progress import Progress
from headrace.weights.atomic_file import atomic_write, file_lock

PLAN, CHECKPOINT = "plan.json", "checkpoint.safetensors"
# Share of a training in which the learning rate rises, and its floor as a share of the highest rate.
WARM_UP, FLOOR = 0.02, 0.02
WEIGHT_DECAY, GRADIENT_NORM = 0.01, 1.0
BETAS = (0.9, 0.95)

Arguments = ParamSpec("Arguments")
Report = TypeVar("Report")
# Entered while a training runs; returns whether to stop after the current step.
Interrupt = AbstractContextManager[Callable[[], bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings that all trainings have; each trainer adds its own.

    seed: of random weights, of texts and of their order. threads: CPU threads of torch; None leaves torch's setting.
    """

    seed: int = 0
    threads: int | None = None

    def set_threads(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)


@dataclass(frozen=True, slots=True)
class Budget:
    """Length of a training: either a number of steps or minutes of wall clock."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("a training takes steps or minutes; give one of the two")

    def share(self, steps: int, seconds: float) -> float:
        """Finished share of the training, 1 at its end."""
        return min(1.0, steps / self.steps if self.steps is not None else seconds / (60 * (self.minutes or 1.0)))


def rate_at(share: float, highest: float) -> float:
    """Learning rate after `share` of a training: a short linear warm-up, then a cosine.

    Source: Loshchilov & Hutter, "SGDR", arXiv 1608.03983.
    """
    return highest * min(1.0, share / WARM_UP + 0.05) * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Lock the folder `out` for one training process. Raises ValueError if another process holds the lock, and OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(out):
        yield


def exclusive(train: Callable[Arguments, Report]) -> Callable[Arguments, Report]:
    """Decorator of a trainer: locks the folder of its argument `out` during the call, as `alone_in` does."""
    parameters = inspect.signature(train)

    @wraps(train)
    def locked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Report:
        with alone_in(parameters.bind(*args, **kwargs).arguments["out"]):
            return train(*args, **kwargs)

    return locked


def record_job(folder: Path, job: Mapping[str, Any]) -> None:
    """Record in `folder` which training it belongs to: the settings that must stay the same when it is resumed.

    Raises ValueError if the folder belongs to another training, or its record is damaged.
    """
    path, now = folder / PLAN, json.loads(json.dumps(job))
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, now)
        return
    try:
        before = dict(json.loads(path.read_text("utf-8")))
    except (TypeError, ValueError):
        raise ValueError(f"{path} is damaged; remove {folder} to begin again") from None
    if changed := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        differences = "; ".join(f"{name}: {before.get(name)} then, {now.get(name)} now" for name in changed)
        raise ValueError(f"{folder} holds another training ({differences}); take another folder, or remove it")


def loss_remark(loss: float) -> str:
    return f"loss {loss:.3f}"


class Run:
    """One training of `tensors` by name, with its checkpoint in `folder`. Constructing it loads the checkpoint if there is one.

    A run with a budget of steps ends with the same bytes whether it was stopped or not, on the same machine and threads, as
    long as the gradients of a step depend on nothing but its number and the tensors.

    tensors: trained in place; they get gradients until the end of the budget.
    rate: the highest learning rate of the schedule `rate_at`, or a function from a step's number to its rate.
    rate_factors: by tensor name, multiples of the rate; 1 if missing.
    Raises ValueError if the checkpoint is damaged.
    """

    # Seconds between two checkpoints.
    checkpoint_seconds = 60.0

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        folder: Path,
        budget: Budget,
        rate: float | Callable[[int], float],
        *,
        rate_factors: Mapping[str, float] | None = None,
        betas: tuple[float, float] = BETAS,
    ) -> None:
        self.tensors, self.folder, self.budget, self.rate = dict(tensors), folder, budget, rate
        groups: dict[float, list[torch.Tensor]] = {}
        for name, tensor in tensors.items():
            groups.setdefault((rate_factors or {}).get(name, 1.0), []).append(tensor.requires_grad_())
        self.adam = torch.optim.AdamW(
            [{"params": group, "factor": factor} for factor, group in groups.items()],
            lr=0.0,
            betas=betas,
            weight_decay=WEIGHT_DECAY,
        )
        self.steps, self.seconds = 0, 0.0
        self._load()

    @property
    def share(self) -> float:
        """Finished share of the budget."""
        return self.budget.share(self.steps, self.seconds)

    def train(
        self,
        step: Callable[[int], float],
        progress: Progress | None = None,
        interrupt: Interrupt | None = None,
        *,
        name: str = "training",
        remark: Callable[[float], str] = loss_remark,
        after_update: Callable[[], None] | None = None,
    ) -> None:
        """Train to the end of the budget and save the last checkpoint.

        step: adds the gradients of the step with this number, and returns its loss.
        remark: makes the progress remark of a step's loss. after_update: called after each update of the tensors.
        Raises KeyboardInterrupt after a step if `interrupt` stops the training; the checkpoint is saved. Raises ValueError if
        a loss is NaN or infinite, which would destroy every weight; the checkpoint before is kept.
        """
        progress = progress or Progress()
        begin, saved, before = time.monotonic(), time.monotonic(), self.seconds
        shown = self._start(progress, name)
        with interrupt or nullcontext(lambda: False) as stopped:
            while self.share < 1:
                self.adam.zero_grad()
                loss = step(self.steps)
                if not math.isfinite(loss):
                    raise ValueError(
                        f"the loss of step {self.steps} is not a number: start again ({self.folder}) at a lower rate"
                    )
                self._update()
                if after_update is not None:
                    after_update()
                self.seconds = before + time.monotonic() - begin
                progress.advance(self._position() - shown, remark(loss))
                shown = self._position()
                if stopped():
                    self.save()
                    raise KeyboardInterrupt
                if time.monotonic() - saved >= self.checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
            self.save()
        self.adam.zero_grad()
        for tensor in self.tensors.values():
            tensor.requires_grad_(False)

    def _start(self, progress: Progress, name: str) -> int:
        """Start the progress display. Returns the position it shows."""
        steps, minutes = self.budget.steps, self.budget.minutes or 0.0
        total, unit = (round(60 * minutes), "seconds") if steps is None else (steps, "steps")
        progress.start(name, max(1, total), self._position(), unit)
        return self._position()

    def _position(self) -> int:
        """Steps done, or seconds spent if the budget is minutes."""
        return int(self.seconds) if self.budget.steps is None else self.steps

    def _update(self) -> None:
        rate = self.rate(self.steps) if callable(self.rate) else rate_at(self.share, self.rate)
        for group in self.adam.param_groups:
            group["lr"] = group["factor"] * rate
        torch.nn.utils.clip_grad_norm_(self.tensors.values(), GRADIENT_NORM)
        self.adam.step()
        self.steps += 1

    def save(self) -> None:
        """Write the checkpoint (tensors, optimizer state, steps, seconds) to one file, replaced atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = {name: tensor.detach() for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            if tensor in self.adam.state:
                state = self.adam.state[tensor]
                stored |= {f"adam.first.{name}": state["exp_avg"], f"adam.second.{name}": state["exp_avg_sq"]}
        metadata = {"steps": str(self.steps), "spent": str(self.seconds)}
        with atomic_write(self.folder / CHECKPOINT) as part:
            save_file(stored, part, metadata)

    def _load(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return
        try:
            with safe_open(path, "pt") as file:
                metadata, names = file.metadata(), set(file.keys())
                self.steps, self.seconds = int(metadata["steps"]), float(metadata["spent"])
                for name, tensor in self.tensors.items():
                    tensor.data.copy_(file.get_tensor(name))
                    if f"adam.first.{name}" in names:
                        first, second = (file.get_tensor(f"adam.{moment}.{name}") for moment in ("first", "second"))
                        steps = torch.tensor(float(self.steps))
                        self.adam.state[tensor] = {"step": steps, "exp_avg": first, "exp_avg_sq": second}
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError):
            raise ValueError(f"{path} is damaged; remove {self.folder} to begin again") from None
