"""Layer offload: weights on disk give the same bits, and only so many of them are in memory as the plan allows."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import core, host
from headrace.backends.native import offload
from headrace.backends.native.offload import Division, divide, least_resident, unit_sizes
from headrace.backends.native.weights import packed_sizes
from headrace.data.params import BeamSearchParams
from headrace.llm import LLM
from tests.tiny_files import Sizes, write_tiny_gguf
from tests.tiny_sources import write_tiny_marian

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

PAGE = 4096
LAYERS = 6
# A layer of the model has 2.6 MB.
SIZES = Sizes(ffn=8192)
PROMPTS = ["The mill by the river and the mill by the river", "a"]
GIVEN: dict[str, Any] = {"threads": 2, "device": "cpu", "kv_cache_memory": "4MiB"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("offload") / "tiny.gguf", sizes=SIZES, layers=LAYERS)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine in which two layers of the model are held, next to the two that stream."""
    # The test's folder may be in memory; the disk with the source is a disk.
    monkeypatch.setattr(offload, "home", lambda: tmp_path)
    monkeypatch.setattr(host, "in_memory", lambda folder: False)
    monkeypatch.setattr(offload, "room_for_weights", lambda spare, least: 2 * least)


def program(llm: LLM) -> Any:
    return llm.runner.programs[0]  # type: ignore[attr-defined]


def restart(llm: LLM, **changes: Any) -> None:
    """Stream the weights of an opened model with a fault: ahead, release."""
    one, division = program(llm), divide(program(llm).core.weight_units(), 2 * least_resident(program(llm).core.weight_units()))
    one.streaming = one.core.stream(one.weights.arena, list(division.held), **changes)


def tokens(llm: LLM, **settings: Any) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, **{"max_tokens": 5, "ignore_eos": True, "temperature": 0.0, **settings})
    return [list(each.token_ids) for output in outputs for each in output.outputs]


def most_resident(llm: LLM) -> int:
    """Largest number of bytes of the weights in memory while the model generates, in its pages and in the system's cache.

    The smaller of two looks in a row: pages change during a look, which may count released pages and those read after them.
    """
    seen, over = [0], threading.Event()

    def watch() -> None:
        before = 0
        while not over.is_set():
            now = program(llm).weights.arena.resident
            seen[0] = max(seen[0], min(before, now))
            before = now
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    tokens(llm)
    over.set()
    thread.join()
    return seen[0]


def bound(llm: LLM) -> int:
    """Bytes that may be in memory: the division's, and pages that units share."""
    sizes = program(llm).core.weight_units()
    return divide(sizes, 2 * least_resident(sizes)).resident + 2 * PAGE * len(sizes)


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({}, {}),
        ({}, {"temperature": 0.8, "seed": 7, "n": 2}),
        ({}, {"beam_width": 3, "temperature": None}),
        ({"speculate": "ngram", "draft_tokens": 3}, {}),
        ({"quantize": "int8", "kv_dtype": "int8"}, {}),
        ({"max_num_batched_tokens": 8}, {}),
    ],
    ids=["greedy", "sampled", "beams", "drafts", "integers", "chunks"],
)
def test_the_bits_are_those_without_it(model: Path, small: None, settings: dict[str, Any], sampling: dict[str, Any]) -> None:
    sampling = {name: value for name, value in {"temperature": 0.0, **sampling}.items() if value is not None}
    answers = []
    for on in (False, True):
        with LLM(model, offload=on, **GIVEN, **settings) as llm:
            if "beam_width" in sampling:
                outputs = llm.generate(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=4))
                answers.append([list(each.token_ids) for output in outputs for each in output.outputs])
            else:
                answers.append(tokens(llm, **sampling))
            if on:
                stats = program(llm).streaming.stats
                assert stats["fetched"] > 2 * program(llm).weights.bytes  # several steps have read from disk
                assert stats["missed"] == 0
    assert answers[0] == answers[1]


