"""A teacher's pass through texts: in torch, from weights in float32, or on the native core, from weights as they are stored."""

from collections.abc import Sequence
from typing import Protocol

import torch

from headrace import core as native
from headrace.data.config import ModelConfig
from headrace.data.plan import TARGET
from headrace.data.settings import ModelSettings
from headrace.data.torch_threads import keep_torch_threads
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.runner.record import RecordError, record
from headrace.startup.backend import start
from headrace.startup.opening import Opened
from headrace.startup.recipe import Recipe, Role
from headrace.training.sequence_forward import Passed, fed
from headrace.training.texts import rows_after
from headrace.weights.loader import Allocator, fill, load_model
from headrace.weights.parts import plan

AUTO, NATIVE, TORCH = BACKENDS = ("auto", "native", "torch")


class Forward(Protocol):
    """A model without gradients, whole texts at a time."""

    config: ModelConfig

    def passed(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> Passed:
        """A text's rows after the last layer and after each of `layers`, float32 or wider."""

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [r, hidden] after the last layer -> logits [r, vocabulary]."""

    def final(self, rows: torch.Tensor) -> torch.Tensor:
        """The same rows as the head reads them."""


class TorchForward:
    """A filled model, in its own dtype. With `maps` a pass leaves the maps of attention, too."""

    def __init__(self, model: Model, maps: bool = False) -> None:
        self.model, self.config = model, model.config
        self._recording = record(model, embeds=False) if maps else None

    @torch.no_grad()
    def passed(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> Passed:
        return fed(self.model, tokens, layers, self._recording)

    @torch.no_grad()
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.head(rows)
        return logits

    @torch.no_grad()
    def final(self, rows: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.model.final(rows)
        return normed


class NativeForward(TorchForward):
    """An open model whose layers run on the native core, with K and V in float32, for texts of `longest` tokens at most; its
    norm and head are float32 in torch. What it says is what the model says when it runs: of integer weights the inputs are
    rounded to int8. Raises ValueError where the core cannot run it, DoesNotFit, WeightError."""

    def __init__(self, opened: Opened, longest: int, threads: int | None = None) -> None:
        super().__init__(_head(opened))
        settings = ModelSettings(
            device="cpu",
            backend=NATIVE,
            kv_dtype="float32",
            threads=threads,
            max_num_seqs=2,  # room for one and the blocks behind its end
            max_model_len=longest,
        )
        self._runner = start(Recipe((Role(TARGET.name, opened),), settings)).runner

    @torch.no_grad()
    def passed(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> Passed:
        places = sorted(set(layers))
        with keep_torch_threads():
            *each, last = rows_after(self._runner, list(tokens), [layer + 1 for layer in places])
        made = dict(zip(places, each, strict=True))
        return Passed(last, [made[layer] for layer in layers])


def _head(opened: Opened) -> Model:
    """A model of which what comes after the last layer is filled, in float32, and nothing else."""
    model = describe(opened.config)
    plans, holders, allocator = plan(model, opened.source), dict(model.holders()), Allocator(torch.float32)
    for path in ("norm", "output" if "output" in holders else "tokens"):
        if path in holders:
            holders[path].create(allocator)
            for field in holders[path].params():
                fill(getattr(holders[path], field), plans[f"{path}.{field}"], opened.source)
            holders[path].finish()
    return model


def backend_of(wanted: str, opened: Opened, maps: bool) -> str:
    """Where a teacher runs: "auto" is the native core where it can run this model. Raises ValueError for what cannot be."""
    if wanted not in BACKENDS:
        raise ValueError(f"unknown backend {wanted!r}; use {', '.join(BACKENDS)}")
    problem = native.reason()
    if maps:
        problem = "the maps of the loss attention are taken in torch"
    elif not problem:
        try:
            record(describe(opened.config))
        except RecordError as error:
            problem = str(error)
    if wanted == NATIVE and problem:
        raise ValueError(f"the teacher cannot run on the native core: {problem}; use backend torch")
    return TORCH if problem or wanted == TORCH else NATIVE


def forward_of(backend: str, opened: Opened, longest: int, threads: int | None, maps: bool) -> Forward:
    """The teacher of that back end. Raises as `NativeForward` and the loader do."""
    if backend == NATIVE:
        return NativeForward(opened, longest, threads)
    return TorchForward(load_model(opened.source), maps)
