"""What runs a model: the native core where it can, torch where it must. Decided once, at load, and said in one line."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headrace import native
from headrace.data.config import ModelConfig
from headrace.data.plan import AMATEUR, DRAFT, FEATURES, HIDDEN, MAX_NODES, TARGET, KVGroup
from headrace.kv.layout import kv_shape
from headrace.kv.pool import KVPool
from headrace.models.registry import describe
from headrace.native.heads import NativeHeads
from headrace.native.runner import KV_DTYPES, NativeRunner, kv_block_bytes
from headrace.native.slots import Slot
from headrace.native.weights import packed_bytes
from headrace.runner.companions import Companions, ModelRunner, SelfDraft
from headrace.runner.executor import Runs
from headrace.runner.heads import FEATURE, Heads, TorchHeads
from headrace.runner.hidden import HiddenStates
from headrace.runner.parts import Part
from headrace.runner.record import RecordError
from headrace.runner.runner import TorchRunner
from headrace.runner.slots import Slots
from headrace.startup import memory
from headrace.startup.loading import DTYPES, Opened, load, pick_dtype
from headrace.text.frequent import frequent_tokens

log = logging.getLogger("headrace")

BACKENDS = ("auto", "native", "torch")
# What batch, chunks and drafts can change of an output: nothing, or the choice between tokens that are nearly equally good, as
# torch's products sum in an order that depends on how many rows there are.
EXACTNESS = {"native": "bitwise", "torch": "near-tie-exact"}
BLOCK_SIZE = 16
DRAFT_VOCAB = 49152  # tokens of a draft's head, unless told otherwise: 97 % of code and prose
ENCODER_TEXTS = 4  # of full length: an encoder's K and V last for one step


@dataclass(frozen=True, slots=True)
class Settings:
    """What a caller says about how a model is run; "auto" and None leave it to us."""

    device: torch.device
    backend: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantize: str | None = None
    threads: int | None = None
    max_num_seqs: int = 32
    max_model_len: int | None = None
    kv_cache_memory: int | str | None = None
    draft_vocab: int | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """A model that is ready to run: `name` is native or torch."""

    name: str
    runner: Runs
    plan: memory.MemoryPlan
    dtype: torch.dtype
    groups: tuple[KVGroup, ...]


def start(
    opened: Opened,
    settings: Settings,
    draft: Opened | None = None,
    amateur: Opened | None = None,
    part: Part | None = None,
    heads: Heads | None = None,
) -> Backend:
    """Load a model's weights, and those of its companions, into the back end that fits the settings. In place of a draft the
    model may draft for itself, by a `part` of it or by trained `heads`.

    Raises ValueError, DoesNotFit, WeightError, in one line. With backend "auto", what the native core cannot do runs in
    torch, which is logged; with "native" it is an error.
    """
    if settings.backend not in BACKENDS:
        raise ValueError(f"unknown backend {settings.backend!r}; use {', '.join(BACKENDS)}")
    if settings.kv_dtype not in {"auto", *DTYPES, *KV_DTYPES}:
        known = ", ".join(sorted({"auto", *DTYPES, *KV_DTYPES}))
        raise ValueError(f"unknown kv_dtype {settings.kv_dtype!r}; use one of {known}")
    if settings.quantize not in (None, "int8", "int4"):
        raise ValueError(f"quantize must be int8 or int4, not {settings.quantize!r}")
    if settings.draft_vocab is not None and (settings.draft_vocab < 0 or draft is None):
        raise ValueError("draft_vocab is how many tokens a draft model chooses from, 0 being all; name that model with draft")
    if settings.backend != "torch":
        problem, level = _why_not(settings, opened), logging.INFO  # what was asked for is no surprise
        if not problem:
            try:
                return _native(opened, settings, draft, amateur, part, heads)
            except RecordError as error:
                problem, level = str(error), logging.WARNING
        if settings.backend == "native":
            raise ValueError(f"the native back end cannot run this: {problem}; use backend='auto'")
        if settings.device.type == "cpu":
            log.log(level, "running in torch: %s", problem)
    return _torch(opened, settings, draft, amateur, part, heads)


def _beside(draft: Opened | None, amateur: Opened | None, heads: Heads | None) -> tuple[list[Opened], tuple[KVGroup, ...]]:
    """The companions, in the order of their numbers, and the KV groups of all models."""
    groups = [TARGET]
    if draft is not None or (heads is not None and heads.kind == FEATURE):
        groups.append(KVGroup(DRAFT, model=1))
    if amateur is not None:
        groups.append(KVGroup(AMATEUR))  # the target's feeds fill it, where a request is decoded by contrast
    companions = [each for each in (draft, amateur) if each is not None]
    groups.append(KVGroup(HIDDEN, "hidden"))
    return companions, tuple(groups) if heads is None else (*groups, KVGroup(FEATURES, "hidden"))


def _features_bytes(heads: Heads | None, config: ModelConfig, element_bytes: int, kv_bytes: int) -> int:
    """What heads need of each block: the target's rows, and their own K and V."""
    if heads is None:
        return 0
    return BLOCK_SIZE * config.hidden_size * element_bytes + (kv_bytes if heads.kind == FEATURE else 0)


def _shortest(models: list[Opened]) -> ModelConfig:
    """The first model's numbers, with the positions that all of them know."""
    return replace(models[0].config, max_position=min(model.config.max_position for model in models))


def _why_not(settings: Settings, opened: Opened) -> str:
    """Why the native core cannot be asked; empty when it can."""
    if opened.config.encoder:
        return "the native core runs decoders, and this model is an encoder"
    if settings.device.type != "cpu":
        return f"the native core computes on the CPU, and the device is {settings.device}"
    if settings.dtype not in ("auto", "bfloat16"):
        return f"dtype {settings.dtype} was asked for, and the native core has its own number formats"
    if settings.kv_dtype not in KV_DTYPES:
        return f"the native core keeps no KV in {settings.kv_dtype}"
    return native.reason()


