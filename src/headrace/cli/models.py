"""pull, list, rm, show: the models on this machine and in the catalog."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import complete_model
from headrace.cli.output import print_fields, print_table, say, status
from headrace.data.progress import human_size
from headrace.weights import catalog, names
from headrace.weights.defaults import summary
from headrace.weights.store import Record, Store, StoreError, folder_name, folder_size


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(pull)
    app.command("list")(list_models)
    app.command()(show)
    app.command("rm")(remove)


NameOrPath = Annotated[
    str, typer.Argument(metavar="MODEL", help="A name that `headrace list` shows, or a path.", autocompletion=complete_model)
]
Catalogs = Annotated[
    list[Path] | None,
    typer.Option("--catalog", exists=True, dir_okay=False, help="Additional catalog file; may be repeated."),
]


def pull(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Names of the catalog (headrace list), or of the model hub: organisation/repository[:FILE].",
            autocompletion=complete_model,
        ),
    ],
    catalogs: Catalogs = None,
) -> None:
    """Download models, and check those that are already downloaded.

    Prints the path of each model. An interrupted download continues.
    """
    from headrace.weights.hub import pull as pull_model

    entries = catalog.load(catalogs or ())
    store, progress = Store(), status()
    for name in models:
        if name in entries and store.find(name) is None:
            say(f"{name}: {human_size(entries[name].size)}, licence {entries[name].licence}")
        try:
            record = pull_model(name, entries=entries, store=store, progress=progress)
        except KeyboardInterrupt:
            say(f"{name}: stopped; the same command continues")
            raise
        say(f"{record.name}: {human_size(record.size)}, SHA-256 checked, from the {record.source}")
        typer.echo(store.path(record))


def list_models(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="Folders whose models are listed.", exists=True)
    ] = None,
    catalogs: Catalogs = None,
) -> None:
    """List downloaded models with name, path and size, and those of the catalog; or the models in folders."""
    if folders:
        from headrace.startup.supported import describe_support

        paths = [path for folder in folders for path in _models_in(folder)]
        print_table(
            ("PATH", "SIZE", "RUNS HERE"), [(str(one), human_size(folder_size(one)), describe_support(one)) for one in paths]
        )
        return
    named = [(one.name, human_size(_size_of(one.model)), "", "named", one.model) for one in names.given()]
    print_table(("NAME", "SIZE", "LICENCE", "STATE", "DESCRIPTION"), [*named, *_stored_rows(catalogs)])
    store = Store()
    installed = store.installed()
    what = "1 model" if len(installed) == 1 else f"{len(installed)} models"
    say(f"{what} installed, {human_size(folder_size(store.root))} in {store.root}")


def _models_in(folder: Path) -> list[Path]:
    """GGUF and ggml files, and folders with weights: `folder` itself, or its entries."""
    from headrace.weights.model_files import is_ggml

    settings = ("config.json", "adapter_config.json")
    if folder.suffix == ".gguf" or is_ggml(folder) or any((folder / name).exists() for name in settings):
        return [folder]
    paths = [
        *folder.glob("*.gguf"),
        *filter(is_ggml, folder.glob("*.bin")),
        *(file.parent for file in folder.glob("*/config.json")),
    ]
    return sorted({*paths, *(file.parent for file in folder.glob("*/adapter_config.json"))})


def _size_of(model: str) -> int | None:
    """Bytes of an installed model, or None."""
    from headrace.weights.hub import resolve

    try:
        return folder_size(resolve(model, download=False))
    except ValueError:
        return None


def _stored_rows(catalogs: list[Path] | None) -> list[tuple[str, ...]]:
    entries, store = catalog.load(catalogs or ()), Store()
    installed = {record.name: record for record in store.installed()}
    partials = store.partials()
    rows = []
    for name in [*entries, *(name for name in installed if name not in entries)]:
        entry, record = entries.get(name), installed.get(name)
        size = record.size if record else entry.size if entry else None
        unfinished = partials.pop(folder_name(name), 0)
        state = "installed" if record else f"{human_size(unfinished)} so far" if unfinished else "available"
        licence = entry.licence if entry else record.licence if record else ""
        description = entry.description if entry else ""
        rows.append((name, human_size(size), licence, state, description + (" (default)" if name == catalog.DEFAULT else "")))
    rows += [(folder, "unknown size", "unknown", f"{human_size(size)} so far", "") for folder, size in partials.items()]
    return sorted(rows, key=lambda row: row[3] != "installed")


def show(name: NameOrPath, catalogs: Catalogs = None) -> None:
    """Show path, size, licence and settings of a model, and whether it runs here."""
    from headrace.weights.hub import resolve

    entries, store, named = catalog.load(catalogs or ()), Store(), names.find(name)
    target = name if named is None else named.model
    entry, record = entries.get(target), _record(store, target)
    path = resolve(target, entries=entries, download=False) if record is None and entry is None else None
    fields = [("name", name)] if named is None else [("name", name), ("model", target)]
    if named is not None and named.template is not None:
        fields.append(("template", f"of its own, {len(named.template):,} characters"))
    if named is not None and named.system is not None:
        fields.append(("system", named.system or "none"))
    if path is not None:
        fields += [] if named is not None else [("path", str(path.absolute()))]
        fields.append(("size", human_size(folder_size(path))))
        print_fields([*fields, *_running(name)])
        return
    if entry:
        fields += _catalog_fields(entry)
    if record:
        fields += [*_local_fields(record, store), *_running(name)]
    else:
        fields.append(("installed", f"no (headrace pull {name})"))
        if unfinished := store.bytes_of(name):
            fields.append(("unfinished", human_size(unfinished)))
    print_fields(fields)


def _empty(folder: Path, yes: bool) -> None:
    """Delete the segments of a K/V store."""
    from headrace.startup.kv_store import empty, segment_files

    files = list(segment_files(folder))
    size = human_size(sum(each for _, each, _ in files))
    if files and not yes and not typer.confirm(f"Delete {len(files)} segments of K/V in {folder} ({size})?", err=True):
        raise typer.Abort
    count, freed = empty(folder)
    say(f"{folder}: {count} segments deleted, {human_size(freed)} freed")


def _record(store: Store, name: str) -> Record | None:
    """The store's record of a model; None for a path."""
    try:
        return store.find(name)
    except StoreError:
        return None


