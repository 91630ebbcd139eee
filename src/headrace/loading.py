"""From what a caller calls a model to everything an engine needs of it: weights, tokenizer, template, defaults."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headrace.config import ModelConfig
from headrace.memory import check_weights_fit, free_memory
from headrace.models.base import Model
from headrace.models.registry import read_config
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.weights import catalog, hub
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from headrace.weights.progress import Progress
from headrace.weights.safetensors import SafetensorsFolder

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


@dataclass(slots=True)
class Opened:
    """A model's files, open; weights are read when `load` is called."""

    name: str
    path: Path
    source: GGUFFile | SafetensorsFolder
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    eos_ids: frozenset[int]
    sampling: dict[str, Any] = field(default_factory=dict)  # the catalog's or the model's own settings
    system: str | None = None
    pooling: str = "last"  # what its embeddings are pooled from: first | last | mean

    def load(self, dtype: torch.dtype, device: torch.device) -> Model:
        """The torch model, in memory. Raises DoesNotFit, WeightError."""
        elements = sum(_elements(self.source.info(name).shape) for name in self.source.names())
        check_weights_fit(elements * dtype.itemsize, free_memory(device), self.name)
        return load_model(self.source, dtype, device)


def open_model(model: str | Path, progress: Progress | None = None, *, download: bool = True) -> Opened:
    """Find (or pull) a model and open it: a catalog name, a .gguf path, a folder, a hub id.

    Raises HubError, WeightError, TokenizerError, TemplateError: one clear line each.
    """
    entries = catalog.load()
    path = hub.resolve(str(model), entries=entries, progress=progress, download=download)
    entry = entries.get(str(model))
    source = SafetensorsFolder(path) if path.is_dir() else GGUFFile(path)
    config = read_config(source)
    if isinstance(source, GGUFFile):
        tokenizer = Tokenizer.from_gguf(source.metadata)
        generation: Mapping[str, Any] = {}
    else:
        tokenizer = Tokenizer.from_folder(path)
        generation = _read_json(path / "generation_config.json")
    sampling = dict(entry.sampling) if entry is not None else _own_settings(generation)
    return Opened(
        name=str(model),
        path=path,
        source=source,
        config=config,
        tokenizer=tokenizer,
        template=ChatTemplate.of(tokenizer),
        eos_ids=frozenset(tokenizer.eos_ids) | _ids(generation.get("eos_token_id")),
        sampling=sampling,
        system=entry.chat.system if entry is not None else None,
        pooling=_pooling(path) if config.encoder else "last",
    )


def open_companion(model: str | Path, target: Opened, role: str, progress: Progress | None = None) -> Opened:
    """Open a model that works beside another one, whose tokens it must have. Raises ValueError besides what opening does."""
    opened = open_model(model, progress)
    if opened.path != target.path and (difference := opened.tokenizer.differs(target.tokenizer)):
        raise ValueError(
            f"{model} cannot be the {role} of {target.name}: their vocabularies differ ({difference}); "
            "choose a smaller model of the same family"
        )
    return opened


def pick_device(device: str) -> torch.device:
    """auto: the first GPU if there is one, else the CPU. Raises ValueError for a device torch cannot use."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for and torch sees no GPU; use device='cpu'")
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the device computes in it, else float32."""
    if dtype == "auto":
        fast = device.type == "cuda" or "avx512_bf16" in _cpu_flags() or "amx_bf16" in _cpu_flags()
        return torch.bfloat16 if fast else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read ({error}); repair or remove it") from None
    return data if isinstance(data, dict) else {}


def _pooling(folder: Path) -> str:
    """What an encoder was trained with, as sentence-transformers writes it; the mean where nothing is said."""
    said = _read_json(folder / "1_Pooling" / "config.json")
    if said.get("pooling_mode_cls_token"):
        return "first"
    return "last" if said.get("pooling_mode_lasttoken") else "mean"


def _own_settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json says of sampling; greedy where it says do_sample false."""
    settings = {name: generation[name] for name in GENERATION_FIELDS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        settings["temperature"] = 0.0
    return settings


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
