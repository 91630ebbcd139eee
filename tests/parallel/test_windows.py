"""Window layers with a pool of their own, together with ranks, stages, early exits, cascades, drafts and preemption.

Exactness class: bitwise; the tokens are those of an engine in one process whose window layers keep all K and V.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, core
from headrace.backends.recipe import Recipe
from headrace.bench.synthetic import write_synthetic
from headrace.data.explicit import params_of
from headrace.kv.blocks import BlockManager
from headrace.parallel.pipeline import executor
from headrace.parallel.processes import start_module
from headrace.parallel.ranks import lead
from tests.e2e.test_windows import poison
from tests.early_exits import write_exits
from tests.parallel.engines import no_process_is_left
from tests.parallel.poisoned_process import MODULE, NAN_IN, fill_sources, poison_plans

__all__ = ["no_process_is_left"]

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

# A window of one and a half blocks; layer 6 of 7 sees all tokens.
GEMMA = {
    "model_type": "gemma3_text", "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 256,
    "intermediate_size": 512, "max_position_embeddings": 512, "num_attention_heads": 8, "num_hidden_layers": 7,
    "num_key_value_heads": 2, "query_pre_attn_scalar": 64, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
    "rope_theta": 1000000, "sliding_window": 24, "vocab_size": 320, "tie_word_embeddings": False,
}  # fmt: skip
LAST = 3  # first layer of the second of two stages
GIVEN: dict[str, Any] = {"threads": 1, "device": "cpu", "kv_cache_memory": "8MiB", "max_model_len": 256}
PROMPTS = [[(7 * i + j * (i + 3)) % 250 for j in range(count)] for i, count in enumerate((150, 60, 9, 150))]
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 2, "max_tokens": 40, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"seed": 3, "logprobs": 2, "n": 2, "max_tokens": 24, "ignore_eos": True}
EXIT, CASCADE = {"exit_threshold": 0.006}, {"cascade_threshold": 0.006}


@dataclass(frozen=True)
class Files:
    model: Path
    small: Path
    exits: Path
    known: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("windows")

    def write(name: str, **changes: Any) -> Path:
        (folder / f"{name}.json").write_text(json.dumps({**GEMMA, **changes}))
        return write_synthetic(str(folder / f"{name}.json"), folder / f"{name}.gguf", "BF16", seed=len(name)).path

    model = write("model")
    small = write("small", num_hidden_layers=2, sliding_window_pattern=2)
    return Files(model, small, write_exits(folder / "exits", model, 2))


def opened(files: Files, settings: dict[str, Any]) -> LLM:
    named = {"draft": files.small, "cascade": files.small, "exits": files.exits}
    return LLM(files.model, **{**GIVEN, **{key: named[key] if value is True else value for key, value in settings.items()}})


def tokens(llm: LLM, fields: dict[str, Any]) -> list[Any]:
    """Tokens, and their log-probabilities if `fields` asks for them."""
    outputs = llm.generate(PROMPTS, params_of(fields))
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


@pytest.fixture
def kept(files: Files) -> Callable[[dict[str, Any], dict[str, Any]], list[Any]]:
    """Tokens of one process whose window layers keep all K and V. Settings of drafts and of the cache change no token."""

    def run(settings: dict[str, Any], fields: dict[str, Any]) -> list[Any]:
        needed = {key: value for key, value in settings.items() if key in ("exits", "cascade", "exit_state")}
        key = repr((needed, fields))
        if key not in files.known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Recipe, "window", property(lambda self: 0))
                with opened(files, needed) as llm:
                    assert llm.engine.blocks.windows is None
                    files.known[key] = tokens(llm, fields)
        return files.known[key]  # type: ignore[no-any-return]

    return run


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "max_num_batched_tokens": 48},
    {"tp": 2, "max_num_batched_tokens": 48, "kv_dtype": "bfloat16"},
    {"draft": True},
    {"tp": 2, "draft": True, "draft_tokens": 3},
    {"pp": 2, "speculate": "ngram"},
]


@pytest.mark.parametrize("fields", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_ranks_stages_and_drafts(files: Files, kept: Any, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    """The same tokens, computed and again from the prefix cache."""
    with opened(files, settings) as llm:
        assert llm.engine.blocks.windows is not None
        assert tokens(llm, fields) == kept(settings, fields)
        assert tokens(llm, fields) == kept(settings, fields)
        assert llm.engine.blocks.used == 0


@pytest.mark.parametrize("fields", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(
    ("settings", "method"),
    [({"exits": True}, EXIT), ({"exits": True, "exit_state": "propagate"}, EXIT), ({"cascade": True}, CASCADE)],
    ids=["exits", "exits-propagated", "cascade"],
)
def test_exits_and_cascades(
    files: Files, kept: Any, settings: dict[str, Any], method: dict[str, Any], layout: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Rows that lag behind keep their window. Some tokens do leave early, so the tokens are others than without."""
    asked = {**fields, **method}
    with opened(files, {**settings, **layout}) as llm:
        assert llm.engine.blocks.windows is not None
        assert tokens(llm, asked) == kept(settings, asked)
        assert tokens(llm, fields) == kept({}, fields)
    assert kept(settings, asked) != kept({}, fields)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_preemption(files: Files, kept: Any, layout: dict[str, Any]) -> None:
    with opened(files, {**layout, "kv_cache_memory": 1_100_000, "max_num_seqs": 4}) as llm:
        assert tokens(llm, GREEDY) == kept({}, GREEDY)
        assert llm.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("settings", [{"exits": True}, {"cascade": True}, {"draft": True}], ids=str)
