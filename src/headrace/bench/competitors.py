"""Engines that are measured in turns: one worker process for each engine and setting, this build of Headrace first."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headrace.bench.interleave import Cell, Variant
from headrace.bench.machine import Say, commit, machine
from headrace.bench.worker import EngineProcess
from headrace.data.config import ModelConfig
from headrace.kv.layout import all_kv_shapes
from headrace.startup.loading import Opened
from headrace.weights.store import home

OURS = "headrace"
WORKERS = Path(__file__).parent / "workers"
SERVE = WORKERS / "serve.py"
SOURCE = {"PYTHONPATH": str(WORKERS.parents[2])}
# Bytes of a K or V number in engines that keep float32.
KV_ELEMENT = 4
# Tokens; engines round every sequence up.
SPARE_TOKENS = 32 * 256
ABOUT = ("about", "load_s", "peak_rss_mb", "build")


class Competitor(Protocol):
    """An engine to measure. `settings`: options of its worker by name; each setting gets a process of its own."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, dict[str, Any]]: ...

    @property
    def command(self) -> Sequence[str]: ...

    def model(self, path: Path, say: Say) -> Path:
        """File or folder that the engine loads for the GGUF file `path`. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class Build:
    """A build of Headrace, run by the Python of the environment that it is installed in."""

    name: str
    settings: Mapping[str, dict[str, Any]]
    python: Path

    @property
    def command(self) -> Sequence[str]:
        return worker_command(WORKERS / "ours.py", self.python)

    def model(self, path: Path, say: Say) -> Path:
        return path


def worker_command(worker: Path, python: Path | str = sys.executable) -> list[str]:
    """Command line of a process that serves `worker`, a file with a class `EngineProcess` (`workers/serve.py`)."""
    return [str(python), "-P", str(SERVE), str(worker)]


def start_worker(stack: ExitStack, name: str, command: Sequence[str], env: Mapping[str, str]) -> EngineProcess:
    """Start a worker process that ends with `stack`. Its output goes to a log named after it."""
    logs = home() / "peers" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    worker = EngineProcess(command, logs / f"{name.replace(' ', '-').replace('/', '-')}.log", env)
    stack.callback(worker.close)
    return worker


@dataclass(slots=True)
class Competitors:
    """The loaded variants, ours first; what each worker reported about itself; the reason why a variant could not be loaded."""

    variants: list[Variant] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def load(
        self,
        stack: ExitStack,
        engine: str,
        setting: str,
        model: Path,
        options: dict[str, Any],
        task: dict[str, Any],
        say: Say,
        command: Sequence[str] | None = None,
        env: Mapping[str, str] = SOURCE,
    ) -> None:
        """Start the worker of one variant and load the model in it. Without a `command` it is Headrace as it is here.

        Raises ValueError.
        """
        command = command or worker_command(WORKERS / "ours.py")
        worker = start_worker(stack, f"{engine} {setting}".strip(), command, env)
        variant = Variant(engine, setting, worker)
        about = worker.ask(model=str(model), setting=options, **task)
        self.about[variant.name] = {key: about[key] for key in ABOUT if key in about}
        self.variants.append(variant)
        # ours names itself
        prefix = "" if variant.name == OURS else f"{variant.name}: "
        say(f"{prefix}{about['about']}, loaded in {about['load_s']:.1f} s")


def load_competitors(
    stack: ExitStack,
    path: Path,
    engines: Sequence[Competitor],
    options: dict[str, Any],
    task: dict[str, Any],
    say: Say,
) -> Competitors:
    """Load the model in a process for this build (LLM arguments `options`), then in one for each engine and setting.

    All processes are stopped until they are measured. An engine that cannot load the model is left out with a message.
    """
    competitors = Competitors()
    competitors.load(stack, OURS, "", path, options, task, say)
    for engine in engines:
        for name, setting in engine.settings.items():
            try:
                # An engine finds the packages of its own environment and no others.
                start = engine.command, {"PYTHONPATH": ""}
                competitors.load(stack, engine.name, name, engine.model(path, say), setting, task, say, *start)
            except ValueError as error:
                competitors.left_out[f"{engine.name} ({name})"] = str(error)
                say(f"{engine.name} ({name}) is left out: {error}")
    return competitors


def heading(opened: Opened, rounds: int) -> dict[str, Any]:
    """First fields of the JSON file of a measurement."""
    return {"model": opened.path.name, "machine": machine(), "commit": commit(), "rounds": rounds}


def fitting(cells: Sequence[Cell], config: ModelConfig, say: Say) -> list[Cell]:
    """The cells that fit the model's context; the others are reported. Raises ValueError if none fits."""
    fitting = [cell for cell in cells if cell.prompt + cell.new_tokens < config.max_position]
    if not fitting:
        raise ValueError(f"no cell fits the {config.max_position} positions that the model knows")
    for cell in cells:
        if cell not in fitting:
            say(f"{cell.name} is left out: the model knows {config.max_position} positions")
    return fitting


def kv_bytes(cells: Sequence[Cell], config: ModelConfig) -> int:
    """Bytes of KV cache that the largest cell needs in float32."""
    tokens = max(cell.tokens for cell in cells) + SPARE_TOKENS
    return sum(shape.block_bytes(tokens, KV_ELEMENT) for shape in all_kv_shapes(config))