def _running(name: str) -> list[tuple[str, str]]:
    """Whether an installed model runs, and its default settings."""
    from headrace.startup.opening import open_files
    from headrace.startup.supported import describe_support

    runs = describe_support(name)
    fields = [("runs here", runs)]
    if runs.startswith("no"):
        return fields
    opened = open_files(name)
    if opened.config.encoder:
        return [*fields, ("kind", "an encoder: headrace embed, and classify with what train-classifier made of it")]
    if opened.config.source is not None:
        fields.append(("kind", "an encoder-decoder: headrace translate"))
    return [*fields, ("settings", summary(opened.defaults))]


def _catalog_fields(entry: catalog.Entry) -> list[tuple[str, str]]:
    fields = [("description", entry.description), ("licence", entry.licence), ("file", entry.file or "(a folder)")]
    if entry.size:
        fields.append(("size", f"{human_size(entry.size)} ({entry.size} bytes)"))
    fields.append(("sha256", entry.sha256 or "(the hub's own is checked)"))
    fields += [("source", source.label) for source in entry.sources]
    fields.append(("sampling", ", ".join(f"{key}={value}" for key, value in entry.sampling.items()) or "(the model's own)"))
    if entry.sampling_source:
        fields.append(("sampling from", entry.sampling_source))
    fields.append(("system", entry.chat.system or "(the model's own)"))
    return fields


def _local_fields(record: Record, store: Store) -> list[tuple[str, str]]:
    fields = [("installed", str(store.path(record))), ("from", record.source)]
    if record.commit:
        fields.append(("commit", record.commit))
    return fields + [(f"  {file.name}", f"{human_size(file.size)}, sha256 {file.sha256}") for file in record.files]


def remove(
    name: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A name that `headrace list` shows.", autocompletion=complete_model),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    kv_store: Annotated[
        Path | None, typer.Option("--kv-store", metavar="DIR", help="Delete the segments of this K/V store instead of a model.")
    ] = None,
) -> None:
    """Delete a model from this machine; for a name of headrace add, only the name."""
    if (name is None) == (kv_store is None):
        raise typer.BadParameter("name a model, or a folder with --kv-store")
    if kv_store is not None:
        _empty(kv_store, yes)
        return
    assert name is not None
    if (named := names.find(name)) is not None:
        if not yes and not typer.confirm(f"Remove the name {name} and its settings ({named.model} stays)?", err=True):
            raise typer.Abort
        names.remove(name)
        say(f"{name}: the name is gone, {named.model} stays")
        return
    store = Store()
    size = store.bytes_of(name)
    if not size:
        raise StoreError(f"{name} is not on this machine; headrace list shows what is")
    if not yes and not typer.confirm(f"Delete {name} ({human_size(size)})?", err=True):
        raise typer.Abort
    say(f"{name}: {human_size(store.remove(name))} freed")
