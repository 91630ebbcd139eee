"""Rows that leave early and go up as they are: outputs, K and V are those of the first run whatever is computed again, and what
is approximate stays with who made it."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.data.params import SamplingParams
from headrace.data.plan import Feed, NewSlot, StepPlan, TableDelta
from headrace.data.types import Holding, Request, Sequence, Wire
from headrace.engine import feeding
from headrace.engine.engine import Engine
from headrace.kv.blocks import BlockManager
from headrace.llm import LLM
from headrace.runner.early_exit import PropagatingExit
from headrace.runner.runner import Slots
from headrace.runner.span import Span
from headrace.startup import thresholds
from tests.cli_shell import Shell
from tests.e2e.test_draft_model import Native, Torch
from tests.e2e.test_early_exit import collect_logprobs
from tests.early_exits import AFTER, DEEP, LAYERS, Job, Propagated, engine_of, expected, jobs_of, played, side_of, write_exits
from tests.tiny import finish
from tests.tiny_files import write_tiny_gguf
from tests.tiny_native import native_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LEAVES = GREEDY.replace(exit_threshold=0.17)
KINDS: dict[str, tuple[type[Torch], int]] = {"torch": (Torch, 1), "native": (Native, 9)}  # with so many jobs
Case = tuple[Torch, list[Job], list[list[list[int]]]]


@lru_cache
def case_of(kind: str) -> Case:
    """A side, jobs, and what comes of each, alone and without a cache."""
    of, count = KINDS[kind]
    side, jobs = side_of(of, DEEP), jobs_of(5, count)
    reference = Propagated(side)
    outputs = expected(reference, jobs)
    may = sum(len(tokens) for each, (_, one) in zip(outputs, jobs, strict=True) for tokens in each if one.exit_threshold)
    assert 0.1 * may < reference.exited < 0.9 * may, f"the thresholds do not part the tokens: {reference.exited} of {may}"
    return side, jobs, outputs


@pytest.fixture
def native() -> Case:
    return case_of("native")


def propagating(side: Torch, **settings: Any) -> Engine:
    return engine_of(side, propagate=True, **settings)


WAYS: list[tuple[str, dict[str, Any], int]] = [
    ("native", {}, 0),
    ("native", {"seqs": 3}, 3),
    ("native", {"budget": 7}, 2),
    ("native", {"blocks": 10, "budget": 11}, 0),  # they drive each other out
    ("torch", {"budget": 7}, 3),
]


@pytest.mark.parametrize(("kind", "settings", "preempt"), WAYS)
def test_every_output_equals_the_reference(kind: str, settings: dict[str, Any], preempt: int) -> None:
    side, jobs, outputs = case_of(kind)
    engine = propagating(side, **settings)
    for _ in range(2):  # the second time from the prefix cache, as far as that goes
        assert played(engine, jobs, preempt) == outputs
    assert engine.scheduler.preemptions > 0 or not (preempt or "blocks" in settings)
    assert engine.blocks.used == 0


@pytest.mark.parametrize("params", [GREEDY, GREEDY.replace(temperature=0.9, seed=4, n=2)], ids=["greedy", "sampled"])
def test_an_unreachable_threshold_equals_the_full_model(native: Case, params: SamplingParams) -> None:
    whole = params.replace(logprobs=3, max_tokens=12)
    left = collect_logprobs(propagating(native[0]), [5, 9, 7], whole.replace(exit_threshold=1.01))
    assert left == collect_logprobs(engine_of(native[0], leaves=False), [5, 9, 7], whole)


# -- K and V ---------------------------------------------------------------------------------------------------------------


def stored(engine: Engine, table: list[int], count: int) -> Any:
    """K and V of the first tokens of a block table: [layers, 2, count, heads, head_dim]."""
    program: Any = engine.executor.runner.programs[0]  # type: ignore[attr-defined]
    size = engine.blocks.block_size
    places = np.array([table[at // size] * size + at % size for at in range(count)], np.int32)
    if hasattr(program, "pool"):
        return program.pool.data.flatten(2, 3)[:, :, places].numpy().copy()
    layer = program.config.layers[0]
    made = np.zeros((program.config.num_layers, 2, count, layer.kv_heads, layer.head_dim), np.float32)
    for number, (k, v) in enumerate(made):
        program.kv.read(number, places, k, v)
    return made


def pool_after(side: Torch, tokens: int, preempt: int, beside: int = 0) -> tuple[list[int], Any]:
    """Of a request that leaves, beside some others: the KV indices that did, and what the pool has of it before its last
    token is fed, when it has so many."""
    engine = propagating(side)
    request = engine.add(list(range(5, 30)), LEAVES.replace(max_tokens=tokens - 24))
    (seq,) = request.seqs
    for prompt, params in jobs_of(7, beside):
        engine.add(prompt, params)
    last = 0  # of how many tokens it had been when it was preempted
    while len(seq.tokens) < tokens:
        if preempt and len(seq.tokens) - last > preempt and request in engine.scheduler.running:
            engine.scheduler._preempt(request)
            last = len(seq.tokens)
        engine.step()
    assert request.metrics.preemptions > 1 or not preempt
    return list(seq.kv.left), stored(engine, seq.kv.tables[0], tokens - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pool_after_preemptions_is_the_first_runs(kind: str) -> None:
    side = side_of(KINDS[kind][0], DEEP)
    left, first = pool_after(side, 44, 0)
    assert 3 <= len(left) <= 16, "some leave, some do not"
    for preempt, beside in ((5, 0), (0, 5), (7, 5)):
        again, kept = pool_after(side, 44, preempt, beside)
        assert again == left
        if kind == "native":
            assert np.array_equal(kept, first)
        else:
            assert np.allclose(kept, first, atol=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gpt2", "olmo2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fill_stores_the_kv_of_the_row(kind: str, architecture: str) -> None:
    """A span that only fills stores what each of its layers does that is given the row; what is not computed is not written."""
    side = KINDS[kind][0]()
    program: Any = side.program(native_model(architecture, num_layers=DEEP), 8)
    slots = Slots(program.live)
    tables = [TableDelta(slot, 0, 0, [slot * 4 + at for at in range(4)]) for slot in range(2)]
    slots.apply(StepPlan(0, new=[NewSlot(slot, tokens=[3, 4, 5, 6, 7], params=GREEDY) for slot in range(2)], tables=tables))

    def run(slot: int, span: Span, rows: Any = None) -> Any:
        step = program.step()
        step.feed(Feed(slot, 0, 5), slots[slot])
        return program.run(step, span, rows, keep=not span.fill)

    rows = run(0, Span(AFTER - 1))
    assert np.array_equal(program.on_host(run(1, Span(AFTER - 1))), program.on_host(rows))
    for layer in range(AFTER - 1, program.config.num_layers):
        run(0, Span(layer + 1, first=layer), rows)
    run(1, Span(first=AFTER - 1, fill=True), rows)
    engine: Any = type("Holds", (), {"blocks": type("Blocks", (), {"block_size": side.block})})()
    engine.executor = type("Executor", (), {"runner": type("Runner", (), {"programs": [program]})})
    one, other = (stored(engine, [slot * 4 + at for at in range(4)], 5) for slot in range(2))
    assert np.abs(one[AFTER - 1 :]).max() > 0
    assert np.array_equal(one, other) if kind == "native" else np.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize(
    ("left", "start", "end"),
    [([], 0, 9), ([], 9, 10), ([5, 6, 8], 0, 5), ([5, 6, 8], 5, 7), ([5, 6, 8], 6, 7), ([5, 6, 8], 7, 8), ([5, 6, 8], 8, 9)],
)
def test_a_feed_has_one_depth(left: list[int], start: int, end: int) -> None:
    """Of ten tokens, four of them the prompt's, the last is decided anew and fed alone."""
    seq = Sequence(0, list(range(10)), 4, Holding(left=left, depths=[2] * len(left)), Wire())
    assert feeding.end_of_depth(seq, start) == end
    assert feeding.depth_of(seq, start) == 2 * (start in left)
    assert feeding.end_of_depth(Sequence(0, [1, 2, 3, 4], 4, Holding(), Wire()), 0) == 4, "a prompt is fed with its last token"


