"""Opening of the K/V store (`kv.store`) of a loaded model: checks of the settings, and the name of its folder."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace import __version__, core
from headrace.backends.memory import gib
from headrace.backends.recipe import BLOCK_SIZE, Recipe
from headrace.data.config import ModelConfig, parse_bytes
from headrace.data.plan import KVGroup
from headrace.data.settings import ModelSettings
from headrace.kv.blocks import BlockManager
from headrace.kv.segments import SEGMENT_BLOCKS, SegmentFolder, StoreFolderError, empty, private_folder, segment_files
from headrace.kv.store import KVStore
from headrace.runner.runner import Runner
from headrace.weights.model_files import model_files

__all__ = ["check_kv_store", "check_prefix_sharing", "empty", "kv_digest", "open_kv_store", "segment_files", "summary"]

log = logging.getLogger("headrace")

DEFAULT_SIZE = "8GiB"
# Settings that change neither K/V nor their layout.
NEUTRAL = (
    "kv_store",
    "kv_store_size",
    "key_file",
    "threads",
    "max_model_len",  # the rotary embedding that depends on it is in the programs' configs
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "speculate",  # the KV groups of a drafter are in the digest
    "draft_tokens",
    "draft_vocab",
    "parse_special",
    "classifier",
    "seed",
    "preset",
    "policy",
)


def check_kv_store(settings: ModelSettings, config: ModelConfig | None = None) -> None:
    """Check the settings of a K/V store, and create its folder. config: the target's, None if not known yet.

    Raises ValueError, one line.
    """
    if settings.kv_store is None:
        return
    if _limit(settings) < 1 << 20:
        raise ValueError(f"kv_store_size must be 1MiB or more, not {settings.kv_store_size}")
    check_prefix_sharing("kv_store", settings, config)
    private_folder(Path(settings.kv_store))


def check_prefix_sharing(option: str, settings: ModelSettings, config: ModelConfig | None) -> None:
    """Check that this process holds whole blocks of a prefix cache with these settings. config: the target's, None if not known
    yet. Raises ValueError that names the option."""
    if not settings.enable_prefix_caching:
        raise ValueError(f"{option} keeps the prefix cache: leave it out, or leave enable_prefix_caching on")
    if settings.tp != 1:
        raise ValueError(f"{option} does not work with tp={settings.tp}, whose ranks hold parts of K/V; leave one of them out")
    if settings.pp != 1 or settings.stages:
        raise ValueError(f"{option} does not work with pp and stages, as other processes hold K/V; leave one of them out")
    if config is not None and config.encoder:
        raise ValueError(f"{option}: an encoder keeps no K/V between requests; leave {option} out")
    if config is not None and config.source is not None:
        raise ValueError(f"{option}: an encoder-decoder reads another source in each request; leave {option} out")
    if config is not None and len(config.kv_sizes) > 1:
        raise ValueError(f"{option} saves one pool, and layers of this model have K/V of other sizes; leave {option} out")


def _limit(settings: ModelSettings) -> int:
    return parse_bytes(DEFAULT_SIZE if settings.kv_store_size is None else settings.kv_store_size)


def open_kv_store(recipe: Recipe, runner: Runner, blocks: BlockManager, numbers: str) -> KVStore | None:
    """The K/V store of a loaded model, if its settings name a folder. numbers: back end and dtype.

    Raises StoreFolderError (a ValueError), one line.
    """
    settings = recipe.settings
    if settings.kv_store is None:
        return None
    check_kv_store(settings, recipe.target.config)
    root, limit = Path(settings.kv_store), _limit(settings)
    memory = runner.block_memory(blocks.groups)
    smallest = SEGMENT_BLOCKS * sum(memory.sizes(1))
    if limit < 2 * smallest:
        tokens = SEGMENT_BLOCKS * BLOCK_SIZE
        raise StoreFolderError(
            f"kv_store_size: {tokens} tokens of {recipe.target.name} take {gib(smallest)}; allow twice that or more"
        )
    folder = SegmentFolder.open(root, kv_digest(recipe, runner, blocks.groups, numbers), memory.sizes, limit)
    store = KVStore(folder, blocks, memory)
    log.info("%s", summary(store))
    return store


def summary(store: KVStore) -> str:
    """What a store holds, one line for the user."""
    folder, counts = store.folder, store.counts
    assert folder is not None
    tokens = counts.segments * SEGMENT_BLOCKS * BLOCK_SIZE
    return f"kv store {folder.root}: {tokens:,} tokens of this model, {gib(counts.bytes)} of {gib(folder.limit)} in use"


def kv_digest(recipe: Recipe, runner: Runner, groups: Sequence[KVGroup], numbers: str) -> str:
    """Digest of everything that decides the K/V of given tokens and their layout in the pools: program version, number formats,
    settings, KV groups, configs, and the models' files by name, size and time of change. Raises StoreFolderError."""
    settings = msgspec.structs.asdict(recipe.settings)
    facts = [
        __version__,
        numbers,
        core.order_of_sums(),
        str(BLOCK_SIZE),
        repr(sorted((name, settings[name]) for name in settings if name not in NEUTRAL)),
    ]
    facts += [repr((group.name, group.kind, group.layers, group.model)) for group in groups]
    facts += [repr(program.config) for program in runner.programs]
    folders = [Path(one) for one in (settings["draft"], settings["exits"]) if one is not None and Path(one).is_dir()]
    try:
        for path in [*(each.path for each in recipe.models.values()), *folders]:
            for file in model_files(path):
                state = file.stat()
                facts.append(f"{file.name} {state.st_size} {state.st_mtime_ns}")
    except OSError as error:
        raise StoreFolderError(f"kv_store: cannot read {error.filename}: {error.strerror}") from None
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
