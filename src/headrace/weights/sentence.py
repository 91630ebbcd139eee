"""Last steps of an embedding, from the files of sentence-transformers or GGUF metadata: pooling, dense matrices, prompts.

Needs no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.config import ModelConfig
from headrace.data.outputs import Embedding, unit_vector
from headrace.weights.decode import check_finite, read_floats
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import WeightError, WeightSource

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
LOGIT_SCORE = "LogitScore"  # of a reranker that is a decoder; weights.ranking reads it
KNOWN = ("Transformer", "Pooling", "Dense", "Normalize", LOGIT_SCORE)
# Keys of a Pooling module, and values of its key pooling_mode, by our names.
POOLING_KEYS = {"pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
POOLING_MODES = {"cls": "first", "mean": "mean", "lasttoken": "last"}
# Values of a GGUF file's pooling_type; 4 is a reranker's.
POOLING_TYPES = {1: "mean", 2: "first", 3: "last"}
# Matrices of bge-m3 for its sparse and its multi-vector output.
OTHER_OUTPUTS = ("sparse_linear", "colbert_linear")
ACTIVATIONS = ("Identity", "Tanh")
# Names of the prompt for documents, in the order in which sentence-transformers looks for them.
DOCUMENT = ("document", "passage", "corpus")
GGUF_DENSE = ("dense_2.weight", "dense_3.weight")


class PromptError(ValueError):
    """A prompt that the model does not have."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix [out, in] float32 after pooling, with its bias [out] and activation."""

    weight: np.ndarray
    bias: np.ndarray | None = None
    tanh: bool = False

    def __call__(self, row: np.ndarray) -> np.ndarray:
        """The outputs [out] float64 of a row [in]."""
        outputs: np.ndarray = self.weight.astype(np.float64) @ row
        outputs = outputs if self.bias is None else outputs + self.bias
        return np.tanh(outputs) if self.tanh else outputs


@dataclass(frozen=True, slots=True)
class Sentence:
    """How a model's hidden rows become an embedding.

    pooling: first, last or mean. prompts: texts that stand before a text, by name. default: name of the prompt of a text
    without one.
    """

    pooling: str
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None

    def width(self, hidden: int) -> int:
        """Values of an embedding, of a model with hidden rows of `hidden`."""
        return len(self.dense[-1].weight) if self.dense else hidden

    def vector(self, pooled: Sequence[float], tokens: int, pooling: str, dimensions: int | None = None) -> list[float]:
        """The embedding, of length 1, of a text's pooled row; the sum of its `tokens` rows if pooling is mean."""
        if not self.dense:
            return unit_vector(pooled, dimensions)
        row = np.asarray(pooled, np.float64) / (tokens if pooling == "mean" else 1)
        for dense in self.dense:
            row = dense(row)
        return unit_vector(row.tolist(), dimensions)

    def embedding(
        self, token_ids: list[int], pooled: Sequence[float], pooling: str, dimensions: int | None = None
    ) -> Embedding:
        """The embedding of a text; see `vector`."""
        return Embedding(token_ids, self.vector(pooled, len(token_ids), pooling, dimensions))

    def check_dimensions(self, dimensions: int | None, hidden: int) -> None:
        """Raise ValueError for a number of dimensions that embeddings of a model with hidden rows of `hidden` do not have."""
        if dimensions is not None and not 1 <= dimensions <= (size := self.width(hidden)):
            raise ValueError(f"dimensions must be 1 to {size} of this model, not {dimensions}")

    def with_prompt(self, batch: Sequence[Any], name: str | None) -> list[Any]:
        """Texts with a prompt before each of them; token ids stay. Raises ValueError (PromptError)."""
        if name is not None and not all(isinstance(text, str) for text in batch):
            raise ValueError("prompt_name needs texts, not token ids; put the prompt's tokens in front of them")
        prompt = self.prompt(name)
        return [prompt + text if isinstance(text, str) else text for text in batch]

    def prompt(self, name: str | None) -> str:
        """The text of a prompt; None is the model's default, which may be empty. Raises PromptError for an unknown name."""
        if name is None:
            return "" if self.default is None else self.prompts[self.default]
        names = DOCUMENT if name == "document" else (name,)
        stored = next((each for each in names if each in self.prompts), None)
        if stored is None:
            known = f"it has {', '.join(self.prompts)}" if self.prompts else "it has none: write it into the texts"
            raise PromptError(f"this model has no prompt {name[:40]!r}; {known}")
        return self.prompts[stored]