def test_memory_stays_below_the_bound(model: Path, small: None) -> None:
    with LLM(model, offload=True, **GIVEN) as llm:
        assert most_resident(llm) <= bound(llm) < 0.7 * program(llm).weights.bytes
        # Control: pages of computed layers that are not released.
        restart(llm, release=False)
        assert most_resident(llm) > 0.95 * program(llm).weights.bytes > bound(llm)


def test_reading_the_wrong_layer_is_counted(model: Path, small: None) -> None:
    with LLM(model, offload=True, **GIVEN) as llm:
        right = tokens(llm)
        restart(llm, ahead=2)
        assert tokens(llm) == right
        assert program(llm).streaming.stats["missed"] > 10


def test_load_says_what_a_step_reads(model: Path, small: None, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(model, offload=True, **GIVEN):
        assert "offload: each step reads" in caplog.text
        assert "for trying a model, not for serving" in caplog.text


def test_a_model_that_fits_stays_in_memory(model: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "room_for_weights", lambda spare, least: spare)
    with LLM(model, offload=True, **GIVEN) as llm:
        assert "all weights fit in memory" in llm.memory_plan.summary
        # All but the table whose rows are looked up.
        assert program(llm).weights.arena.resident >= sum(program(llm).core.weight_units()[1:])
        tokens(llm)


def test_closing_ends_the_thread_and_removes_the_file(model: Path, small: None, tmp_path: Path) -> None:
    llm = LLM(model, offload=True, **GIVEN)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert list(tmp_path.iterdir()) == []  # the file has no name: nothing is left after a crash
    tokens(llm)
    llm.close()
    assert len(list(Path("/proc/self/task").iterdir())) < threads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 2}, "offload: it runs in one process, without tp, pp and stages; leave offload out"),
        ({"pp": 2}, "offload: it runs in one process, without tp, pp and stages; leave offload out"),
        ({"backend": "torch"}, "offload: it needs the native core, and the back end is torch; leave offload out"),
        ({"dtype": "float64"}, "offload: dtype float64 is not supported by the native core; leave offload out"),
        ({"amateur": "itself"}, "offload: the amateur model must be another one than .*tiny.gguf; leave offload out"),
    ],
)
def test_refusals(model: Path, small: None, settings: dict[str, Any], message: str) -> None:
    settings = {name: model if value == "itself" else value for name, value in settings.items()}
    with pytest.raises(ValueError, match=message):
        LLM(model, offload=True, **{**GIVEN, **settings})


def test_an_encoder_decoder_is_refused(small: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="offload: it is for decoders, and .* is an encoder or has one; leave offload out"):
        LLM(write_tiny_marian(tmp_path / "marian"), offload=True, **GIVEN)


def test_a_disk_in_memory_or_without_space_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(offload, "home", lambda: tmp_path)
    monkeypatch.setattr(host, "in_memory", lambda folder: True)
    with pytest.raises(ValueError, match=r"offload: .* is in memory; set HEADRACE_HOME to a folder on a disk"):
        LLM(model, offload=True, **GIVEN)
    monkeypatch.setattr(host, "in_memory", lambda folder: False)
    monkeypatch.setattr(offload.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(ValueError, match=r"offload: the weights take .* MiB of disk and 1.0 MiB are free in .*; free disk"):
        LLM(model, offload=True, **GIVEN)


def test_units_are_those_of_the_program(model: Path, small: None) -> None:
    with LLM(model, offload=True, **GIVEN) as llm:
        one = program(llm)
        planned = unit_sizes(one.model, packed_sizes(one.model, llm.opened.source))
        assert planned == one.core.weight_units()


def test_units_are_held_evenly_and_within_the_room() -> None:
    sizes = [5, *[10] * 20, 30]
    assert divide(sizes, 235) == Division(tuple(sizes), (True,) * 22)
    for room in range(least_resident(sizes), 235):
        division = divide(sizes, room)
        assert division.resident <= room
        assert division.streamed > 0
    half = divide(sizes, 140)
    runs = "".join("h" if held else "s" for held in half.held[1:21])
    assert "hhhh" not in runs
    assert runs.count("h") >= 8
    assert divide(sizes, 0).resident == least_resident(sizes) == 40