# -- what is approximate is nobody else's ------------------------------------------------------------------------------------


def follow(side: Torch) -> tuple[list[Request], list[list[int]]]:
    """Plain prompts that go on from what a request has written that leaves, the longest first, and what must come of them."""
    engine = propagating(side, drafts=False)
    prompt = list(range(5, 30))
    ((answer,),) = played(engine, [(prompt, GREEDY.replace(max_tokens=40, exit_threshold=0.0))])
    drawn = GREEDY.replace(temperature=1.5, seed=3)
    jobs = [(prompt + answer[:count] + [3, 4], drawn) for count in (40, 30, 20, 10)]
    requests = [engine.add(*job) for job in jobs]
    finish(engine)
    return requests, [tokens for (tokens,) in expected(Propagated(side), jobs)]


def test_blocks_beyond_the_mark_never_match(native: Case) -> None:
    """Of 25 tokens of the prompt and all that left after it, the one block before the mark is shared."""
    requests, outputs = follow(native[0])
    assert [request.finished[0].output for request in requests] == outputs
    assert requests[0].metrics.cached_tokens == 16


def test_exact_blocks_do_not_match_an_approximate_request(native: Case) -> None:
    """While a request waits that was preempted, another's exact K and V of the same tokens come into the cache."""
    side, _, _ = native
    prompt = list(range(5, 30))
    params = GREEDY.replace(max_tokens=50, exit_threshold=0.0)
    ((right,),) = expected(Propagated(side), [(prompt, params)])
    engine = propagating(side, drafts=False)
    request = engine.add(prompt, params)
    (seq,) = request.seqs
    while len(seq.tokens) < 60:
        engine.step()
    engine.scheduler._preempt(request)
    engine.add([*seq.tokens, 3], GREEDY.replace(max_tokens=1, priority=-1))
    finish(engine)
    assert request.finished[0].output == right
    assert seq.kv.exact_until == len(prompt)


