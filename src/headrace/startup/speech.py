"""Speech models: the encoder's windows and the control tokens of an open model."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from headrace.audio.mel import filters
from headrace.audio.vad import EnergyDetector, SileroDetector, VoiceDetector
from headrace.audio.vocabulary import SpeechTokens, speech_tokens
from headrace.data.config import Audio, ModelConfig
from headrace.startup.opening import Opened
from headrace.weights.ctranslate2 import CTranslate2Folder, is_ctranslate2, recorded_lists
from headrace.weights.ggml import GGMLFile
from headrace.weights.model_files import is_ggml
from headrace.weights.source import WeightError
from headrace.weights.store import Store, StoreError

VAD = "silero-vad"  # name in the catalog
FILTER_ERROR = 1e-4  # of stored mel filters; their largest weight is about 0.025


def reads_sound(path: Path) -> bool:
    """Whether the files of a model are those of a speech model, without opening it."""
    if not path.is_dir():
        return is_ggml(path)
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return is_ctranslate2(path) or (isinstance(config, dict) and config.get("model_type") == "whisper")


def voice_detector() -> VoiceDetector:
    """The Silero network if it was downloaded (`headrace pull silero-vad`), otherwise a detector of silence by level."""
    try:
        store = Store()
        record = store.find(VAD)
    except StoreError:
        record = None
    return EnergyDetector() if record is None else SileroDetector(load_file(store.path(record)))


def speech_model(opened: Opened) -> tuple[Audio, SpeechTokens]:
    """The encoder's windows and the control tokens of a model. Raises ValueError if it reads no sound, and WeightError if its
    file has other mel filters."""
    source = opened.config.source
    if source is None or source.audio is None:
        raise ValueError(f"{opened.name} reads no sound, so it cannot transcribe; open a speech model, such as whisper-base")
    lists: Mapping[str, Any]
    if isinstance(opened.source, GGMLFile):
        _check_filters(opened.source)
        lists = {}
    elif isinstance(opened.source, CTranslate2Folder):
        given = recorded_lists(opened.path)
        lists = {
            "suppress_tokens": given.get("suppress_ids"),
            "begin_suppress_tokens": given.get("suppress_ids_begin"),
            "alignment_heads": given.get("alignment_heads"),
        }
    else:
        lists = {**opened.source.config, **opened.generation}  # type: ignore[union-attr]
    tokens = speech_tokens(opened.tokenizer, opened.config.vocab_size, lists)
    heads = alignment_heads(opened.config, lists.get("alignment_heads"), opened.name)
    # Models whose decoder was cut (turbo, distil) were trained on transcripts alone.
    translates = opened.config.num_layers >= source.num_layers
    return source.audio, replace(tokens, alignment=heads, translates=translates)


def _check_filters(source: GGMLFile) -> None:
    """Raise WeightError unless the mel filters of a file are those that sound is read with."""
    difference = float(np.abs(source.filters - filters(len(source.filters))).max())
    if not difference < FILTER_ERROR:
        raise WeightError(f"{source.path}: its mel filters differ from Whisper's by {difference:.2g}; take another file")


def alignment_heads(config: ModelConfig, given: Any, name: str) -> tuple[tuple[int, int], ...]:
    """The (layer, head) pairs that a model's files name; if they name none, all heads of the upper half of the layers.

    Raises ValueError for heads that the model does not have.
    """
    layers = [layer.heads for layer in config.layers]
    if not given:
        return tuple((at, head) for at in range(len(layers) // 2, len(layers)) for head in range(layers[at]))
    try:
        heads = tuple((int(layer), int(head)) for layer, head in given)
    except (TypeError, ValueError):
        heads = ()
    if not heads or not all(0 <= layer < len(layers) and 0 <= head < layers[layer] for layer, head in heads):
        raise ValueError(f"{name}: alignment_heads are not pairs of a layer and a head of this model; check its files")
    return heads
