"""faster-whisper. Settings and prompts are those of ours_speech.py. Two more settings: at_once, a thread for each file; and
workers, of the engine, which divide its threads."""

import time
import wave
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faster_whisper
import numpy as np

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        workers = setting.get("workers", 1)
        whisper = faster_whisper.WhisperModel(
            model, device="cpu", compute_type=setting["quantize"], cpu_threads=max(1, threads // workers), num_workers=workers
        )
        self.at_once = setting.get("at_once", False)
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
        if self.at_once:
            with ThreadPoolExecutor(len(sounds)) as threads:
                texts = list(threads.map(self.text, *zip(*sounds, strict=True)))
        else:
            texts = [self.text(*sound) for sound in sounds]
        return 0.0, time.perf_counter() - start, texts

    def text(self, samples: np.ndarray, language: str) -> str:
        segments, _ = self.transcribe(samples, language=language, **self.options)
        return " ".join(segment.text.strip() for segment in segments)
