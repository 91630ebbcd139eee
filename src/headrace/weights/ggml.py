"""ggml files of whisper.cpp (`ggml-base.bin`), read as the tensors of a Hugging Face folder.

The file: a magic number; eleven sizes and the number format (int32); the mel filters (int32 bins, int32 frequencies, float32);
the words of the vocabulary (int32 count; each int32 length and bytes), without control tokens; then tensors up to the end of
the file: number of dimensions, length of the name, type (int32), the dimensions (int32, innermost first), name, data. All
numbers are little-endian, and nothing is aligned.
"""

import math
import mmap
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.weights.gguf import TYPE_NAMES
from headrace.weights.kinds import KINDS, NOT_GGUF
from headrace.weights.model_files import GGML_MAGIC
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import TensorInfo, WeightError

FREQUENCIES = 201  # of a spectrum of 400 samples
MAX_DIMS = 3
MAX_WORD, MAX_NAME, MAX_TENSORS = 256, 128, 100_000  # bytes, bytes
MAX_LAYERS, MAX_WIDTH, MAX_ROWS, MAX_BINS = 1024, 1 << 16, 1 << 20, 1024
HALF = (MAX_WIDTH, MAX_WIDTH, MAX_LAYERS)
MOST = (MAX_ROWS, MAX_ROWS, *HALF, MAX_ROWS, *HALF, MAX_BINS)  # of `Sizes` without the format
# The file's number format is `VERSIONED * version + format`; blocks have had float16 scales since version 2.
VERSIONED, BLOCKS_VERSION, PLAIN_FORMATS = 1000, 2, (0, 1)
# Control tokens by id follow the words. whisper.cpp derives them from the size of the vocabulary, too.
LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi "
    "ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd "
    "gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
).split()
BEFORE_LANGUAGES = ("endoftext", "startoftranscript")
AFTER_LANGUAGES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
SECONDS = 0.02  # of a timestamp

TABLES = {
    "encoder.positional_embedding": "encoder.embed_positions.weight",
    "decoder.positional_embedding": "decoder.embed_positions.weight",
    "decoder.token_embedding.weight": "decoder.embed_tokens.weight",
}
MODULES = {
    "encoder.conv1": "encoder.conv1",
    "encoder.conv2": "encoder.conv2",
    "encoder.ln_post": "encoder.layer_norm",
    "decoder.ln": "decoder.layer_norm",
}
PARTS = {
    "attn_ln": "self_attn_layer_norm",
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj",
    "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn.out": "encoder_attn.out_proj",
    "mlp_ln": "final_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
}
BLOCK = re.compile(r"(encoder|decoder)\.blocks\.(\d{1,4})\.(.+)")


class Sizes(NamedTuple):
    """The numbers after the magic, in the file's order."""

    words: int
    positions: int
    width: int
    heads: int
    layers: int
    context: int
    text_width: int
    text_heads: int
    text_layers: int
    bins: int
    format: int


