"""K/V on disk: loaded equals computed bit for bit, and whatever happens to the folder, no output changes.

Segments have 2 blocks here, not 16, so that short prompts have some.
"""

import errno
import logging
import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.data.plan import DRAFT, TARGET, KVGroup
from headrace.data.settings import ModelSettings
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv import segments, store
from headrace.kv.segments import SegmentFolder, StoreFolderError
from headrace.kv.store import KVStore
from headrace.llm import LLM
from headrace.runner.runner import Runner
from headrace.startup.kv_store import check_kv_store
from tests import early_exits
from tests.cli_shell import Shell
from tests.e2e.test_draft_model import Native
from tests.tiny import VOCAB, finish, tiny_config, tiny_engine, tiny_model, tokens_of
from tests.tiny_files import write_tiny_gguf
from tests.tiny_native import native_model, native_program

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPT = [(7 * at * at + 3 * at) % VOCAB for at in range(75)]
BITS = "0" * 32
SEGMENT = 32  # tokens
MIB = 1 << 20


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (segments, store):
        monkeypatch.setattr(module, "SEGMENT_BLOCKS", 2)


def native(blocks: int = 40, budget: int = 64, drafts: bool = False, **options: Any) -> Engine:
    target, *others = [native_program(native_model(), blocks=blocks, **options)]
    groups = (TARGET,)
    if drafts:
        others, groups = [native_program(native_model(norm_eps=3e-2), blocks=blocks)], (TARGET, KVGroup(DRAFT, model=1))
    config = EngineConfig(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=256), CacheConfig(blocks, 16)
    )
    speculation = Speculation([DraftModel(least=0.0)], 256, 4) if drafts else None
    return Engine(InProcess(Runner(target, others)), config, vocab_size=VOCAB, speculation=speculation, groups=groups)


def with_store(engine: Engine, root: Path, limit: int = 64 * MIB) -> Engine:
    memory = engine.executor.runner.block_memory(engine.blocks.groups)  # type: ignore[attr-defined]
    folder = SegmentFolder.open(root, BITS, memory.sizes, limit)
    engine.scheduler.store = KVStore(folder, engine.blocks, memory)
    return engine


def run(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY, salt: bytes = b"") -> list[list[int]]:
    """The outputs of a request, whose segments are saved then."""
    request = engine.add(prompt, params, salt=salt)
    finish(engine)
    return tokens_of(request)


def wait_for_writer(engine: Engine) -> None:
    """Wait until the segments of the requests so far are copied: the store holds few blocks and saves no others."""
    kv_store = kv_store_of(engine)
    while any(True for _ in kv_store.held):
        kv_store.wait()
        kv_store.release()


def end(engine: Engine) -> segments.SegmentCounts:
    """Wait for the store's threads; its counts."""
    kv_store = engine.scheduler.store
    assert kv_store is not None
    kv_store.close()
    engine.check()
    assert engine.blocks.used == 0, "the store holds blocks after its end"
    return kv_store.counts


def files(root: Path) -> list[Path]:
    return sorted(path for _, _, path in segments.segment_files(root))


def bytes_of(engine: Engine, prompt: list[int]) -> np.ndarray:
    """K/V of a prompt's full segments, from the pool."""
    request = engine.add([*prompt, 1], GREEDY.replace(max_tokens=1))
    count = len(prompt) // SEGMENT * 2
    blocks = [engine.blocks.pool.find(engine.blocks.hash(request.seqs[0], at), 1) for at in range(count)]
    assert None not in blocks
    data = engine.executor.runner.block_memory(engine.blocks.groups).read(1, blocks)  # type: ignore[attr-defined]
    finish(engine)
    return data  # type: ignore[no-any-return]


def centred() -> Engine:
    centre = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    return native(kv_dtype="int4", centre=dict(enumerate(centre)))


POOLS = {
    "bfloat16": native,
    "float32": lambda: native(kv_dtype="float32"),
    "int8": lambda: native(kv_dtype="int8"),
    "int4": lambda: native(kv_dtype="int4"),
    "int4 centred": centred,
    "torch": lambda: tiny_engine(tiny_model(), blocks=40, block_size=16),
}


