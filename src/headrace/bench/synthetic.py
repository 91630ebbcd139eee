"""GGUF files of published shapes with random weights: for the speed and memory of models that are not on this machine.

The weights have the scale of an initialised model, so all numbers stay finite; the text means nothing. A tensor repeats one
tile of random rows, which costs no kernel less than different rows would.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.compress.grids.encode import WRITTEN, encode
from headrace.data.config import ModelConfig
from headrace.models import gguf
from headrace.models.configs import read_config
from headrace.models.families import FAMILIES
from headrace.models.same_config import differing_settings
from headrace.startup.fit.headers import PlannedSource, config_of, number_format, planned
from headrace.text.gguf_vocab import CONTROL, KEY, NORMAL, UNUSED
from headrace.text.vocabulary import CHAR_OF_BYTE
from headrace.weights.gguf import entry, file_size, write_gguf
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.store import require_space

TILE = 64  # rows
TILES_AT_ONCE = 64  # in one piece of a tensor


@dataclass(frozen=True, slots=True)
class SyntheticFile:
    """A written file. bits: the mean of a parameter."""

    path: Path
    config: ModelConfig
    parameters: int
    bytes: int
    bits: float


def write_synthetic(shape: str, out: Path, weights: str = "Q4_K_M", layers: int | None = None, seed: int = 0) -> SyntheticFile:
    """Write a GGUF file of this shape to `out`.

    shape: a catalog name, or a config.json or a folder with one. weights: a mix (Q4_K_M) or one kind (Q8_0). layers: replaces
    the shape's number. Raises ValueError (WeightError), one line, for a shape or a kind that cannot be written, and OSError.
    """
    values = dict(config_of(shape))
    if layers is not None:
        values = _with_layers(values, layers)
    config = gguf.with_gguf_architecture(read_config(PlannedSource(Path(shape), "safetensors", values)))
    shape_keys = _metadata(config)
    tensors = planned(config, number_format(weights)).tensors
    others = gguf.made_tensors(config)
    infos = [*tensors.values(), *(TensorInfo(name, data.shape, "F32", data.nbytes) for name, data in others.items())]
    if unwritten := sorted({info.kind for info in infos} - set(WRITTEN)):
        raise WeightError(f"--weights {weights}: {unwritten[0]} cannot be written; choose one of {', '.join(WRITTEN)}")
    keys = shape_keys | {"general.name": f"{Path(shape).stem} (random weights)"} | _vocabulary(config.vocab_size)
    entries = [entry(key, value) for key, value in keys.items()]
    nbytes = file_size(entries, infos)
    require_space(out.absolute().parent, nbytes)

    def chunks() -> Iterator[tuple[str, np.ndarray]]:
        for info in tensors.values():
            yield from ((info.name, piece) for piece in _pieces(info, seed))
        yield from ((name, data.view(np.uint8)) for name, data in others.items())

    write_gguf(out, entries, infos, chunks())
    parameters = sum(int(np.prod(info.shape, dtype=np.int64)) for info in tensors.values())
    return SyntheticFile(out, config, parameters, nbytes, 8 * sum(info.nbytes for info in infos) / parameters)


def _metadata(config: ModelConfig) -> dict[str, Any]:
    """Metadata keys of the shape. Raises WeightError if a GGUF file with them has another config."""
    family = FAMILIES[config.architecture]
    if config.encoder or config.source is not None or isinstance(family.gguf, str):
        raise WeightError(f"{config.architecture}: shapes of decoders that GGUF files can hold are written; use another shape")
    keys = gguf.metadata(config, family.gguf_name)
    divisors = gguf.made_tensors(config)
    source = _HeaderSource(Path(config.architecture), "gguf", {}, planned(config, "F32").tensors, keys, divisors)
    source.tensors |= {name: TensorInfo(name, data.shape, "F32", data.nbytes) for name, data in divisors.items()}
    if changed := differing_settings(config, read_config(source)):
        raise WeightError(
            f"{config.architecture}: the GGUF file of this shape would have another {', '.join(changed)}; use another shape"
        )
    return keys


@dataclass(slots=True)
class _HeaderSource(PlannedSource):
    """A GGUF file that is not written yet: metadata, tensors without values, and values of the rotary divisors."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)

    def raw(self, name: str) -> np.ndarray:
        return self.values[name]


def _with_layers(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config with another number of layers. Raises ValueError."""
    if layers < 1:
        raise ValueError(f"--layers {layers}: must be 1 or more")
    name = "n_layer" if "n_layer" in values else "num_hidden_layers"
    cut = {key: value[:layers] for key, value in values.items() if key == "layer_types" and isinstance(value, list)}
    return {**values, **cut, name: layers}


def _pieces(info: TensorInfo, seed: int) -> Iterator[np.ndarray]:
    """The bytes of a tensor: norms of 1, biases of 0, and matrices of which a row keeps the scale of its input."""
    if len(info.shape) == 1:
        fill = np.zeros if info.name.endswith(".bias") else np.ones
        yield fill(info.shape, np.float32).view(np.uint8)
        return
    columns, rows = info.shape[-1], info.rows
    rng = np.random.default_rng((seed, zlib.crc32(info.name.encode())))
    values = rng.standard_normal((min(TILE, rows), columns), np.float32) / np.float32(columns**0.5)
    tile = encode(values, info.kind).reshape(-1)
    several = np.tile(tile, min(TILES_AT_ONCE, -(-info.nbytes // tile.size)))
    for start in range(0, info.nbytes, several.size):
        yield several[: min(several.size, info.nbytes - start)]


def _vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a vocabulary that has a token for each byte, an end token, and unused ones. Raises WeightError if `size` is
    too small."""
    texts = [CHAR_OF_BYTE[byte] for byte in range(256)] + ["<|end|>"]
    if size < len(texts):
        raise WeightError(f"a vocabulary of {size} tokens has no room for {len(texts)}; use another shape")
    unused = size - len(texts)
    kinds = [NORMAL] * 256 + [CONTROL] + [UNUSED] * unused
    return {
        KEY + "model": "gpt2",
        KEY + "pre": "gpt-2",
        KEY + "tokens": texts + [f"<unused{number}>" for number in range(unused)],
        KEY + "token_type": np.array(kinds, np.int32),
        KEY + "merges": [],
        KEY + "eos_token_id": 256,
    }
