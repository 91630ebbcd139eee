"""A worker of bench/workers that computes nothing: its setting says what it claims and how it misbehaves."""

import os
import threading
from typing import Any


class Worker:
    def __init__(self, model: str, threads: int, setting: dict[str, Any], kv_bytes: float) -> None:
        if setting.get("load") == "refuse":
            raise ValueError("this file has\na type I do not know")
        if setting.get("load") == "die":
            os._exit(3)
        self.setting = setting
        self.about = f"fake of {model}, {threads} threads"
        self.turns = 0
        if setting.get("spin"):
            threading.Thread(target=self.spin, daemon=True).start()

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[int]]:
        print("chatter on stdout", flush=True)
        if self.setting.get("run") == "fail":
            raise RuntimeError("no memory left")
        self.turns += 1
        return self.setting["seconds"], 2 * self.setting["seconds"], [sum(prompt) % 7 for prompt in prompts]

    def spin(self) -> None:
        while True:
            self.turns += 0