@pytest.mark.parametrize("pool", POOLS)
def test_loaded_equals_computed(tmp_path: Path, pool: str) -> None:
    """The bytes of the pools and the output, for each number format of K/V."""
    computed = with_store(POOLS[pool](), tmp_path / "kv")
    expected = run(computed)
    first = bytes_of(computed, PROMPT)
    assert end(computed).saved == 2
    loaded = with_store(POOLS[pool](), tmp_path / "kv")
    assert run(loaded) == expected
    assert (bytes_of(loaded, PROMPT) == first).all()
    counts = end(loaded)
    assert (counts.loaded, counts.saved) == (2, 0)
    assert counts.bytes_read == len(first) == computed.scheduler.store.counts.bytes_written  # type: ignore[union-attr]


def damage(path: Path) -> None:
    """Flip the highest bit of each byte, the sign of each number, in the second half of a file."""
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data)):
        data[at] ^= 0x80
    path.write_bytes(data)


def flipped(root: Path, caplog: pytest.LogCaptureFixture) -> tuple[bool, str]:
    """Whether the output stays equal after all files were damaged, and what the log says."""
    engine = with_store(native(), root)
    expected = run(engine)
    end(engine)
    for path in files(root):
        damage(path)
    caplog.clear()
    engine = with_store(native(), root)
    output = run(engine)
    end(engine)
    return output == expected, caplog.text


def test_damaged_segment_is_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    equal, text = flipped(tmp_path / "kv", caplog)
    assert equal
    assert "the checksum of block" in text
    assert "it is deleted and computed again" in text


def test_control_damage_without_checksum(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the CRC the same damage changes the output, so the test above can fail."""
    monkeypatch.setattr(segments, "checksum", lambda piece: 0)
    assert flipped(tmp_path / "kv", caplog) == (False, "")


def test_tenants_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant never loads what another one wrote. Control: without the salt in the root of the chain it does."""
    engine = with_store(native(), tmp_path / "kv")
    expected = run(engine, salt=b"one")
    end(engine)
    engine = with_store(native(), tmp_path / "kv")
    assert run(engine, salt=b"two") == expected
    assert end(engine).loaded == 0
    engine = with_store(native(), tmp_path / "kv")
    assert run(engine, salt=b"one") == expected
    assert end(engine).loaded == 2

    original = Engine._sequence
    monkeypatch.setattr(Engine, "_sequence", lambda self, request, root: original(self, request, b""))
    for salt, loaded in ((b"one", 0), (b"two", 2)):
        engine = with_store(native(), tmp_path / "control")
        run(engine, salt=salt)
        assert end(engine).loaded == loaded


def test_another_model_and_another_place(tmp_path: Path) -> None:
    """A file under another segment's name is noticed; a folder of other bits is not read."""
    engine = with_store(native(), tmp_path / "kv")
    expected = run(engine)
    end(engine)
    one, two = files(tmp_path / "kv")
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    engine = with_store(native(), tmp_path / "kv")
    assert run(engine) == expected
    assert end(engine).damaged == 2
    (tmp_path / "kv" / BITS).rename(tmp_path / "kv" / ("1" * 32))
    engine = with_store(native(), tmp_path / "kv")
    assert run(engine) == expected
    counts = end(engine)
    assert (counts.loaded, counts.damaged) == (0, 0)


MANY = {
    "n": SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=10),
    "beams": BeamSearchParams(beam_width=3, n=3, max_tokens=10).sampling(),
    "scores": SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1),
}


@pytest.mark.parametrize("method", MANY)
def test_decoding_methods(tmp_path: Path, method: str) -> None:
    expected = run(native(), params=MANY[method])
    for _ in range(2):
        engine = with_store(native(), tmp_path / "kv")
        assert run(engine, params=MANY[method]) == expected
        counts = end(engine)
    assert counts.saved == 0
    assert (counts.loaded > 0) == (method != "scores")


