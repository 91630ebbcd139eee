"""Files of trained heads: heads.json (description and model) and heads.safetensors (weights)."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace.runner.heads import EXIT, FEATURE, HEADS, Heads, Tensors, classifier_shapes, shapes
from headrace.startup.opening import Opened
from headrace.weights.atomic_file import atomic_write
from headrace.weights.source import HEADS_INFO

WEIGHTS = "heads.safetensors"
VERSION = 1
# Value of exit_layers for all exits of a folder.
ALL = "all"
# The signature contains every 97th token of the vocabulary.
EVERY = 97
MAX_HEADS = 16
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Info(msgspec.Struct, frozen=True):
    """The fields of heads.json.

    model: name for the user. fits: signature of the model. trained: training settings for the user.
    count: tokens that the heads predict at once, or that a feature layer was trained to draft; for exits, their number.
    layers: number of the model's layers below each exit. drafts: the exit with this many layers drafts.
    prompts: hash (training.overlap) of each training prompt of the caller, empty if the model wrote the prompts; None: not
    recorded.
    """

    kind: str
    model: str
    fits: str
    hidden_size: Size
    vocab_size: Size
    count: Size
    trained: dict[str, float | str] = {}
    layers: tuple[Size, ...] = ()
    drafts: Size = 0
    version: Size = VERSION
    prompts: tuple[str, ...] | None = None


def save(
    folder: Path, heads: Heads, target: Opened, trained: dict[str, float | str], prompts: Sequence[str] | None = None
) -> None:
    """Write both files atomically. Weights are stored in bfloat16."""
    c = target.config
    sizes = c.hidden_size, c.vocab_size, heads.count
    asked = None if prompts is None else tuple(prompts)
    info = Info(heads.kind, target.path.name, signature(target), *sizes, trained, heads.layers, heads.drafts, prompts=asked)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.to(torch.bfloat16) if x.is_floating_point() else x for name, x in heads.tensors.items()}
    with atomic_write(folder / WEIGHTS) as part:
        save_file({name: x.detach().contiguous() for name, x in tensors.items()}, part)
    with atomic_write(folder / HEADS_INFO) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")


def trained_on(folder: str | Path) -> tuple[str, ...] | None:
    """Hashes of the prompts that trained the heads in a folder; None if it does not record them. Raises ValueError."""
    return _info(Path(folder)).prompts


def _info(place: Path) -> Info:
    try:
        return msgspec.json.decode((place / HEADS_INFO).read_bytes(), type=Info)
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unreadable(place, error) from None


def _unreadable(place: Path, error: Exception) -> ValueError:
    return ValueError(f"{place}: these heads cannot be read ({' '.join(str(error).split())[:200]})")


def load(folder: str | Path, target: Opened) -> Heads:
    """Load heads. Raises ValueError, one line, if they cannot be read or belong to another model."""
    place, c = Path(folder), target.config
    info = _info(place)
    try:
        tensors = load_file(place / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _unreadable(place, error) from None
    if info.kind not in (HEADS, FEATURE, EXIT) or info.version != VERSION or not 1 <= info.count <= MAX_HEADS:
        raise ValueError(
            f"{place}: heads of this kind or version ({info.kind!r:.100}, {info.version}) are unknown; train them again"
        )
    if (info.hidden_size, info.vocab_size) != (c.hidden_size, c.vocab_size):
        raise ValueError(
            f"{place}: these heads are for {info.model!r:.100} ({info.hidden_size} hidden values, {info.vocab_size} tokens), "
            f"and {target.name} has {c.hidden_size} and {c.vocab_size}; train heads for it: headrace train-heads {target.name}"
        )
    if info.fits != signature(target):
        raise ValueError(
            f"{place}: these heads are for {info.model!r:.100}, and {target.name} is another model; "
            f"train heads for it: headrace train-heads {target.name}"
        )
    heads = Heads(info.kind, info.count, tensors, info.layers, info.drafts)
    check_exits(place, heads, c.num_layers)
    _check(place, heads, target)
    return heads


def signature(target: Opened) -> str:
    """Signature of architecture, size and vocabulary. It does not depend on the number format of the weights."""
    c, layer = target.config, target.config.layers[0]
    numbers = (c.hidden_size, c.vocab_size, c.num_layers, layer.heads, layer.kv_heads, layer.head_dim, layer.ffn)
    sign = hashlib.sha256(" ".join(map(str, numbers)).encode())
    for token in range(0, c.vocab_size, EVERY):
        sign.update(target.tokenizer.token_bytes(token) + b"\0")
    return sign.hexdigest()[:32]


def check_exits(place: Path, heads: Heads, layers: int) -> None:
    """Raise ValueError for exits at layers that a model with `layers` layers does not have, and for other heads with layers."""
    stand = list(heads.layers)
    if heads.kind != EXIT and not stand and not heads.drafts:
        return
    if heads.kind != EXIT or len(stand) != heads.count or stand != sorted(set(stand)) or not 0 < stand[0] <= stand[-1] < layers:
        raise ValueError(f"{place}: exits stand after different layers, ascending, 1 to {layers - 1} of them; train them again")
    if heads.drafts not in stand:
        raise ValueError(
            f"{place}: no exit stands after {heads.drafts} layers, only after {', '.join(map(str, stand))}; set drafts to one"
        )


def choose_exits(folder: str | Path, heads: Heads, exit_layers: str) -> Heads:
    """The heads with all exits in use, or those after the named layers ("10,20"). Raises ValueError for other layers."""
    if heads.kind != EXIT:
        raise ValueError(f"{folder}: these heads are not exits, so exit_layers names none of them; leave it out")
    chosen = heads.layers
    if exit_layers != ALL:
        asked = [part.strip() for part in exit_layers.split(",")]
        chosen = tuple(layers for layers in heads.layers if str(layers) in asked)
        if {str(layers) for layers in chosen} != set(asked):
            stand = ", ".join(map(str, heads.layers))
            raise ValueError(
                f"exit_layers={exit_layers!r}: the exits in {folder} stand after {stand} layers; name some, or all"
            )
    return replace(heads, several=chosen)


def _check(place: Path, heads: Heads, target: Opened) -> None:
    """Raise ValueError for a missing tensor, a wrong shape, or a value that is not finite."""
    wanted: dict[str, tuple[int, ...]] = shapes(heads.kind, heads.count, target.config)
    wanted |= classifier_shapes(heads.count, target.config) if heads.judges else {}
    tensors: Tensors = heads.tensors
    for name, shape in wanted.items():
        if name not in tensors or tuple(tensors[name].shape) != shape or tensors[name].dtype != torch.bfloat16:
            raise ValueError(f"{place}: tensor {name!r} is missing or not of the shape {shape}; train the heads again")
        if not bool(torch.isfinite(tensors[name].float()).all()):
            raise ValueError(f"{place}: tensor {name!r} has values that are NaN or infinite; train the heads again")
    ids = tensors.get("vocab")
    if set(tensors) - set(wanted) != {"vocab"} or ids is None or ids.dtype != torch.int32 or ids.ndim != 1 or not len(ids):
        raise ValueError(f"{place}: what else the heads hold should be their vocabulary; train the heads again")
    if int(ids[0]) < 0 or int(ids[-1]) >= target.config.vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(f"{place}: the heads' vocabulary is damaged; train the heads again")
