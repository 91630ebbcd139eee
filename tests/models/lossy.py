"""Methods of compression carried out on a real model in memory, and what it then foretells of texts."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from headrace.compress.base import Compressor, OutputReport, apply_methods
from headrace.compress.grids.keep import parse_sparsity
from headrace.compress.grids.targets import nearest, target
from headrace.compress.layer_pass import LayerPass
from headrace.compress.pruning import prune_rows
from headrace.compress.work_folder import WorkFolder
from headrace.models.base import Model
from headrace.training.sequence_forward import run_sequence
from headrace.weights.loader import load_model
from headrace.weights.source import WeightSource
from tests.models.zoo import pieces

PARTS = ("qkv.q", "qkv.k", "qkv.v", "out", "gate_up.gate", "gate_up.up", "down")


def kinds(format: str | None, layers: int) -> dict[str, str]:
    """All matrices of the layers are to be stored so."""
    return {f"layers.{layer}.{part}.weight": format for layer in range(layers) for part in PARTS} if format else {}


class After(NamedTuple):
    """A model as methods left it, layer by layer, and what is known of its matrices."""

    model: Model
    outputs: dict[str, OutputReport]


def walked(source: WeightSource, read: Sequence[list[int]], steps: Sequence[Compressor], format: str | None = None) -> After:
    """Methods carried out on a walk. Weights are what the codes say; where something is cut the model is the masked one."""
    model, outputs = load_model(source), dict[str, OutputReport]()
    holders, layers = dict(model.holders()), model.config.num_layers
    with TemporaryDirectory() as folder:
        for visit in LayerPass(source, read, WorkFolder(Path(folder)), kinds(format, layers)):
            apply_methods(visit, steps)
            outputs |= visit.outputs
            for name, holder in visit.holders.items():
                for field in holder.params():
                    getattr(holders[f"layers.{visit.number}.{name}"], field).copy_(getattr(holder, field))
    return After(model, outputs)


def rounded(source: WeightSource, format: str, magnitude: str | None = None) -> Model:
    """To nearest, as the method rtn rounds, which reads no texts; `magnitude`: the sparsity of what is left out before."""
    model = load_model(source)
    wanted = kinds(format, model.config.num_layers)
    for name, values in pieces(model).items():
        if name not in wanted:
            continue
        if magnitude is not None:
            values.copy_(torch.from_numpy(prune_rows(values.numpy(), ("magnitude", parse_sparsity(magnitude)), None)))
        values.copy_(nearest(values, target(format), None, 1)[1])
    return model


@torch.inference_mode()
def predictions(model: Model, text: list[int], count: int) -> torch.Tensor:
    """Log-probabilities [count, vocabulary] of a text's last tokens."""
    rows: torch.Tensor = model.head(run_sequence(model, text).rows[-count - 1 : -1])
    return rows.log_softmax(-1)


def likelihood(log_p: torch.Tensor, text: list[int]) -> torch.Tensor:
    """What they say of the tokens that came: [count]."""
    return log_p.gather(1, torch.tensor(text[-len(log_p) :])[:, None])[:, 0]
