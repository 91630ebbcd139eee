"""Open a model for the planner: a file, a folder, a config.json, or a catalog name, downloaded or not. Reads headers alone."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace import core
from headrace.data.config import ModelConfig
from headrace.models.base import Model
from headrace.models.configs import read_config
from headrace.models.families import FAMILIES
from headrace.models.gguf import with_gguf_architecture
from headrace.models.registry import describe
from headrace.startup.fit.formulas import shape_by_formula
from headrace.startup.fit.shapes import ModelShape, shape_of
from headrace.weights import catalog, hub, names
from headrace.weights.ctranslate2 import is_ctranslate2
from headrace.weights.gguf import GGUFFile
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.mixes import HEAD, MIXES, SHORT, TABLE, mix_in, tensor_kind
from headrace.weights.parts import stored_as
from headrace.weights.schemes.folder import open_weights
from headrace.weights.source import TensorInfo, WeightError, WeightSource
from headrace.weights.store import expand
from headrace.weights.text_part import text_settings

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Keys of a config.json by the names of GGUF metadata after the architecture.
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "vocab_size": "vocab_size",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": "attention.value_length_mla",
    "state_size": "ssm.state_size",
    "conv_kernel": "ssm.conv_kernel",
    "mamba_d_inner": "ssm.inner_size",
    "time_step_rank": "ssm.time_step_rank",
}


@dataclass(slots=True)
class PlannedSource:
    """A WeightSource of names, shapes and number formats that has no values: a model that is not on this machine."""

    path: Path
    format: Literal["gguf", "safetensors"]
    config: Mapping[str, Any]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        raise WeightError(f"{self.path}: {name} has no values before the model is downloaded")

    def columns(self, name: str) -> None:
        """None: in order."""

    def mapped(self, name: str) -> bool:
        return False

    def release(self, name: str) -> None:
        """Nothing to release."""

    def close(self) -> None:
        """Nothing to close."""


def open_shape(model: str, weights: str = "", quantize: str = "", rope: str | None = None) -> ModelShape:
    """Shape of a model. weights: number format of the matrices of a model without files, a mix (Q4_K_M) or a kind (BF16).
    rope: as in `read_config`, for a model with files.

    Raises WeightError or HubError, and RuntimeError without the compiled core, one line each.
    """
    core.module()  # the packed sizes are its own
    target = named.model if (named := names.find(model)) is not None else model
    entry, path = catalog.load().get(target), expand(target)
    if entry is None and _is_config(path):
        return _from_config(_read(path if path.is_file() else path / "config.json"), path, model, weights, quantize)
    try:
        place = hub.resolve(target, download=False)
    except hub.HubError:
        if entry is None or not entry.config:
            raise
        shape = _from_config(entry.config, Path(entry.file), model, weights or mix_in(entry.file) or "", quantize)
        return replace(shape, origin="the catalog; the model is not downloaded")
    source = open_weights(place)
    if weights:
        raise ValueError(f"--weights is the format of a model without files, and {model} has them; leave it out")
    try:
        return shape_of(read_config(source, rope), source, model, quantize)
    except WeightError as error:
        return _unsupported(source, model, str(error))


def config_of(model: str) -> Mapping[str, Any]:
    """The settings of a shape, as a config.json has them: of the catalog by name, or of a file or folder.

    Raises WeightError, one line.
    """
    entry, path = catalog.load().get(model), expand(model)
    if entry is not None and entry.config:
        return entry.config
    if path.is_file() and path.suffix == ".json":
        return _read(path)
    if (path / "config.json").is_file():
        return _read(path / "config.json")
    raise WeightError(f"{model} is no shape; give a name of the catalog, a config.json, or a folder with one")


def _is_config(path: Path) -> bool:
    """Whether a path is a config.json, or a folder with one and no weights."""
    if path.is_file():
        return path.suffix == ".json"
    without_weights = not any(path.glob("*.safetensors")) and not is_ctranslate2(path)
    return path.is_dir() and (path / "config.json").is_file() and without_weights


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise WeightError(f"{path}: cannot be read ({error}); take the config.json of a model") from None
    if not isinstance(values, dict):
        raise WeightError(f"{path}: is not a JSON object; use the config.json of a model")
    return values


def _from_config(values: Mapping[str, Any], path: Path, name: str, weights: str, quantize: str) -> ModelShape:
    """Shape of a model without files; matrices have the number formats that `weights` gives them."""
    plain = {key: value for key, value in values.items() if key != "quantization_config"}
    chosen = number_format(weights) if weights else _format_of(values)
    source = PlannedSource(path, "safetensors", text_settings(plain) or plain)
    try:
        config = read_config(source)
    except WeightError as error:
        tied = bool(values.get("tie_word_embeddings", False))
        like = ModelConfig("unknown", 1, 1, (), 1, tied_head=tied)
        return shape_by_formula(values, str(path), name, _kinds(chosen, like), str(error))
    shaped = planned(config, chosen, path)
    stored = with_gguf_architecture(config) if shaped.format == "gguf" else config
    shape = shape_of(stored, shaped, name, quantize, f"keys of {path.name}, weights as {chosen}")
    return replace(shape, architecture=config.architecture)


def planned(config: ModelConfig, chosen: str, path: Path = Path("model")) -> PlannedSource:
    """A source with the tensors that a GGUF file of the mix has, or a folder, if there are no GGUF files of the family."""
    stored = with_gguf_architecture(config)
    container: Literal["gguf", "safetensors"] = "safetensors" if isinstance(FAMILIES[stored.architecture].gguf, str) else "gguf"
    model: Model = describe(stored if container == "gguf" else config)
    kind_of = _kinds(chosen, model.config)
    tensors = {}
    for name, parts in stored_as(model, container).items():
        shape = parts[0].stored
        kind = kind_of(name, shape[-1]) if len(shape) > 1 else "F32"
        tensors[name] = TensorInfo(name, shape, kind, prod(shape) // KINDS[kind].block * KINDS[kind].nbytes)
    return PlannedSource(path, container, {}, tensors)


def number_format(weights: str) -> str:
    """A mix or kind by its name, in any case. Raises ValueError for an unknown one."""
    name = SHORT.get(weights.upper(), weights.upper())
    if name not in MIXES and name not in KINDS:
        raise ValueError(f"--weights {weights}: unknown number format; use one of {', '.join(dict.fromkeys((*MIXES, *KINDS)))}")
    return name


def _format_of(values: Mapping[str, Any]) -> str:
    """Number format that a config names: groups of 4 or 8 bits, or its dtype."""
    text = values.get("text_config")
    stated = values.get("dtype") or values.get("torch_dtype") or (isinstance(text, Mapping) and text.get("torch_dtype"))
    dtype = DTYPES.get(str(stated), "BF16")
    quantised = values.get("quantization_config")
    if not isinstance(quantised, Mapping) or quantised.get("quant_method") not in ("gptq", "awq"):
        return dtype
    group = 32 if quantised.get("group_size") == 32 else 128
    return f"G{8 if quantised.get('bits') == 8 else 4}_{group}"


def _kinds(chosen: str, config: ModelConfig) -> Callable[[str, int], str]:
    """Kind of a tensor by name and columns. Kinds outside GGUF are for matrices of layers; tables stay BF16."""

    def kind_of(name: str, columns: int) -> str:
        if chosen in MIXES:
            return tensor_kind(chosen, name, columns, config)
        return "BF16" if name in (TABLE, HEAD) or columns % KINDS[chosen].block else chosen

    return kind_of


def _unsupported(source: WeightSource, name: str, refusal: str) -> ModelShape:
    """Shape of a file that Headrace does not run: weights by its tensors, K/V and operations by formula."""
    infos = [source.info(each) for each in source.names()]
    kinds = [info.kind for info in infos if len(info.shape) > 1]
    chosen = max(kinds, key=kinds.count, default="BF16")
    values = _metadata_keys(source.metadata, infos) if isinstance(source, GGUFFile) else dict(source.config)  # type: ignore[attr-defined]
    if isinstance(source, GGUFFile) and not kinds:
        raise WeightError(refusal)
    try:
        shape = shape_by_formula(values, source.path.name, name, lambda _, columns: _whole(chosen, columns), refusal)
    except WeightError:
        raise WeightError(refusal) from None
    stored = sum(_packed(info) for info in infos)
    return replace(shape, stored=stored, origin=f"tensors of {source.path.name}; K/V and operations by formula")


def _whole(kind: str, columns: int) -> str:
    """The kind, or BF16 if rows are not whole blocks of it."""
    return "BF16" if kind not in KINDS or columns % KINDS[kind].block else kind


def _packed(info: TensorInfo) -> int:
    if len(info.shape) == 1:
        return 4 * prod(info.shape)
    if info.kind not in KINDS:
        return info.nbytes
    return int(core.module().packed_bytes("F32" if info.kind in FLOATS else info.kind, info.rows, info.shape[-1], ""))


def _metadata_keys(metadata: Mapping[str, Any], infos: list[TensorInfo]) -> dict[str, Any]:
    """GGUF metadata by the keys of a config.json; of values by layer the largest."""
    name = str(metadata.get("general.architecture", ""))
    made: dict[str, Any] = {"model_type": name}
    for key, gguf in GGUF_KEYS.items():
        value = metadata.get(f"{name}.{gguf}")
        if value is not None:
            made[key] = int(max(value)) if isinstance(value, np.ndarray) else value
    table = next((info for info in infos if info.name == TABLE), None)
    if table is not None:
        made["vocab_size"] = table.shape[0]
    made["tie_word_embeddings"] = all(info.name != HEAD for info in infos)
    if "kv_lora_rank" in made:
        whole = metadata.get(f"{name}.attention.key_length_mla", metadata.get(f"{name}.attention.key_length", 0))
        made["qk_nope_head_dim"] = int(whole) - int(made.get("qk_rope_head_dim", 0))
        made.setdefault("v_head_dim", metadata.get(f"{name}.attention.value_length"))
    return made