def test_draft_model(tmp_path: Path) -> None:
    """K/V of a draft model are saved with the target's. No output changes."""
    expected = run(native())
    for _ in range(2):
        engine = with_store(native(drafts=True), tmp_path / "kv")
        assert run(engine) == expected
        counts = end(engine)
    assert counts.loaded
    assert any(path.name.endswith(".3.kv") for path in files(tmp_path / "kv")), "no segment has both models"


@pytest.mark.parametrize("propagate", [False, True])
def test_early_exits(tmp_path: Path, propagate: bool) -> None:
    """K/V above an exit are saved only where all layers ran; a loaded prefix changes no output."""
    side = early_exits.side_of(Native)
    params = GREEDY.replace(exit_threshold=0.5, max_tokens=24)
    expected = run(early_exits.engine_of(side, propagate=propagate), params=params)
    for _ in range(2):
        engine = with_store(early_exits.engine_of(side, propagate=propagate), tmp_path / "kv")
        assert run(engine, params=params) == expected
        counts = end(engine)
    assert counts.loaded


OTHERS: dict[str, dict[str, Any]] = {
    "amateur": {"contrastive_beta": 0.5},
    "cascade": {"cascade_threshold": 0.05},
    "draft": {},
}


@pytest.mark.parametrize("other", OTHERS)
def test_two_models(tmp_path: Path, other: str) -> None:
    """The segments have the K/V of both models, where both read the prompt."""
    model, small = write_tiny_gguf(tmp_path / "m.gguf"), write_tiny_gguf(tmp_path / "s.gguf", seed=1, layers=1)
    outputs = []
    for folder in (None, tmp_path / "kv", tmp_path / "kv"):
        with LLM(model, kv_store=folder, **{other: small}) as llm:  # type: ignore[arg-type]
            (output,) = llm.generate([list(range(80))], max_tokens=12, temperature=0, **OTHERS[other])
            outputs.append(output.outputs[0].token_ids)
            loaded = 0 if folder is None else kv_store_of(llm.engine).counts.loaded
    assert outputs[0] == outputs[1] == outputs[2]
    assert loaded == 2


def test_contrastive_search_computes(tmp_path: Path) -> None:
    """Its hidden states are not saved."""
    model, texts = write_tiny_gguf(tmp_path / "m.gguf"), []
    for _ in range(2):
        with LLM(model, kv_store=tmp_path / "kv") as llm:
            (output,) = llm.generate([list(range(80))], max_tokens=6, temperature=0, penalty_alpha=0.6, top_k=4)
            texts.append(output.outputs[0].token_ids)
            counts = kv_store_of(llm.engine).counts
    assert texts[0] == texts[1]
    assert (counts.loaded, counts.segments) == (0, 2)


def test_other_requests_go_on(tmp_path: Path) -> None:
    """While a segment is read, a running request gets its tokens, and the waiting one needs no step of its own."""
    engine = with_store(native(), tmp_path / "kv")
    expected = run(engine)
    end(engine)
    engine = with_store(native(), tmp_path / "kv")
    kv_store, arrives = engine.scheduler.store, threading.Event()
    assert kv_store is not None
    read = kv_store.folder.read

    def slow(key: bytes) -> Any:
        arrives.wait(60)
        return read(key)

    kv_store.folder = type("Slow", (), {"read": staticmethod(slow), "groups_of": kv_store.folder.groups_of})()  # type: ignore[assignment]
    running = engine.add([5, 6, 7], GREEDY)
    waiting = engine.add(PROMPT, GREEDY)
    for _ in range(6):
        engine.step()
    assert len(running.seqs[0].output) == 6
    assert waiting.seqs[0].kv.computed == [0]
    arrives.set()
    kv_store.folder = kv_store_folder(engine, tmp_path / "kv")
    finish(engine)
    assert tokens_of(waiting) == expected
    end(engine)


def kv_store_folder(engine: Engine, root: Path) -> SegmentFolder:
    kv_store = engine.scheduler.store
    assert kv_store is not None
    return SegmentFolder.open(root, BITS, kv_store.memory.sizes, 64 * MIB)