def _native(
    opened: Opened,
    settings: Settings,
    draft: Opened | None,
    amateur: Opened | None,
    part: Part | None,
    heads: Heads | None,
) -> Backend:
    companions, groups = _beside(draft, amateur, heads)
    everyone = [opened, *companions]
    models = [describe(each.config) for each in everyone]
    quantize = settings.quantize or ""
    need = sum(packed_bytes(model, each.source, quantize) for model, each in zip(models, everyone, strict=True))
    one_layer = replace(opened.config, layers=opened.config.layers[:1])
    own_kv = 0 if heads is None else kv_block_bytes(one_layer, BLOCK_SIZE, settings.kv_dtype)
    free = memory.free_memory(settings.device)
    memory.check_weights_fit(need, free, " and ".join(each.name for each in everyone))
    plan = memory.plan(
        _shortest(everyone),
        block_bytes=sum(kv_block_bytes(each.config, BLOCK_SIZE, settings.kv_dtype) for each in everyone)
        + _features_bytes(heads, opened.config, 4, own_kv),
        block_size=BLOCK_SIZE,
        free=free - need,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_memory=settings.kv_cache_memory,
    )
    slots: dict[int, Slot] = {}
    shared: dict[str, Any] = {
        "num_blocks": plan.num_blocks,
        "block_size": BLOCK_SIZE,
        "max_positions": plan.max_model_len + MAX_NODES,
        "kv_dtype": settings.kv_dtype,
        "threads": settings.threads or 0,
    }
    runners = [
        NativeRunner(
            model,
            each.source,
            quantize=quantize,
            slots=slots,
            head_ids=_draft_head(each, settings) if each is draft else None,
            pack=False,
            **shared,
        )
        for model, each in zip(models, everyone, strict=True)
    ]
    opened.read_words()  # beside packing, which leaves Python's lock to it
    for runner in runners:
        runner.weights.pack()
    if heads is not None:
        runners.insert(1, NativeHeads(heads, runners[0], opened.source, **shared))
    _bound_hidden(runners[0].hidden, plan, settings.device)
    return Backend("native", _together(runners, part, amateur is not None), plan, torch.bfloat16, groups)


def _draft_head(draft: Opened, settings: Settings) -> np.ndarray | None:
    """The tokens that a draft chooses from; None: all of them."""
    size = draft.config.vocab_size
    count = DRAFT_VOCAB if settings.draft_vocab is None else settings.draft_vocab
    return np.array(frequent_tokens(draft.tokenizer, size, count)) if 0 < count < 0.75 * size else None


def _torch(
    opened: Opened,
    settings: Settings,
    draft: Opened | None,
    amateur: Opened | None,
    part: Part | None,
    heads: Heads | None,
) -> Backend:
    if settings.quantize:
        raise ValueError("quantize needs the native back end; leave it out, or take a quantised file")
    if settings.draft_vocab:
        raise ValueError("draft_vocab needs the native back end; leave it out, and the draft chooses among all tokens")
    encoder = opened.config.encoder
    exact = encoder and settings.dtype == "auto" and settings.device.type == "cpu"
    dtype = pick_dtype("float32" if exact else settings.dtype, settings.device)
    if settings.kv_dtype not in {"auto", *DTYPES}:
        raise ValueError(f"torch keeps no KV in {settings.kv_dtype}; use kv_dtype auto, {', '.join(DTYPES)}")
    kv_type = dtype if settings.kv_dtype == "auto" else DTYPES[settings.kv_dtype]
    companions, groups = _beside(draft, amateur, heads)
    everyone = [opened, *companions]
    models = [load(each, dtype, settings.device) for each in everyone]
    own_kv = kv_shape(replace(opened.config, layers=opened.config.layers[:1])).block_bytes(BLOCK_SIZE, kv_type.itemsize)
    plan = memory.plan(
        _shortest(everyone),
        block_bytes=sum(kv_shape(each.config).block_bytes(BLOCK_SIZE, kv_type.itemsize) for each in everyone)
        + _features_bytes(heads, opened.config, dtype.itemsize, own_kv),
        block_size=BLOCK_SIZE,
        free=memory.free_memory(settings.device),
        max_num_seqs=min(settings.max_num_seqs, ENCODER_TEXTS) if encoder else settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        kv_cache_memory=settings.kv_cache_memory,
    )
    slots = Slots()
    pools = [KVPool(each.config, plan.num_blocks, BLOCK_SIZE, kv_type, settings.device) for each in everyone]
    runners = [TorchRunner(model, pool, settings.threads, slots) for model, pool in zip(models, pools, strict=True)]
    if heads is not None:
        runners.insert(1, TorchHeads(heads, runners[0], opened.source))
    _bound_hidden(runners[0].hidden, plan, settings.device)
    return Backend("torch", _together(runners, part, amateur is not None), plan, dtype, groups)


def _bound_hidden(hidden: HiddenStates, plan: memory.MemoryPlan, device: torch.device) -> None:
    """Have the hidden states of contrastive search checked against the memory plan when they are first needed."""
    hidden.afford = lambda need: memory.check_hidden_fits(plan, need, memory.free_memory(device))


def _together(runners: Sequence[ModelRunner], part: Part | None, amateur: bool) -> Runs:
    """One runner for them all; an amateur comes last."""
    target, *companions = runners
    if part is not None:
        companions = [SelfDraft(target, part), *companions]
    return Companions(target, companions, len(companions) if amateur else 0) if companions else target
