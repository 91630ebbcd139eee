"""A trainer: a line through points, by the project's training loop."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.training.run import Budget, Run, TrainingConfig, exclusive, record_job
from headrace.weights.atomic_file import atomic_write


@dataclass(frozen=True, slots=True)
class LineConfig(TrainingConfig):
    steps: int = 12
    rate: float = 0.1


@exclusive
def train_line(x: Sequence[float], y: Sequence[float], out: Path, config: LineConfig) -> None:
    """Train slope and offset of a line through the points (x, y) into out/line.safetensors."""
    config.set_threads()
    record_job(out / "work", {"x": list(x), "y": list(y), **asdict(config)})
    line = {name: torch.randn(1, generator=torch.Generator().manual_seed(config.seed)) for name in ("slope", "offset")}

    def step(number: int) -> float:
        loss = (torch.tensor(x) * line["slope"] + line["offset"] - torch.tensor(y)).square().mean()
        loss.backward()
        return loss.item()

    Run(line, out / "work", Budget(steps=config.steps), config.rate).train(step)
    with atomic_write(out / "line.safetensors") as part:
        save_file(line, part)
