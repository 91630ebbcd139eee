"""Headrace's transcription. Setting: {"quantize": "int8", "long": "chunked", "vad": true, "temperature": 0.0}, where null for
temperature is the list of them. A prompt is a WAV file at 16 kHz, its language and a factor of its samples: no window is then
in the cache.
"""

import time
import wave
from typing import Any

import numpy as np

from headrace import LLM


def samples_of(path: str, factor: float) -> np.ndarray:
    with wave.open(path) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), np.int16).astype(np.float32) / 32768 * np.float32(factor)


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        self.settings = {"long": setting["long"], "vad": setting["vad"]}
        if setting["temperature"] is not None:
            self.settings["temperatures"] = (setting["temperature"],)
        self.llm = LLM(model, threads=threads, quantize=setting["quantize"], kv_cache_memory=int(kv_bytes))
        self.about = f"Headrace, {self.llm.backend} back end"

    def run(self, prompts: list[tuple[str, str, float]], new_tokens: int) -> tuple[float, float, list[str]]:
        """Seconds of all files one after the other, and their texts."""
        sounds = [(samples_of(path, factor), language) for path, language, factor in prompts]
        start = time.perf_counter()
        texts = [self.llm.transcribe(each, rate=16000, language=language, **self.settings).text for each, language in sounds]
        return 0.0, time.perf_counter() - start, texts
