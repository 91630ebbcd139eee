"""Command doctor: facts of this installation for a bug report."""

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from headrace import __version__
from headrace.bench import machine
from headrace.cli.output import json_text, print_fields
from headrace.data.progress import human_size
from headrace.weights import names
from headrace.weights.store import find_home, installed

LIBRARIES = tuple("torch numpy tokenizers safetensors huggingface_hub llguidance jinja2 msgspec rich typer".split())
EXTRAS = {"serve": ("starlette", "uvicorn", "prometheus_client"), "audio": ("av",), "ground": ("bm25s",)}
# Prefixes of environment variables that change a run.
VARIABLES = ("HEADRACE_", "OMP_", "MKL_", "HF_HUB_OFFLINE", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Print the facts of this installation for a bug report, and its problems (exit code 1).

    Nothing is sent, and keys are not shown.
    """
    facts, problems = _facts(), _problems()
    if as_json:
        print(json_text({**facts, "problems": problems}, indent=2))
    else:
        print_fields([*facts.items(), *(("problem", problem) for problem in problems or ["none found"])])
    return 1 if problems else 0


def _facts() -> dict[str, str]:
    here = machine.machine()
    commit = machine.commit()
    return {
        "headrace": __version__ + (f", commit {commit}" if commit else ""),
        "python": str(here["python"]),
        "system": str(here["system"]),
        "cpu": f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB",
        "core": _core(),
        "libraries": ", ".join(f"{name} {_version(name)}" for name in LIBRARIES),
        "extras": ", ".join(f"{name} {'yes' if _has(name) else 'no'}" for name in EXTRAS),
        "home": _home(),
        "models": f"{len(installed())} installed, {len(names.given())} named",
        "environment": ", ".join(_environment()) or "nothing that changes a run",
    }


def _problems() -> list[str]:
    """Return the problems that make commands fail or slow here, each with a remedy."""
    from headrace import core

    problems = [core.reason()] if core.reason() else []
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        problems.append(f"{', '.join(missing)} not installed; install headrace again")
    folder = find_home()
    if folder is None:
        problems.append("this user has no home directory; set HEADRACE_HOME to a folder of yours")
    elif not os.access(_nearest(folder), os.W_OK):
        problems.append(f"{folder} cannot be written; set HEADRACE_HOME to a folder of yours")
    return problems


def _core() -> str:
    from headrace import core

    if core.reason():
        return "not built"
    info = core.module().cpu_info()
    nodes = f", {info['nodes']} memory nodes (gain predicted)" if info["nodes"] > 1 else ""
    return f"{info['isa']} (of {', '.join(info['isas'])}), {info['threads']} threads{nodes}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _has(extra: str) -> bool:
    return all(find_spec(name) is not None for name in EXTRAS[extra])


def _home() -> str:
    folder = find_home()
    return "none" if folder is None else f"{folder}, {human_size(shutil.disk_usage(_nearest(folder)).free)} free"


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _environment() -> list[str]:
    """Return the environment variables that change a run; possible secrets only as set."""
    # Passive waiting is what every command sets.
    chosen = sorted(one for one in os.environ.items() if one[0].startswith(VARIABLES) and one != ("OMP_WAIT_POLICY", "passive"))
    return [f"{name}={'(set)' if any(word in name for word in SECRET) else value}" for name, value in chosen]