def test_blocks_given_up_early_are_seen(
    files: Files, kept: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are given up are filled with NaN, and nothing changes. Control: all full blocks are given up."""
    wanted, given = kept({}, GREEDY), {**settings, "enable_prefix_caching": False}
    with opened(files, given) as llm:
        poison(llm.engine)
        assert tokens(llm, GREEDY) == wanted
    give_up_all(monkeypatch)
    with opened(files, given) as llm, suppress(AssertionError):
        poison(llm.engine)
        assert tokens(llm, GREEDY) == wanted
        pytest.fail("blocks that rows still read were given up, and no token changed")


def give_up_all(patch: pytest.MonkeyPatch) -> None:
    """All full blocks are given up, also those that rows still read."""
    patch.setattr(BlockManager, "first_seen", lambda self, computed: computed // self.block_size)
    patch.setattr(BlockManager, "check", lambda self, seqs, held=(): None)


def poisoned(files: Files, layout: dict[str, Any], patch: pytest.MonkeyPatch) -> LLM:
    """An engine whose processes have sources of large numbers and of NaN. The engine's process is the first rank of the last
    stage."""

    def start(module: str, *arguments: Any, **more: Any) -> Any:
        return start_module(MODULE if module in (executor.MODULE, lead.MODULE) else module, *arguments, **more)

    for place in (executor, lead):
        patch.setattr(place, "start_module", start)
    llm = opened(files, {**layout, "enable_prefix_caching": False})
    program = llm.engine.executor.runner.target  # type: ignore[attr-defined]
    fill_sources(program, 0, LAST if "pp" in layout else 0)
    return llm


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_freed_blocks_of_ranks_and_stages_are_never_read(
    files: Files, kept: Any, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed blocks of all processes hold NaN. Tokens and the bits of their log-probabilities are those of K and V that are
    kept."""
    with poisoned(files, layout, monkeypatch) as llm:
        copied = poison_plans(llm.engine)
        assert tokens(llm, GREEDY) == kept({}, GREEDY)
    assert sum(copied) > 20


@pytest.mark.parametrize(
    ("layout", "process"),
    [
        *(({"tp": 2}, process) for process in ("0 0", "1 0")),
        *(({"pp": 2}, process) for process in ("0 0", f"0 {LAST}")),
        *(({"tp": 2, "pp": 2}, process) for process in ("0 0", "1 0", f"0 {LAST}", f"1 {LAST}")),
    ],
    ids=str,
)
def test_nan_in_a_block_of_one_process_is_seen(
    files: Files, layout: dict[str, Any], process: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: blocks that the next rows read hold NaN in one process alone; no token can be drawn."""
    monkeypatch.setenv(NAN_IN, process)
    with poisoned(files, layout, monkeypatch) as llm:
        poison_plans(llm.engine, seen=True)
        outputs = llm.generate(PROMPTS, params_of(GREEDY))
    assert {str(output.error) for output in outputs} == {"the model's logits are broken: the largest is nan"}
