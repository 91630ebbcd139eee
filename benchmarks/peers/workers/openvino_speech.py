"""OpenVINO GenAI's WhisperPipeline on a folder of optimum-intel. Settings and prompts are those of ours_speech.py; it works
sequentially, greedy, without temperatures and without voice activity detection."""

import time
import wave
from typing import Any

import numpy as np
import openvino_genai as genai


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        self.pipeline = genai.WhisperPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
        self.about = f"OpenVINO GenAI {genai.__version__}"

    def run(self, prompts: list[tuple[str, str, float]], new_tokens: int) -> tuple[float, float, list[str]]:
        sounds = []
        for path, language, factor in prompts:
            with wave.open(path) as sound:
                numbers = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
            sounds.append((numbers.astype(np.float32) / 32768 * np.float32(factor), f"<|{language}|>"))
        start = time.perf_counter()
        texts = []
        for each, language in sounds:
            result = self.pipeline.generate(each.tolist(), language=language, task="transcribe", return_timestamps=True)
            texts.append(str(result).strip())
        return 0.0, time.perf_counter() - start, texts