def test_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests compute what does not arrive in time."""
    engine = with_store(native(), tmp_path / "kv")
    expected = run(engine)
    end(engine)
    hang = threading.Event()
    original = SegmentFolder.read

    def read(folder: SegmentFolder, key: bytes) -> Any:
        hang.wait(60)
        return original(folder, key)

    monkeypatch.setattr(SegmentFolder, "read", read)
    monkeypatch.setattr(store, "LOAD_SECONDS", 0.02)
    engine = with_store(native(), tmp_path / "kv")
    assert run(engine) == expected
    hang.set()
    assert end(engine).saved == 0


def test_full_pool_waits_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are held for a slow writer are missing for requests: these wait and end all the same."""
    engine = with_store(native(blocks=16), tmp_path / "kv")
    monkeypatch.setattr(store, "HELD_SHARE", 1)
    kv_store, go = engine.scheduler.store, threading.Event()
    assert kv_store is not None
    read = kv_store.memory.read

    def slow(*arguments: Any) -> Any:
        go.wait(0.3)
        return read(*arguments)

    monkeypatch.setattr(kv_store.memory, "read", slow)
    run(engine)
    long = [(at * at + at) % VOCAB for at in range(230)]
    request = engine.add(long, GREEDY)
    finish(engine)
    assert tokens_of(request) == run(native(), long)
    go.set()
    end(engine)


@pytest.mark.parametrize("broken", ["write", "read"])
def test_disk_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A full disk costs one line a minute, an unreadable file one line each; outputs stay."""
    root = tmp_path / "kv"
    if broken == "read":
        engine = with_store(native(), root)
        run(engine)
        end(engine)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC if broken == "write" else errno.EIO, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((segments, "_write_all") if broken == "write" else (SegmentFolder, "_read")), fail)
    engine = with_store(native(), root)
    assert run(engine) == run(native())
    counts = end(engine)
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == (1 if broken == "write" else 2)
    if broken == "write":
        assert "cannot write" in lines[0]
        assert (counts.saved, files(root), list((root / BITS).iterdir())) == (0, [], [])
    else:
        assert (counts.loaded, counts.damaged) == (0, 2)


def test_size_limit(tmp_path: Path) -> None:
    """The folder stays below its limit; the least recently used segments leave, the end of a chain before its beginning."""
    root = tmp_path / "kv"
    engine = with_store(native(), root)
    run(engine)
    size = end(engine).bytes // 2
    engine = with_store(native(), root, limit=5 * size + 100)
    prompts = [[at + 1, *PROMPT[:63]] for at in range(6)]
    for prompt in prompts:
        run(engine, prompt)
        wait_for_writer(engine)
    counts = end(engine)
    assert counts.evicted
    assert sum(path.stat().st_size for path in files(root)) <= 5 * size + 100
    keys = [engine.blocks.hash(engine.add(prompt, GREEDY).seqs[0], 1) for prompt in prompts]
    left = {path.name[:64] for path in files(root)}
    assert keys[-1].hex() in left
    assert keys[0].hex() not in left


def test_two_processes_one_folder(tmp_path: Path) -> None:
    """A second store does not need the first one's index, and survives that files disappear."""
    root = tmp_path / "kv"
    one, two = with_store(native(), root), with_store(native(), root)
    expected = run(one)
    end(one)
    kv_store_of(two).folder.refresh()
    files(root)[0].unlink()
    assert run(two) == expected
    assert end(two).damaged == 0
    assert len(files(root)) == 2


def kv_store_of(engine: Engine) -> KVStore:
    assert engine.scheduler.store is not None
    return engine.scheduler.store


@dataclass
class Load:
    prompts: list[list[int]]
    params: list[SamplingParams]


def load(random_: random.Random) -> Load:
    """Prompts with shared beginnings."""
    trunk = [random_.randrange(VOCAB) for _ in range(150)]
    prompts = [
        trunk[: random_.randrange(0, 150)] + [random_.randrange(VOCAB) for _ in range(random_.randrange(1, 50))]
        for _ in range(5)
    ]
    settings = [
        SamplingParams(temperature=random_.choice((0.0, 0.9)), seed=at, n=random_.choice((1, 1, 2)), max_tokens=5)
        for at in range(5)
    ]
    return Load(prompts, settings)


