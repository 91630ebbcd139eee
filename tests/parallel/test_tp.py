"""`LLM(model, tp=2)`: processes that share a model give the tokens of one, and end with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, core, host
from headrace.backends.native.lowering import SPLIT_FROM
from headrace.data.explicit import params_of
from headrace.data.plan import RankLostError
from headrace.parallel.ranks import lead
from headrace.runner.heads import FEATURE
from tests.composition import METHODS, PROPAGATED, QUERY, Models
from tests.early_exits import write_exits
from tests.tiny_files import Sizes, write_tiny_gguf
from tests.tiny_sources import write_tiny_marian

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

SIZES = Sizes(heads=9, kv_heads=3, head_dim=64, ffn=512)
LONG = ["The mill by the river " * 9, "Once upon a time " * 12]
PROMPTS = ["The mill by the river", "Once upon a time, the mill by the river and the mill by the river", "a"]
GIVEN: dict[str, Any] = {"threads": 1, "device": "cpu", "kv_cache_memory": "8MiB"}
MASK = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("tp") / "tiny.gguf", mask=MASK, sizes=SIZES, layers=3)


@pytest.fixture(scope="module")
def exits(model: Path) -> Path:
    return write_exits(model.with_name("exits"), model)


def followers(llm: LLM) -> list[int]:
    """The process ids of the other ranks."""
    group: Any = llm.runner.programs[0].group  # type: ignore[attr-defined]
    return [follower.process.pid for follower in group._followers]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def models(path: Path, exits: Path, tp: int) -> Iterator[Models]:
    made = []
    for more in (
        {"amateur": path, "exits": exits},
        {"amateur": path, "exits": exits, "exit_state": "propagate"},
        {"cascade": path},
    ):
        made.append(LLM(path, tp=tp, **{**GIVEN, **more}))
    opened = Models(*made)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def one(model: Path, exits: Path) -> Iterator[Models]:
    yield from models(model, exits, 1)


@pytest.fixture(scope="module")
def two(model: Path, exits: Path) -> Iterator[Models]:
    yield from models(model, exits, 2)


def answers(llm: LLM, fields: dict[str, Any]) -> list[Any]:
    outputs = llm.generate(PROMPTS, params_of({"max_tokens": 12, **fields}))
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [[(each.token_ids, each.finish_reason) for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("method", [name for name in METHODS if name != QUERY])
def test_decoding_methods(one: Models, two: Models, method: str) -> None:
    fields = METHODS[method]
    assert answers(two.of(method, fields), fields) == answers(one.of(method, fields), fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "structured_outputs": {"regex": "[a-z ]+"}},
        {"seed": 1, "structured_outputs": {"regex": "(mill|river| )+"}, "n": 2},
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 3},
    ],
)
def test_grammars_and_scores(one: Models, two: Models, fields: dict[str, Any]) -> None:
    assert answers(two.plain, fields) == answers(one.plain, fields)


def test_embeddings_and_scores_of_texts(one: Models, two: Models) -> None:
    assert [each.values for each in two.plain.embed(PROMPTS)] == [each.values for each in one.plain.embed(PROMPTS)]
    assert two.plain.score(PROMPTS) == one.plain.score(PROMPTS)


@pytest.mark.parametrize("method", ["greedy", "contrastive search", "early exit", PROPAGATED, "token cascade"])
def test_long_prompts(one: Models, two: Models, method: str) -> None:
    """Steps whose rows the ranks split, next to requests that decode."""
    fields = METHODS[method]

    def tokens(models: Models) -> list[Any]:
        outputs = models.of(method, fields).generate([PROMPTS[0], *LONG], params_of({"max_tokens": 8, **fields}))
        assert len(outputs[-1].prompt_token_ids) > SPLIT_FROM
        return [output.outputs[0].token_ids for output in outputs]

    assert tokens(two) == tokens(one)


@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 4},
        {"tp": 2, "kv_dtype": "int8", "speculate": "ngram"},
        {"tp": 2, "kv_dtype": "int4", "quantize": "int8", "activations": "token"},
        {"tp": 2, "draft": "model", "draft_tokens": 3},
        {"tp": 2, "speculate": "blocks"},
    ],
    ids=str,
)
def test_settings(model: Path, settings: dict[str, Any]) -> None:
    settings = {name: model if value == "model" else value for name, value in settings.items()}
    found = []
    for tp in (1, settings["tp"]):
        with LLM(model, **{**GIVEN, **settings, "tp": tp}) as llm:
            found.append([answers(llm, fields) for fields in ({"temperature": 0.0}, {"seed": 2, "n": 2})])
    assert found[0] == found[1]


# -- ends --------------------------------------------------------------------------------------------------------------
def test_closing_ends_the_followers(model: Path) -> None:
    with LLM(model, tp=4, **GIVEN) as llm:
        pids = followers(llm)
        assert len(pids) == 3
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


def test_a_model_that_is_dropped_ends_its_followers(model: Path) -> None:
    llm = LLM(model, tp=2, **GIVEN)
    (pid,) = followers(llm)
    del llm
    for _ in range(200):
        if not alive(pid):
            return
        time.sleep(0.05)
    raise AssertionError("the follower outlived its model")


def test_a_killed_program_leaves_no_process(model: Path) -> None:
    script = (
        "import sys, time\nfrom headrace import LLM\n"
        f"llm = LLM({str(model)!r}, tp=2, threads=1, kv_cache_memory='8MiB')\n"
        "print(*[one.process.pid for one in llm.runner.programs[0].group._followers], flush=True)\ntime.sleep(600)"
    )
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert pids
    program.kill()
    program.wait()
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "a follower outlived the program"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_follower_ends_the_model_with_one_error(model: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "PATIENCE", 3.0)
    with LLM(model, tp=2, **GIVEN) as llm:
        (pid,) = followers(llm)
        outputs = llm.stream(PROMPTS[0], max_tokens=200, temperature=0.0, ignore_eos=True)
        for _ in range(5):
            next(outputs)
        os.kill(pid, number)
        with pytest.raises(RankLostError, match=r"rank 1.*open it again"):
            list(outputs)
        assert not alive(pid)
        with pytest.raises(RankLostError):
            llm.generate("a", max_tokens=2)


def test_a_follower_that_dies_while_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[lead.Follower] = []
    start = lead.start

    def start_and_kill(*arguments: Any) -> lead.Follower:
        started.append(start(*arguments))
        started[-1].process.kill()
        return started[-1]

    monkeypatch.setattr(lead, "start", start_and_kill)
    with pytest.raises(ValueError, match=r"rank 1 of 2 did not load its share: its process ended \(signal SIGKILL\)"):
        LLM(model, tp=2, **GIVEN)
    assert [alive(follower.process.pid) for follower in started] == [False]


def test_a_follower_with_a_problem_is_quoted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = lead.start
    elsewhere = {"model": "/nowhere.gguf"}
    monkeypatch.setattr(lead, "start", lambda load, *more: start(lead.msgspec.structs.replace(load, **elsewhere), *more))
    with pytest.raises(ValueError, match=r"rank 1 of 2 did not load its share: .*nowhere\.gguf"):
        LLM(model, tp=2, **GIVEN)


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3}, "tp must be 1, 2, 4 or 8, not 3"),
        ({"tp": 0}, "tp must be 1, 2, 4 or 8, not 0"),
        ({"tp": 8}, r"the vocabulary of \d+ tokens is 7 units of 64; use a smaller tp"),
        ({"tp": 2, "backend": "torch"}, r"tp=2 does not run the torch back end, .*leave backend, dtype and device out"),
        ({"tp": 2, "dtype": "float64"}, "leave backend, dtype and device out"),
        ({"tp": 2, "activations": "split", "quantize": "int8"}, r"activations='split'.*use group or token"),
    ],
)
def test_refusals(model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(model, **{**GIVEN, **settings})


def test_models_that_are_refused(tmp_path: Path) -> None:
    narrow = write_tiny_gguf(tmp_path / "narrow.gguf")
    with pytest.raises(ValueError, match="layer 0 has 4 heads of 8, which are 1 units of 64 columns; use tp=1"):
        LLM(narrow, tp=2, **GIVEN)
    with pytest.raises(ValueError, match="does not run an encoder-decoder"):
        LLM(write_tiny_marian(tmp_path / "marian"), tp=2, threads=1)


def test_draft_heads_with_a_layer_are_refused(model: Path, tmp_path: Path) -> None:
    heads = write_exits(tmp_path / "heads", model, kind=FEATURE)
    with pytest.raises(ValueError, match="does not run draft heads with a layer of their own"):
        LLM(model, tp=2, draft=heads, **GIVEN)


def test_more_threads_than_processors_are_a_warning(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads = len(host.processors())
    with LLM(model, tp=2, **{**GIVEN, "threads": threads}):
        assert f"2 processes of {threads} threads share {threads} cores and wait for each other" in caplog.text


def test_seats() -> None:
    assert lead.seats(2, 2, [0, 1, 4, 5]) == [[0, 1], [4, 5]]
    assert lead.seats(2, 2, [0, 1, 4]) == [[], []]


def test_the_command_line(model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace",
        "run",
        str(model),
        "The mill",
        "--temperature",
        "0",
        "-m",
        "8",
        "--threads",
        "1",
    ]
    texts = [subprocess.run([*command, *more], capture_output=True, text=True, check=False) for more in ([], ["--tp", "2"])]
    assert texts[0].returncode == texts[1].returncode == 0, texts[1].stderr
    assert texts[0].stdout == texts[1].stdout
    refused = subprocess.run([*command, "--tp", "3"], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "must be 1, 2, 4 or 8" in refused.stderr
