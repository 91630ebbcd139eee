"""Models in a folder (`serve --models-dir`): GGUF and ggml files, and folders with a model, by name."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from headrace.startup.opening import open_files
from headrace.weights.model_files import first_name, is_ggml, part_name
from headrace.weights.store import file_title


@dataclass(frozen=True, slots=True)
class FolderModels:
    """Paths of the models by name, and a line for each entry that is not served."""

    models: dict[str, Path]
    skipped: list[str]


def models_in(folder: Path) -> FolderModels:
    """Return the models directly in a folder. Entries whose name starts with a dot are ignored.

    A name that two entries have is not served, as either could be meant. Raises ValueError if the folder cannot be read.
    """
    try:
        entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read ({error.strerror}); choose another --models-dir") from None
    found: dict[str, list[Path]] = defaultdict(list)
    skipped = []
    for path in entries:
        first = path.with_name(first_name(path.name))
        if first != path and first in entries:
            continue  # the first part stands for the model
        if problem := _problem(path):
            skipped.append(f"{path.name} is not served: {problem}")
        else:
            part = part_name(path.name)
            found[part.model if part is not None else file_title(path.name)].append(path)
    for name, paths in found.items():
        if len(paths) > 1:
            skipped.append(f"{name} is not served: {' and '.join(path.name for path in paths)} have this name; rename one")
    return FolderModels({name: paths[0] for name, paths in found.items() if len(paths) == 1}, skipped)


def _problem(path: Path) -> str:
    """Why an entry is no model that can be opened, one line; empty if it is one."""
    if not path.is_dir() and path.suffix != ".gguf" and not is_ggml(path):
        return "it is neither a .gguf file nor a folder"
    try:
        opened = open_files(path, download=False)
        opened.source.close()
    except (ValueError, OSError) as error:
        return " ".join(str(error).split()).removeprefix(f"{path}: ")
    return ""
