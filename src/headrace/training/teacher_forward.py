"""Forward passes of a teacher without gradients: in torch from float32 weights, or on the native core from the stored ones."""

from collections.abc import Sequence

import torch

from headrace import core
from headrace.backends.recipe import Recipe, Role
from headrace.data.plan import TARGET
from headrace.data.settings import ModelSettings
from headrace.data.torch_threads import keep_torch_threads
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.runner.record import RecordError, record
from headrace.startup.backend import start
from headrace.startup.opening import Opened
from headrace.training.sequence_forward import SequenceOutput, run_sequence
from headrace.training.texts import rows_after
from headrace.weights.loader import Allocator, fill, load_model
from headrace.weights.parts import plan

AUTO, NATIVE, TORCH = BACKENDS = ("auto", "native", "torch")


class TorchForward:
    """Forward passes of whole sequences without gradients, of a filled model in torch, in its own dtype.

    maps: whether `run` also returns the attention maps.
    """

    def __init__(self, model: Model, maps: bool = False) -> None:
        self.model, self.config = model, model.config
        self._recording = record(model, embeds=False) if maps else None

    @torch.no_grad()
    def run(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> SequenceOutput:
        """Run one sequence. Returns its rows after the last layer and after each of `layers`, float32 or wider."""
        return run_sequence(self.model, tokens, layers, self._recording)

    @torch.no_grad()
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of rows [rows, hidden] after the last layer."""
        logits: torch.Tensor = self.model.head(rows)
        return logits

    @torch.no_grad()
    def final(self, rows: torch.Tensor) -> torch.Tensor:
        """The same rows after the last norm, as the head reads them."""
        normed: torch.Tensor = self.model.final(rows)
        return normed


class NativeForward(TorchForward):
    """An open model whose layers run on the native core with float32 K/V; its last norm and head run in torch, in float32.

    The rows are those of the model in use: with integer weights, inputs are rounded to int8.
    longest: most tokens of a sequence.
    Raises ValueError if the core cannot run the model, ValueError, WeightError.
    """

    def __init__(self, opened: Opened, longest: int, threads: int | None = None) -> None:
        super().__init__(_load_head(opened))
        # Two sequences: room for one, and for the blocks after its end.
        settings = ModelSettings(
            device="cpu", backend=NATIVE, kv_dtype="float32", threads=threads, max_num_seqs=2, max_model_len=longest
        )
        self._runner = start(Recipe((Role(TARGET.name, opened),), settings)).runner

    @torch.no_grad()
    def run(self, tokens: Sequence[int], layers: Sequence[int] = ()) -> SequenceOutput:
        indices = sorted(set(layers))
        with keep_torch_threads():
            *after, last = rows_after(self._runner, list(tokens), [layer + 1 for layer in indices])
        by_layer = dict(zip(indices, after, strict=True))
        return SequenceOutput(last, [by_layer[layer] for layer in layers])


def _load_head(opened: Opened) -> Model:
    """Return the model with only the last norm and the head filled, in float32."""
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
    """Choose the back end of a teacher; "auto" is the native core if it can run the model. maps: whether maps are needed.

    Raises ValueError if `wanted` is unknown or cannot run the model.
    """
    if wanted not in BACKENDS:
        raise ValueError(f"unknown backend {wanted!r}; use {', '.join(BACKENDS)}")
    problem = core.reason()
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


def forward_of(backend: str, opened: Opened, longest: int, threads: int | None, maps: bool) -> TorchForward:
    """Open the teacher on `backend`, "native" or "torch". Raises as `NativeForward` and the loader do."""
    if backend == NATIVE:
        return NativeForward(opened, longest, threads)
    return TorchForward(load_model(opened.source), maps)