class GGMLFile(SafetensorsFolder):
    """A Whisper model of whisper.cpp with the names and config of a Hugging Face folder.

    filters: its mel filters, float32 [bins, 201]. words: the bytes of each token, by rank. controls: the control tokens after
    them. Raises WeightError for other models and number formats, and if a header does not fit the file.
    """

    format: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = [self.path]
        with self.path.open("rb") as file:
            self._data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        self._at = len(GGML_MAGIC)
        sizes = Sizes(*self._numbers(len(Sizes._fields), "the sizes"))
        self._check(sizes)
        self.filters = self._filters(sizes)
        self.words = self._words(sizes)
        self.controls = self._controls(sizes)
        self._places: dict[str, tuple[np.ndarray, int]] = {}
        self._infos: dict[str, TensorInfo] = {}
        while self._at < len(self._data):
            self._add_tensor()
        widths = {side: self._infos.get(f"{side}.layers.0.fc1.weight") for side in ("encoder", "decoder")}
        self.config: dict[str, Any] = _config(sizes) | {
            f"{side}_ffn_dim": 4 * sizes.width if info is None else info.shape[0] for side, info in widths.items()
        }

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes: uint8 [rows, row bytes], a read-only view of the mapped file."""
        info = self.info(name)
        data, start = self._places[name]
        return data[start : start + info.nbytes].reshape(info.rows, info.row_bytes)

    def _error(self, what: str) -> WeightError:
        return WeightError(f"{self.path}: {what}")

    def _take(self, count: int, what: str) -> int:
        """Advance over `count` bytes. Returns the place of the first one."""
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise self._error(f"{what} ends at byte {self._at:,} of {len(self._data):,}; the file is cut, download it again")
        return start

    def _numbers(self, count: int, what: str) -> tuple[int, ...]:
        start = self._take(4 * count, what)
        return tuple(np.frombuffer(self._data[start : self._at].tobytes(), "<i4").tolist())

    def _check(self, sizes: Sizes) -> None:
        """Raise WeightError for sizes that Whisper does not have, and for old number formats."""
        fits = all(1 <= size <= most for size, most in zip(sizes[:-1], MOST, strict=True))
        if not fits or sizes.width % sizes.heads or sizes.width % sizes.text_heads or sizes.width != sizes.text_width:
            named = ", ".join(f"{name} {size}" for name, size in zip(Sizes._fields, sizes, strict=True))
            raise self._error(f"has sizes that no Whisper model has ({named}); of ggml files only Whisper's are read")
        version, number = divmod(sizes.format, VERSIONED)
        if number not in PLAIN_FORMATS and version != BLOCKS_VERSION:
            raise self._error(
                f"has number format {number} of version {version}, and only version {BLOCKS_VERSION} is read; quantize the "
                "model again with a whisper.cpp of June 2023 or later"
            )

    def _filters(self, sizes: Sizes) -> np.ndarray:
        bins, frequencies = self._numbers(2, "the mel filters")
        if (bins, frequencies) != (sizes.bins, FREQUENCIES):
            raise self._error(
                f"has mel filters of {bins} x {frequencies}, and a Whisper model of {sizes.bins} bins has "
                f"{sizes.bins} x {FREQUENCIES}; of ggml files only Whisper's are read"
            )
        start = self._take(4 * bins * frequencies, "the mel filters")
        return np.frombuffer(self._data[start : self._at].tobytes(), "<f4").reshape(bins, frequencies)

    def _words(self, sizes: Sizes) -> list[bytes]:
        (count,) = self._numbers(1, "the vocabulary")
        if not 256 <= count <= sizes.words:
            raise self._error(f"has {count} words, and the model has {sizes.words} tokens; the file is damaged")
        words = []
        for number in range(count):
            (length,) = self._numbers(1, f"word {number}")
            if not 0 <= length <= MAX_WORD:
                raise self._error(f"word {number} has {length} bytes, and {MAX_WORD} is the most; the file is damaged")
            start = self._take(length, f"word {number}")
            words.append(self._data[start : start + length].tobytes())
        while words[-1].startswith(b"<|"):  # some converters store the first control tokens, too
            words.pop()
        return words

    def _controls(self, sizes: Sizes) -> list[str]:
        """Names of the control tokens. The sizes give the number of languages."""
        timestamps = sizes.positions + 1
        languages = sizes.words - len(self.words) - len(BEFORE_LANGUAGES) - len(AFTER_LANGUAGES) - timestamps
        if not 1 <= languages <= len(LANGUAGES):
            raise self._error(
                f"has {sizes.words} tokens, of which {len(self.words)} are words, so {languages} would be languages; Whisper "
                f"has 1 to {len(LANGUAGES)}"
            )
        names = [*BEFORE_LANGUAGES, *LANGUAGES[:languages], *AFTER_LANGUAGES]
        return [f"<|{name}|>" for name in [*names, *(f"{at * SECONDS:.2f}" for at in range(timestamps))]]

    def _add_tensor(self) -> None:
        if len(self._infos) > MAX_TENSORS:
            raise self._error(f"has more than {MAX_TENSORS:,} tensors; the file is damaged")
        place = f"the tensor at byte {self._at:,}"
        count, length, code = self._numbers(3, place)
        if not (1 <= count <= MAX_DIMS and 1 <= length <= MAX_NAME):
            raise self._error(f"{place} has {count} dimensions and a name of {length} bytes; the file is damaged")
        shape = self._numbers(count, place)[::-1]
        start = self._take(length, place)
        stored = self._data[start : self._at].tobytes().decode("utf-8", "replace")
        kind = TYPE_NAMES.get(code, f"number {code}")
        if kind not in KINDS or kind in NOT_GGUF:
            raise self._error(f"tensor {stored!r} has the type {kind}, which is not read; take the model in f16 or q8_0")
        block, block_bytes = KINDS[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self._error(f"tensor {stored!r} has dimensions {list(shape)}, which {kind} cannot have; the file is damaged")
        name = _renamed(stored)
        if name is None:
            raise self._error(f"has a tensor {stored!r}, which Whisper does not have; of ggml files only Whisper's are read")
        if name in self._infos:
            raise self._error(f"has tensor {stored!r} twice; the file is damaged")
        nbytes = math.prod(shape) // block * block_bytes
        self._places[name] = self._data, self._take(nbytes, f"tensor {stored!r}")
        # Biases of convolutions are columns.
        if name.endswith(".bias") and shape[1:] == (1,):
            shape = shape[:1]
        self._infos[name] = TensorInfo(name, shape, kind, nbytes)

    def close(self) -> None:
        super().close()
        self._data = np.empty(0, np.uint8)


def _renamed(stored: str) -> str | None:
    """Hugging Face's name of a tensor; None for a name that Whisper does not have."""
    if stored in TABLES:
        return TABLES[stored]
    module, _, field = stored.rpartition(".")
    if field not in ("weight", "bias"):
        return None
    if module in MODULES:
        return f"{MODULES[module]}.{field}"
    match = BLOCK.fullmatch(module)
    return None if match is None or match[3] not in PARTS else f"{match[1]}.layers.{int(match[2])}.{PARTS[match[3]]}.{field}"


def _config(sizes: Sizes) -> dict[str, Any]:
    """config.json of the same model as Hugging Face stores it, without the widths of the MLPs."""
    return {
        "model_type": "whisper",
        "vocab_size": sizes.words,
        "d_model": sizes.width,
        "num_mel_bins": sizes.bins,
        "max_source_positions": sizes.positions,
        "max_target_positions": sizes.context,
        "activation_function": "gelu",
        "encoder_layers": sizes.layers,
        "encoder_attention_heads": sizes.heads,
        "decoder_layers": sizes.text_layers,
        "decoder_attention_heads": sizes.text_heads,
    }
