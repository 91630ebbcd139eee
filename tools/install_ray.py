"""Installs Ray for `make test-ray` into build/ray, an environment on top of the one that runs this: about 740 MB."""

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "ray"


def main() -> None:
    python = BUILD / "bin" / "python"
    if not (BUILD / "installed").exists():
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
        subprocess.run([sys.executable, "-m", "venv", str(BUILD)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        paths = [ROOT / "src", *{sysconfig.get_paths()[name] for name in ("purelib", "platlib")}]
        (BUILD / "lib" / version / "site-packages" / "headrace.pth").write_text("".join(f"{path}\n" for path in paths))
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *extras["ray"]], check=True)
        (BUILD / "installed").touch()
    print(python)


if __name__ == "__main__":
    main()
