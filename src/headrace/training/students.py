"""Students of a distillation: some of the teacher's layers, a smaller random model, or any model with its vocabulary."""

import math
import re
from dataclasses import dataclass, replace

import torch

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_companion
from headrace.weights.loader import Allocator, fill, load_model
from headrace.weights.parts import plan

# Standard deviation of random weights.
SPREAD = 0.02
# The width of an MLP is a multiple of this.
FFN_MULTIPLE = 32
FORMS = "layers:0,1,5-9 (of the teacher's), depth=8, depth=8,width=384, share=2, or a model"
_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(slots=True)
class Student:
    """A filled model in float32.

    opened: the model whose settings and tokenizer it has. pairs: by layer, index of the teacher's layer to match.
    fresh: whether its weights are random.
    """

    model: Model
    opened: Opened
    pairs: list[int]
    fresh: bool = False


def student_of(wanted: str, opened: Opened, seed: int = 0) -> Student:
    """Make the student described by `wanted` (see FORMS) for an open teacher.

    Raises ValueError for an invalid description or a model with another vocabulary, and WeightError as the loader does.
    """
    config = opened.config
    if wanted.startswith("layers:"):
        return _of_layers(kept_layers(wanted.removeprefix("layers:"), config.num_layers), opened)
    if wanted.startswith("share="):
        return _of_layers(list(range(config.num_layers)), opened, shared_layers(wanted, config))
    if wanted.startswith(("depth=", "width=")):
        sizes = _sizes(wanted)
        depth = sizes.get("depth", config.num_layers)
        if "width" not in sizes or sizes["width"] == config.hidden_size:
            return _of_layers(spread(depth, config.num_layers), opened)
        model = _random(narrowed(config, depth, sizes["width"]), seed)
        return Student(model, opened, ends(depth, config.num_layers), fresh=True)
    other = open_companion(wanted, opened, "student")
    if other.config.encoder or other.config.source is not None:
        raise ValueError(f"{wanted} is not a decoder; a student generates token by token")
    model = load_model(other.source)
    return Student(model, other, ends(model.config.num_layers, config.num_layers))


def kept_layers(text: str, count: int) -> list[int]:
    """Parse "0,1,5-9" into ascending indices of `count` layers. Raises ValueError."""
    kept: list[int] = []
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"layers are numbers and ranges, as in layers:0,1,5-9, not {piece!r}")
        kept += range(int(first), int(last or first) + 1)
    if not kept or kept != sorted(set(kept)) or kept[-1] >= count:
        raise ValueError(f"layers must be ascending, 0 to {count - 1}, not {text}")
    return kept


def spread(depth: int, count: int) -> list[int]:
    """Choose `depth` of `count` layers evenly, with the first and the last. Raises ValueError."""
    if not 1 <= depth <= count:
        raise ValueError(f"a student of the teacher's layers has 1 to {count} of them, not {depth}")
    return [round(index * (count - 1) / max(1, depth - 1)) for index in range(depth)]


def ends(depth: int, count: int) -> list[int]:
    """Cut `count` layers into `depth` parts. Returns the index of the last layer of each part."""
    return [max(0, -(-(index + 1) * count // depth) - 1) for index in range(depth)]


def narrowed(config: ModelConfig, depth: int, width: int) -> ModelConfig:
    """Return the architecture with hidden size `width`: fewer heads of the same size, and an MLP in proportion.

    Raises ValueError if the width is no multiple of a head.
    """
    layer = config.each_layer
    unit = config.hidden_size // math.gcd(config.hidden_size, layer.heads, layer.kv_heads)
    if depth < 1 or width < 1 or width % unit:
        raise ValueError(
            f"width {width}, depth {depth}: the width must be a multiple of {unit} (whole heads), the depth at least 1"
        )
    ffn = -(-layer.ffn * width // (config.hidden_size * FFN_MULTIPLE)) * FFN_MULTIPLE
    heads, kv_heads = (count * width // config.hidden_size for count in (layer.heads, layer.kv_heads))
    small: LayerConfig = replace(layer, heads=heads, kv_heads=kv_heads, ffn=ffn)
    return replace(config, hidden_size=width, layers=(small,) * depth)


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for piece in text.split(","):
        name, _, number = piece.strip().partition("=")
        if name not in ("depth", "width") or not number.isdecimal() or name in sizes:
            raise ValueError(f"a student is {FORMS}, not {text!r}")
        sizes[name] = int(number)
    return sizes


def shared_layers(wanted: str, config: ModelConfig) -> int:
    """Parse `share=N`: the number of neighbouring layers that share one K and V. Raises ValueError."""
    number = wanted.removeprefix("share=")
    if not number.isdecimal() or not 2 <= int(number) <= config.num_layers:
        raise ValueError(f"share=N: the number of layers that share K and V must be 2 to {config.num_layers}, not {number!r}")
    if config.shares_kv:
        raise ValueError("layers share K and V already; begin with the original")
    return int(number)


def _of_layers(kept: list[int], opened: Opened, share: int = 1) -> Student:
    """Make a student of some of the teacher's layers, read from the teacher's file.

    share: number of neighbouring layers that read the K and V of the first of them.
    A layer is paired with the last layer before the next kept one.
    """
    whole = opened.config
    config = whole.of_layers(kept)
    model = describe(config.sharing(share) if share > 1 else config)
    plans = plan(describe(whole), opened.source)
    for path, holder in model.holders():
        holder.create(Allocator(torch.float32))
        teacher_path = _LAYER.sub(lambda match: f"layers.{kept[int(match[1])]}.", path)
        for name, spec in holder.params().items():
            # A layer that shares K and V has the query part alone.
            parts = plans[f"{teacher_path}.{name}"][: len(spec.parts)]
            fill(getattr(holder, name), parts, opened.source)
        holder.finish()
    return Student(model, opened, [after - 1 for after in [*kept[1:], whole.num_layers]])


def _random(config: ModelConfig, seed: int) -> Model:
    model, generator = describe(config), torch.Generator().manual_seed(seed)
    for _, holder in model.holders():
        holder.create(Allocator(torch.float32))
        for name in holder.params():
            weight = getattr(holder, name)
            if weight.dim() == 1:
                weight.fill_(1.0 if name == "weight" else 0.0)
            else:
                weight.normal_(std=SPREAD, generator=generator)
        holder.finish()
    return model
