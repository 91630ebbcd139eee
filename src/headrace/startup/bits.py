"""Digest of all that decides the bits of a model's outputs: a begun output may go on in another process only if it has the
same digest."""

import hashlib
from pathlib import Path

import msgspec

from headrace import __version__, core
from headrace.data.settings import ModelSettings
from headrace.startup.adapters import named_adapters
from headrace.weights import hub
from headrace.weights.digest import files_digest
from headrace.weights.model_files import model_files

# Settings that change no output on the native core, or name files of one host.
HOST_SETTINGS = (
    *("threads", "pp", "stages", "stage_hosts", "key_file", "tp", "offload", "kv_cache_memory", "kv_store", "kv_store_size"),
    *("draft", "speculate", "draft_tokens", "draft_vocab", "max_num_seqs", "max_num_batched_tokens", "classifier"),
    *("parse_special", "preset", "policy", "enable_prefix_caching", "cascade", "exits", "amateur", "adapter"),
)


def bits_digest(model: Path, settings: ModelSettings, numbers: str) -> str:
    """Digest of program version, settings, model files and number formats (`numbers`: back end and dtype, as loaded).

    A file is identified by name, size and time of change. Empty, which equals no other, if a file cannot be found any more.
    """
    try:
        others = [hub.resolve(str(one), download=False) for one in (settings.amateur, settings.cascade) if one is not None]
        folders = [] if settings.exits is None else [Path(settings.exits)]
        facts = [__version__, numbers, core.order_of_sums(), repr(settings)]
        for path in (model, *others, *folders, *named_adapters(settings.adapter).values()):
            for file in model_files(path):
                state = file.stat()
                facts.append(f"{file} {state.st_size} {state.st_mtime_ns}")
    except (OSError, ValueError):
        return ""
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def portable_bits(files: str, settings: ModelSettings, numbers: str) -> str:
    """The digest of `bits_digest` for engines of several hosts. files: `files_digest` of the model. Empty if the files of
    another model cannot be read."""
    chosen = msgspec.structs.asdict(settings)
    try:
        others = [hub.resolve(str(one), download=False) for one in (settings.amateur, settings.cascade) if one is not None]
        others += [] if settings.exits is None else [Path(settings.exits)]
        facts = [__version__, numbers, core.order_of_sums(), files, *map(files_digest, others)]
        facts += [f"{name} {files_digest(path)}" for name, path in named_adapters(settings.adapter).items()]
    except (OSError, ValueError):
        return ""
    facts += [f"{name}={chosen[name]!r}" for name in sorted(chosen) if name not in HOST_SETTINGS]
    facts += [f"{name} {chosen[name] is not None}" for name in ("amateur", "cascade", "exits")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