def run_load(engine: Engine, one: Load) -> list[list[list[int]]]:
    requests = [engine.add(prompt, params) for prompt, params in zip(one.prompts, one.params, strict=True)]
    finish(engine)
    return [tokens_of(request) for request in requests]


@pytest.mark.parametrize("seed", range(3))
def test_random_loads_and_faults(tmp_path: Path, seed: int) -> None:
    """Seeded random loads over small pools, with restarts; between them files are lost, cut and flipped. Outputs are those
    without a store."""
    random_ = random.Random(seed)
    root, loaded = tmp_path / "kv", 0
    plain = native()
    ones = [load(random_) for _ in range(2)]
    for _ in range(5):
        one = random_.choice(ones)
        engine = with_store(native(blocks=random_.choice((30, 60)), budget=random_.choice((24, 64))), root, MIB)
        assert run_load(engine, one) == run_load(plain, one)
        loaded += end(engine).loaded
        for path in files(root):
            fault = random_.choice(("none", "none", "lost", "cut", "flipped"))
            if fault == "lost":
                path.unlink()
            elif fault == "cut":
                os.truncate(path, random_.randrange(path.stat().st_size))
            elif fault == "flipped":
                data = bytearray(path.read_bytes())
                data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
                path.write_bytes(data)
    assert loaded, "the load never hit"


# -- opening -----------------------------------------------------------------------------------------------------------
def test_folder_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "kv"
    segments.private_folder(root)
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o755)
    with pytest.raises(StoreFolderError, match=r"other users can open .*kv \(mode 755\); run chmod 700"):
        segments.private_folder(root)
    root.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StoreFolderError, match="belongs to another user"):
        segments.private_folder(root)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFolderError, match="is a file"):
        segments.private_folder(tmp_path / "file")


REFUSED = {
    "tp": ({"tp": 2}, "tp=2"),
    "pp": ({"pp": 2}, "pp and stages"),
    "prefix": ({"enable_prefix_caching": False}, "enable_prefix_caching"),
    "size": ({"kv_store_size": "10kB"}, "1MiB or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_setting_refusals(tmp_path: Path, case: str) -> None:
    settings, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        check_kv_store(ModelSettings(kv_store=tmp_path / "kv", **settings))  # type: ignore[arg-type]
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_encoders_are_refused(tmp_path: Path, architecture: str) -> None:
    config = tiny_config()
    config = tiny_config(encoder=True) if architecture == "bert" else tiny_config(source=config)
    with pytest.raises(ValueError, match="leave kv_store out"):
        check_kv_store(ModelSettings(kv_store=tmp_path / "kv"), config)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_restart_and_rm(tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the API and the command line: the text after a restart, other settings, and the end of a store."""
    model, root = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "kv"
    prompt, texts, loads = list(range(80)), [], []
    for settings in ({}, {"max_num_seqs": 4, "threads": 1}, {"kv_dtype": "int8"}):
        with LLM(model, kv_store=root, kv_store_size="1MiB", **settings) as llm:  # type: ignore[arg-type]
            texts.append(llm.generate([prompt], max_tokens=8, temperature=0)[0].outputs[0].token_ids)
        loads.append(kv_store_of(llm.engine).counts.loaded)
    assert loads == [0, 2, 0]
    assert texts[0] == texts[1]
    assert len(list(root.iterdir())) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(root))
    (root / "notes.txt").write_text("not the store's")
    assert shell("rm", "--kv-store", root, stdin="n\n")[0] == 1
    code, _, err = shell("rm", "--kv-store", root, "--yes")
    assert (code, "4 segments deleted" in err) == (0, True), err
    assert [path.name for path in root.iterdir()] == ["notes.txt"]
    assert shell("rm", "--kv-store", tmp_path / "none", "-y")[0] == 1
    assert shell("rm")[0] == 2
    monkeypatch.setattr("headrace.startup.kv_store.SEGMENT_BLOCKS", 2000)
    with pytest.raises(ValueError, match="allow twice that"):
        LLM(model, kv_store=root, kv_store_size="1MiB")