# -- negative controls: each of these must be seen -------------------------------------------------------------------------


def filling(how: Callable[[PropagatingExit, list[Feed], list[Any]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def patched(patch: pytest.MonkeyPatch) -> None:
        run = PropagatingExit._run

        def instead(self: PropagatingExit, feeds: list[Feed], lives: list[Any], span: Span, rows: Any) -> Any:
            return how(self, feeds, lives) if span.fill else run(self, feeds, lives, span, rows)

        patch.setattr(PropagatingExit, "_run", instead)

    return patched


def copied(self: PropagatingExit, feeds: list[Feed], lives: list[Any]) -> None:
    """K and V of the last layer below the exit, in place of those that the layers above would make."""
    program: Any = self.target
    layer = program.config.layers[0]
    k, v = (np.zeros((1, layer.kv_heads, layer.head_dim), np.float32) for _ in range(2))
    for feed, live in zip(feeds, lives, strict=True):
        for at in range(feed.start, feed.start + feed.count):
            place = np.array([live.table[at // 16] * 16 + at % 16], np.int32)
            program.kv.read(AFTER - 1, place, k, v)
            for above in range(AFTER, DEEP):
                program.kv.write(above, place, k, v)


def anew(patch: pytest.MonkeyPatch) -> None:
    """What is computed again goes through all layers."""
    patch.setattr(feeding, "depth_of", lambda seq, index: 0)


CONTROLS = {"holes": filling(lambda *_: None), "copied": filling(copied), "replay decided anew": anew}


@pytest.mark.parametrize("control", CONTROLS)
def test_other_k_and_v_would_be_seen(native: Case, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side, jobs, outputs = native
    CONTROLS[control](monkeypatch)
    jobs, outputs = jobs[:2], outputs[:2]
    assert [played(propagating(side), [job], preempt=2)[0] for job in jobs] != outputs


def test_recomputed_kv_changes_the_pool(native: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    side, _, _ = native
    _, first = pool_after(side, 44, 0)
    anew(monkeypatch)
    assert not np.array_equal(pool_after(side, 44, 5)[1], first)


def test_publishing_approximate_blocks_changes_the_output(native: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "exact", lambda self, seq, end: end)
    requests, outputs = follow(native[0])
    assert [request.finished[0].output for request in requests] != outputs


# -- opened with a folder --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its exits."""
    place = tmp_path_factory.mktemp("propagating")
    model = write_tiny_gguf(place / "tiny.gguf", layers=LAYERS)
    return model, write_exits(place / "exits", model, AFTER)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_model_opened_so(folders: tuple[Path, Path], backend: str) -> None:
    model, exits = folders
    settings: dict[str, Any] = {"backend": backend, "threads": 1, "device": "cpu"}
    settings |= {"dtype": "float64"} if backend == "torch" else {}
    made = []
    for state in ("deferred", "propagate"):
        with LLM(model, exits=exits, exit_state=state, **settings) as llm:
            asked = (LEAVES.replace(exit_threshold=one, max_tokens=40) for one in (1.01, 0.0))
            made.append([llm.generate("The mill", params)[0].outputs[0] for params in asked])
    (never, deferred), (same, propagated) = made
    assert never.token_ids == same.token_ids
    assert [one.layers for one in propagated.exits or ()] == [one.layers for one in deferred.exits or ()]
    assert propagated.token_ids == deferred.token_ids, "where all leave, what is above the exit is read by nobody"


def test_invalid_exit_states_are_refused(folders: tuple[Path, Path]) -> None:
    model, exits = folders
    with pytest.raises(ValueError, match="unknown exit_state 'copied'; use deferred or propagate"):
        LLM(model, exits=exits, exit_state="copied", threads=1, device="cpu")
    with pytest.raises(ValueError, match="exit_state needs exits; name their folder with exits"):
        LLM(model, exit_state="propagate", threads=1, device="cpu")


def test_rules_of_one_state(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A threshold is for the state it was tried with."""
    rule = thresholds.CalibratedThreshold("max_prob", 0.5, 0.0, 8, "text", 0.1, 0.05, 100, 0.01, 1.5, 0.25, "0" * 64)
    other = msgspec.structs.replace(rule, threshold=0.7, state="propagate")
    for one in (rule, other):
        thresholds.save(tmp_path, one)
    assert thresholds.load(tmp_path) == (other, rule)
    assert [thresholds.load(tmp_path, state) for state in ("deferred", "propagate")] == [(rule,), (other,)]
    assert "exit_state propagate" in other.summary()


def test_commands_show_early_exits(shell: Shell, folders: tuple[Path, Path]) -> None:
    """chat in colours, with a legend after each answer; generate at the end, of all."""
    model, exits = folders
    of = ("--exits", exits, "--exit-state", "propagate", "-t", "0", "-m", "8", "--threads", "1", "--show-exits")
    code, out, err = shell("chat", model, *of, "--exit-threshold", "0.0", stdin="one\n/set exit_threshold none\ntwo\n")
    assert code == 0, err
    assert out.count(f"after {AFTER} of {LAYERS} layers: 7 tokens") == 1
    assert "88% exited early" in out
    source, target = shell.folder / "in.jsonl", shell.folder / "out.jsonl"
    lines = ({"prompt": f"line {at}", "exit_threshold": 0.0} for at in range(2))
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    code, _, err = shell("generate", model, *of, "-i", source, "-o", target)
    assert code == 0, err
    assert f"after {AFTER} of {LAYERS} layers: 14 tokens" in err
    again = ("generate", model, *of[:2], *of[4:], "-i", source, "-o", target)
    assert shell(*again)[0] == 1, "another exit_state is another setting"
    for command in (("chat", model), ("generate", model, "-i", source, "-o", target)):
        code, _, err = shell(*command, "--show-exits")
        assert code == 2
        assert "--show-exits goes with --exits FOLDER" in " ".join(err.split())
