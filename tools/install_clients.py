"""Installs the clients of `make test-clients` (tests/clients/clients.toml) below build/clients. Prints one line for each."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "clients"
LISTED: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "tests/clients/clients.toml").read_text("utf-8"))


def install_python(folder: Path, packages: list[str]) -> str:
    """Create an environment with these packages. Returns an error message, or an empty text.

    Installs nothing if a package needs torch and the list does not pin it: pip would choose a build of several GB.
    """
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-q"]
    plan = subprocess.run(
        [*pip, "install", "--dry-run", "--report", "-", *packages], capture_output=True, text=True, check=False
    )
    if plan.returncode:
        return " ".join(plan.stderr.split())[-300:]
    names = {one["metadata"]["name"].lower() for one in json.loads(plan.stdout)["install"]}
    if "torch" in names and not any(package.startswith("torch==") for package in packages):
        return "it would install torch"
    done = subprocess.run([*pip, "install", *packages], capture_output=True, text=True, check=False)
    return " ".join(done.stderr.split())[-300:] if done.returncode else ""


def install_npm(folder: Path, packages: list[str]) -> str:
    if shutil.which("npm") is None:
        return "npm is missing; install Node.js"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"type": "module"}\n')
    done = subprocess.run(["npm", "install", "--silent", *packages], cwd=folder, capture_output=True, text=True, check=False)
    return " ".join(done.stderr.split())[-300:] if done.returncode else ""


def main() -> int:
    failed = 0
    for kind, install in (("python", install_python), ("npm", install_npm)):
        for name, packages in LISTED[kind].items():
            mark = BUILD / name / ".done"
            if mark.exists() and mark.read_text() == "\n".join(packages):
                continue
            shutil.rmtree(BUILD / name, ignore_errors=True)
            error = install(BUILD / name, packages)
            print(f"{name}: {error or 'installed'}", flush=True)
            failed += bool(error)
            if not error:
                mark.write_text("\n".join(packages))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
