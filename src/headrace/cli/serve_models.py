"""The models that `serve` knows: MODEL, the tables of --config, and the folder of --models-dir."""

from pathlib import Path
from typing import Any

from headrace.cli.output import say
from headrace.cli.serve_options import MODES, ModelEntry, ServerOptions
from headrace.weights.store import expand, file_title

PINNED, ON_DEMAND, _ = MODES


def listed_models(model: str, tables: list[ModelEntry], server: ServerOptions) -> list[ModelEntry]:
    """Return all models, each with a name: MODEL first, then tables, then the rest of the folder. Raises ValueError.

    A table with a name of the folder alone changes that model; one with a model of its own replaces it.
    """
    entries = list(tables)
    if model and model not in [entry.model for entry in tables]:
        entries.insert(0, ModelEntry(model, preload=True))
    folder = _folder_models(server.models_dir, {one.name for one in entries if one.model and one.name})
    for entry in entries:
        if not entry.model:
            if server.models_dir is None:
                raise ValueError(f"{entry.name}: models must be tables, each with a model, or with a name in models_dir")
            if entry.name not in folder:
                known = ", ".join(folder) or "none"
                raise ValueError(f"{entry.name}: --models-dir has no model of this name; it has {known}")
            entry.model = str(folder[entry.name])
        entry.name = served_name(entry.model) if entry.name is None else entry.name
    if entries and model and server.served_model_name is not None:
        entries[0].name = server.served_model_name
    names = [entry.name for entry in entries]
    entries += [ModelEntry(str(path), name) for name, path in folder.items() if name not in names]
    _preload(entries, server.preload)
    if not entries:
        raise ValueError(f"{server.models_dir} has no model that can be served; put GGUF files or folders of models there")
    return entries


def loads_on_demand(entries: list[ModelEntry], server: ServerOptions) -> bool:
    """Whether models are loaded for their first request: with a limit of memory, a folder, an idle time, or such a model."""
    given = server.model_memory, server.models_dir, server.idle_unload
    return any(one is not None for one in given) or any(one.mode == ON_DEMAND for one in entries)


def loaded_first(entry: ModelEntry) -> bool:
    """Whether a model of a server that loads on demand is loaded at the start."""
    return entry.mode == PINNED or (entry.preload and entry.mode != MODES[2])


def served_name(model: str) -> str:
    """Return the default name of a model for clients: the last part of a path, or the name itself."""
    path = expand(model)
    return file_title(path.resolve().name) if path.exists() else model


def _folder_models(folder: Path | None, taken: set[Any]) -> dict[str, Path]:
    """Return the models of --models-dir by name, and report the entries that are not served."""
    if folder is None:
        return {}
    from headrace.startup.model_folder import models_in

    contents = models_in(folder)
    for line in contents.skipped:
        say(f"{folder}: {line}")
    for name in sorted(taken & set(contents.models)):
        say(f"{folder}: {name} is not served: --config has another model of this name")
    return {name: path for name, path in contents.models.items() if name not in taken}


def _preload(entries: list[ModelEntry], names: str | None) -> None:
    """Mark the models of --preload. Raises ValueError for a name that is not known."""
    for name in filter(None, (one.strip() for one in (names or "").split(","))):
        chosen = [one for one in entries if name in (one.name, *one.aliases)]
        if not chosen:
            raise ValueError(
                f"--preload {name}: there is no such model; choose from {', '.join(str(one.name) for one in entries)}"
            )
        chosen[0].preload = True
