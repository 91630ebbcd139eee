"""A training that can be stopped and gone on with: what is learned and the optimiser's state are in a folder."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headrace.compress.export import write_json
from headrace.weights.atomic_file import atomic_write, file_lock

PLAN, CHECKPOINT = "plan.json", "checkpoint.safetensors"
WARM, LEAST = 0.02, 0.02  # the share of a training in which the rate rises, and of the highest rate at its end
DECAY, CLIP = 0.01, 1.0  # of weights; of all gradients together
EVERY = 60.0  # seconds between two checkpoints
BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Budget:
    """How long is trained: `steps`, or `minutes` of the clock."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("a training takes steps or minutes; give one of the two")

    def share(self, steps: int, seconds: float) -> float:
        """What of it is over, 1 at its end."""
        return min(1.0, steps / self.steps if self.steps is not None else seconds / (60 * (self.minutes or 1.0)))


def rate_at(share: float, highest: float) -> float:
    """A rate of learning that rises in the first hundredths of a training and falls as a cosine (Loshchilov & Hutter 2017)."""
    return highest * min(1.0, share / WARM + 0.05) * (LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * share)))


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Only one process at a time trains into the folder `out`. Raises ValueError where another one does now, and OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(out):
        yield


def begin(folder: Path, about: Mapping[str, Any]) -> None:
    """Say in a folder what is trained there. Raises ValueError where that is something else, or cannot be read."""
    path, now = folder / PLAN, json.loads(json.dumps(about))
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, now)
        return
    try:
        before = dict(json.loads(path.read_text("utf-8")))
    except (TypeError, ValueError):
        raise ValueError(f"{path} is damaged; remove {folder} to begin again") from None
    if apart := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        differences = "; ".join(f"{name}: {before.get(name)} then, {now.get(name)} now" for name in apart)
        raise ValueError(f"{folder} holds another training ({differences}); take another folder, or remove it")


class Run:
    """AdamW over `tensors` by name, which get gradients; those of `faster` learn at so many times the rate. A run of `steps`
    that was stopped, however it was, comes to the same bytes as one that was not, on the same machine and threads.

    Raises ValueError where what `folder` holds is damaged.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        folder: Path,
        budget: Budget,
        rate: float,
        *,
        faster: Mapping[str, float] | None = None,
        betas: tuple[float, float] = BETAS,
    ) -> None:
        self.tensors, self.folder, self.budget, self.rate = tensors, folder, budget, rate
        groups: dict[float, list[torch.Tensor]] = {}
        for name, x in tensors.items():
            groups.setdefault((faster or {}).get(name, 1.0), []).append(x.requires_grad_())
        self.adam = torch.optim.AdamW(
            [{"params": some, "times": times} for times, some in groups.items()], lr=rate, betas=betas, weight_decay=DECAY
        )
        self.steps, self.spent = 0, 0.0
        self._load()

    @property
    def share(self) -> float:
        return self.budget.share(self.steps, self.spent)

    def go(
        self,
        learn: Callable[[int], float],
        seen: Callable[[float], None] = lambda loss: None,
        stopped: Callable[[], bool] = lambda: False,
        every: float = EVERY,
    ) -> None:
        """Train to the end of the budget. `learn` leaves the gradients of a step, by its number, and returns the loss; `seen`
        hears of it. Raises KeyboardInterrupt between two steps once `stopped` says so; what was done is kept. Raises ValueError
        where a loss is no number, which would be the end of every weight."""
        began, saved, before = time.monotonic(), time.monotonic(), self.spent
        while self.share < 1:
            self.adam.zero_grad()
            loss = learn(self.steps)
            if not math.isfinite(loss):
                raise ValueError(f"the loss of step {self.steps} is no number: begin again ({self.folder}) at a lower rate")
            self._step()
            self.spent = before + time.monotonic() - began
            seen(loss)
            if stopped():
                self.save()
                raise KeyboardInterrupt
            if time.monotonic() - saved >= every:
                self.save()
                saved = time.monotonic()
        self.save()
        self.adam.zero_grad()

    def _step(self) -> None:
        for group in self.adam.param_groups:
            group["lr"] = group["times"] * rate_at(self.share, self.rate)
        torch.nn.utils.clip_grad_norm_(self.tensors.values(), CLIP)
        self.adam.step()
        self.steps += 1

    def save(self) -> None:
        """Keep all that is needed to go on: one file, which is replaced when it is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {name: x.detach() for name, x in self.tensors.items()}
        for name, x in self.tensors.items():
            if x in self.adam.state:
                state = self.adam.state[x]
                kept |= {f"adam.first.{name}": state["exp_avg"], f"adam.second.{name}": state["exp_avg_sq"]}
        metadata = {"steps": str(self.steps), "spent": str(self.spent)}
        with atomic_write(self.folder / CHECKPOINT) as part:
            save_file(kept, part, metadata)

    def _load(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return
        try:
            with safe_open(path, "pt") as file:
                metadata, there = file.metadata(), set(file.keys())
                self.steps, self.spent = int(metadata["steps"]), float(metadata["spent"])
                for name, x in self.tensors.items():
                    x.data.copy_(file.get_tensor(name))
                    if f"adam.first.{name}" in there:
                        first, second = (file.get_tensor(f"adam.{which}.{name}") for which in ("first", "second"))
                        steps = torch.tensor(float(self.steps))
                        self.adam.state[x] = {"step": steps, "exp_avg": first, "exp_avg_sq": second}
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError):
            raise ValueError(f"{path} is damaged; remove {self.folder} to begin again") from None