def read_sentence(path: Path, source: WeightSource, config: ModelConfig) -> Sentence:
    """The last steps of a model's embeddings. Raises WeightError for a module or a mode that is not supported."""
    usual = "mean" if config.encoder else "last"
    if source.format == "gguf":
        return _from_gguf(source, usual)
    if not path.is_dir():  # a ggml file has no modules
        return Sentence(usual)
    prompts, default = _prompts(path / PROMPTS)
    if not (path / MODULES).is_file():
        pooling = _pooling(path / "1_Pooling" / "config.json", usual) if config.encoder else usual
        return Sentence(pooling, (), prompts, default)
    pooling, dense = usual, []
    for kind, folder in read_modules(path):
        if kind not in KNOWN:
            raise WeightError(f"{path / MODULES}: the module {kind!r:.40} is not supported; known are {', '.join(KNOWN)}")
        if kind == "Pooling":
            pooling = _pooling(folder / "config.json", usual)
        elif kind == "Dense":
            dense.append(_dense(folder))
    _check_widths(path / MODULES, config.hidden_size, dense)
    return Sentence(pooling, tuple(dense), prompts, default)


def unread_outputs(path: Path) -> list[str]:
    """Files of a folder for outputs that embeddings do not have: sparse and multi-vector ones."""
    return [file.name for name in OTHER_OUTPUTS for file in sorted(path.glob(f"{name}.*"))] if path.is_dir() else []


def read_modules(path: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module of a folder. Raises WeightError."""
    modules = _json(path / MODULES)
    found = []
    for module in modules if isinstance(modules, list) else [None]:
        name = module.get("path") if isinstance(module, dict) else None
        if not isinstance(module, dict) or not isinstance(name, str) or name in (".", "..") or Path(name).name != name:
            raise WeightError(f"{path / MODULES}: must be a list of modules, each with a type and a folder next to this file")
        found.append((str(module.get("type")).rpartition(".")[2], path / name))
    return found


def _pooling(path: Path, usual: str) -> str:
    """The mode of a Pooling module; `usual` if the file is missing."""
    settings = _json(path, {})
    if not isinstance(settings, dict):
        raise WeightError(f"{path}: must be a JSON object")
    modes = {key.removeprefix("pooling_mode_"): POOLING_KEYS.get(key) for key in settings if key.startswith("pooling_mode_")}
    chosen = {name: mode for name, mode in modes.items() if settings[f"pooling_mode_{name}"]}
    if "pooling_mode" in settings:
        chosen = {str(settings["pooling_mode"]): POOLING_MODES.get(str(settings["pooling_mode"]))}
    if not chosen:
        return usual
    pooling = next(iter(chosen.values()))
    if len(chosen) > 1 or pooling is None:
        raise WeightError(
            f"{path}: the pooling {' + '.join(chosen)!r:.60} is not supported; known are {', '.join(POOLING_MODES)}"
        )
    if settings.get("include_prompt") is False:
        raise WeightError(f"{path}: asks for a pooling without the prompt's tokens, which is not supported")
    return pooling


def _dense(folder: Path) -> Dense:
    settings = _json(folder / "config.json")
    name = str(settings.get("activation_function") if isinstance(settings, dict) else None).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise WeightError(f"{folder}: the activation {name!r:.40} is not supported; known are {', '.join(ACTIVATIONS)}")
    with SafetensorsFolder(folder) as source:
        weight = _finite(source, "linear.weight")
        bias = _finite(source, "linear.bias") if "linear.bias" in source.names() else None
    return Dense(weight, bias, name == "Tanh")


def _finite(source: WeightSource, name: str) -> np.ndarray:
    values = read_floats(source, name)
    check_finite(values, np.float32, name, source)
    return values


def _check_widths(path: Path, width: int, dense: Sequence[Dense]) -> None:
    for one in dense:
        if one.weight.ndim != 2 or one.weight.shape[1] != width or (one.bias is not None and len(one.bias) != len(one.weight)):
            raise WeightError(f"{path}: a dense matrix is {' x '.join(map(str, one.weight.shape))} and reads {width} values")
        width = len(one.weight)


def _from_gguf(source: Any, usual: str) -> Sentence:
    kind = source.metadata.get(f"{source.metadata.get('general.architecture')}.pooling_type")
    dense = [Dense(_finite(source, name)) for name in GGUF_DENSE if name in source.names()]
    return Sentence(POOLING_TYPES.get(kind, usual), tuple(dense))


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the default one."""
    settings = _json(path, {})
    prompts = settings.get("prompts") if isinstance(settings, dict) else None
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise WeightError(f"{path}: prompts must be texts by name")
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise WeightError(
            f"{path}: default_prompt_name {default!r:.40} is none of the prompts: {', '.join(prompts) or 'there are none'}"
        )
    return prompts, default


def _json(path: Path, missing: Any = None) -> Any:
    """The JSON value of a file; `missing`, if not None, without the file. Raises WeightError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and missing is not None:
            return missing
        raise WeightError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None
