"""faster-whisper. Settings and prompts are those of ours_speech.py."""

import time
import wave
from typing import Any

import faster_whisper
import numpy as np

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        whisper = faster_whisper.WhisperModel(model, device="cpu", compute_type=setting["quantize"], cpu_threads=threads)
        self.options: dict[str, Any] = {"beam_size": 1, "vad_filter": setting["vad"]}
        self.options["temperature"] = TEMPERATURES if setting["temperature"] is None else setting["temperature"]
        self.transcribe = whisper.transcribe
        if setting["long"] == "chunked":
            self.transcribe = faster_whisper.BatchedInferencePipeline(whisper).transcribe
            self.options |= {"batch_size": 8, "without_timestamps": False}
        self.about = f"faster-whisper {faster_whisper.__version__}"

    def run(self, prompts: list[tuple[str, str, float]], new_tokens: int) -> tuple[float, float, list[str]]:
        sounds = []
        for path, language, factor in prompts:
            with wave.open(path) as sound:
                numbers = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
            sounds.append((numbers.astype(np.float32) / 32768 * np.float32(factor), language))
        start = time.perf_counter()
        texts = []
        for each, language in sounds:
            segments, _ = self.transcribe(each, language=language, **self.options)
            texts.append(" ".join(segment.text.strip() for segment in segments))
        return 0.0, time.perf_counter() - start, texts
