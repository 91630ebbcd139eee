"""pull, list, rm, show: the models on this machine and in the catalog."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.output import print_fields, print_table, say
from headrace.cli.status import status
from headrace.weights import catalog
from headrace.weights.progress import human_size
from headrace.weights.store import Record, Store, StoreError, folder_name


def register(app: typer.Typer) -> None:
    """Add the commands."""
    panel = "Models"
    app.command(rich_help_panel=panel)(pull)
    app.command("list", rich_help_panel=panel)(list_models)
    app.command(rich_help_panel=panel)(show)
    app.command("rm", rich_help_panel=panel)(remove)


def complete_model(incomplete: str) -> list[str]:
    """Names of the catalog and of what is installed, for the shell."""
    names = {*catalog.load(), *(record.name for record in Store().installed())}
    return sorted(name for name in names if name.startswith(incomplete))


Name = Annotated[str, typer.Argument(metavar="MODEL", help="A name that `headrace list` shows.", autocompletion=complete_model)]
Catalogs = Annotated[
    list[Path] | None,
    typer.Option("--catalog", exists=True, dir_okay=False, help="A further catalog file; may be repeated."),
]


def pull(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Names of the catalog (headrace list), or of the model hub: organisation/repository[:FILE].",
            autocompletion=complete_model,
        ),
    ],
    catalogs: Catalogs = None,
) -> None:
    """Download models; what is here already is checked.

    Prints each model's path. An interrupted download is taken up where it stopped.
    """
    from headrace.weights.hub import pull as pull_model

    entries = catalog.load(catalogs or ())
    store, progress = Store(), status()
    for name in names:
        if name in entries and store.find(name) is None:
            say(f"{name}: {human_size(entries[name].size)}, licence {entries[name].licence}")
        try:
            record = pull_model(name, entries=entries, store=store, progress=progress)
        except KeyboardInterrupt:
            say(f"{name}: stopped; the same command goes on where it was")
            raise
        say(f"{record.name}: {human_size(record.size)}, SHA-256 checked, from the {record.source}")
        typer.echo(store.path(record))


def list_models(catalogs: Catalogs = None) -> None:
    """List the models that are installed and those of the catalog."""
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
    print_table(("NAME", "SIZE", "LICENCE", "STATE", "DESCRIPTION"), sorted(rows, key=lambda row: row[3] != "installed"))


def show(name: Name, catalogs: Catalogs = None) -> None:
    """Show what the catalog says of a model and what of it is on this machine."""
    if name.endswith(".gguf") or Path(name).expanduser().is_dir():
        raise StoreError(f"{name} is a path; headrace inspect {name} shows what it holds")
    entry, store = catalog.load(catalogs or ()).get(name), Store()
    record = store.find(name)
    if entry is None and record is None:
        raise StoreError(f"{name} is neither in the catalog nor installed; headrace list shows what is")
    fields = [("name", name)]
    if entry:
        fields += _catalog_fields(entry)
    if record:
        fields += _local_fields(record, store)
    else:
        fields.append(("installed", f"no (headrace pull {name})"))
        if unfinished := store.bytes_of(name):
            fields.append(("unfinished", human_size(unfinished)))
    print_fields(fields)


def _catalog_fields(entry: catalog.Entry) -> list[tuple[str, str]]:
    fields = [("description", entry.description), ("licence", entry.licence), ("file", entry.file or "(a folder)")]
    if entry.size:
        fields.append(("size", f"{human_size(entry.size)} ({entry.size} bytes)"))
    fields.append(("sha256", entry.sha256 or "(the hub's own is checked)"))
    fields += [("source", source.label) for source in entry.sources]
    fields.append(("sampling", ", ".join(f"{key}={value}" for key, value in entry.sampling.items()) or "(the model's own)"))
    fields.append(("system", entry.chat.system or "(the model's own)"))
    return fields


def _local_fields(record: Record, store: Store) -> list[tuple[str, str]]:
    fields = [("installed", str(store.path(record))), ("from", record.source)]
    if record.commit:
        fields.append(("commit", record.commit))
    return fields + [(f"  {file.name}", f"{human_size(file.size)}, sha256 {file.sha256}") for file in record.files]


def remove(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model from this machine."""
    store = Store()
    size = store.bytes_of(name)
    if not size:
        raise StoreError(f"{name} is not on this machine; headrace list shows what is")
    if not yes and not typer.confirm(f"Delete {name} ({human_size(size)})?", err=True):
        raise typer.Abort
    say(f"{name}: {human_size(store.remove(name))} freed")
