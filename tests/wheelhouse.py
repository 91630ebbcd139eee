"""Wheels made on the spot, and the pip configuration that finds them and nothing else."""

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, members: dict[str, bytes]) -> Path:
    """A wheel that holds these members and no code."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, data in members.items():
            wheel.writestr(member, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def pip_environment(folder: Path) -> dict[str, str]:
    """Environment variables with which pip looks only into `folder`."""
    return {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": str(folder)}
