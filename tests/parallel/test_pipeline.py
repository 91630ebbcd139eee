"""Pipelines: the same tokens as one process, whatever the cut and the decoding method; lost stages; what is refused."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace import core
from headrace.data.config import LayerConfig, ModelConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import RankLostError
from headrace.llm import LLM
from headrace.parallel.pipeline import executor
from headrace.parallel.pipeline.cut import cut_layers
from headrace.parallel.pipeline.executor import PipelineExecutor, StageProcess
from headrace.parallel.pipeline.link import RowSlots
from tests.parallel.engines import PROMPTS, everything, no_process_is_left, opened
from tests.tiny_files import write_tiny_gguf

__all__ = ["no_process_is_left"]

needs_core = pytest.mark.skipif(not core.available(), reason=core.reason() or "native")

LAYERS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512, layers=LAYERS)


@needs_core
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_pipeline_gives_the_bits_of_one_process(model: Path, kv_dtype: str) -> None:
    with opened(model, kv_dtype=kv_dtype) as llm:
        wanted = everything(llm)
    for settings in ({"pp": 2}, {"pp": 3, "stages": "1,3,1"}, {"pp": LAYERS, "speculate": "lookahead"}):
        with opened(model, kv_dtype=kv_dtype, **settings) as llm:
            assert llm.engine.executor.depth == settings["pp"]
            assert everything(llm) == wanted, settings


@needs_core
def test_a_pipeline_has_the_kv_bytes_of_one_process(model: Path) -> None:
    with opened(model) as llm:
        whole = llm.engine.executor.kv_bytes()
    with opened(model, pp=2) as llm:
        assert llm.engine.executor.kv_bytes() == whole


# -- controls: a broken pipeline gives other outputs ------------------------------------------------------------------------


def a_stage_leaves_out_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    send = StageProcess.send

    def sending(self: StageProcess, message: Any) -> None:
        shorter = isinstance(message, executor.Start)
        send(self, msgspec.structs.replace(message, last=message.last - 1) if shorter else message)

    monkeypatch.setattr(StageProcess, "send", sending)


def rows_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    of = RowSlots.of
    monkeypatch.setattr(RowSlots, "of", lambda self, step, rows: of(self, step - 1, rows))


def plans_without_moves_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    strip = executor.without_wants
    monkeypatch.setattr(executor, "without_wants", lambda plan: msgspec.structs.replace(strip(plan), moves=[], copies=[]))


@needs_core
@pytest.mark.parametrize("breaks", [a_stage_leaves_out_a_layer, rows_of_the_step_before, plans_without_moves_and_copies])
def test_a_broken_pipeline_is_noticed(model: Path, monkeypatch: pytest.MonkeyPatch, breaks: Callable[..., None]) -> None:
    with opened(model) as llm:
        wanted = everything(llm)
    breaks(monkeypatch)
    with opened(model, pp=2) as llm:
        assert everything(llm) != wanted


def finish(llm: LLM) -> None:
    for _ in range(200):
        llm.step()


# -- failures ---------------------------------------------------------------------------------------------------------------


def pids(llm: LLM) -> list[int]:
    assert isinstance(llm.engine.executor, PipelineExecutor)
    return [stage._process.pid for stage in llm.engine.executor._stages]


@needs_core
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_a_stage_that_is_killed_ends_the_engine_with_its_name(model: Path, stage: int, after: int) -> None:
    with opened(model, pp=3) as llm:
        llm.add("The mill", SamplingParams(max_tokens=100, ignore_eos=True))
        for _ in range(after):
            llm.step()
        os.kill(pids(llm)[stage], signal.SIGKILL)
        with pytest.raises(RankLostError, match=rf"stage {stage} \(layers \d to \d\) ended \(signal SIGKILL\)"):
            finish(llm)
        with pytest.raises(RankLostError):
            llm.step()


@needs_core
def test_a_stage_that_hangs_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "STUCK_AFTER", 0.5)
    with opened(model, pp=2) as llm:
        llm.generate("The mill", max_tokens=2)
        (pid,) = pids(llm)
        os.kill(pid, signal.SIGSTOP)
        llm.add("The river", SamplingParams(max_tokens=100, ignore_eos=True))
        with pytest.raises(RankLostError, match=r"no rows for 0 s: a stage of the pipeline hangs|does not answer"):
            finish(llm)


@needs_core
def test_a_step_that_fails_in_a_stage_is_retried(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan names a slot that the stage does not have: the step fails there, and its requests run again."""
    with opened(model) as llm:
        wanted = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, max_tokens=8, temperature=0.0)]
    strip, plans = executor.without_wants, []

    def breaking(plan: Any) -> Any:
        plans.append(plan)
        sent = strip(plan)
        if len(plans) == 3:
            sent.feeds[0].slot = 77
        return sent

    monkeypatch.setattr(executor, "without_wants", breaking)
    with opened(model, pp=2) as llm:
        found = llm.generate(PROMPTS, max_tokens=8, temperature=0.0)
    assert [one.error for one in found] == [None] * len(PROMPTS)
    assert [one.outputs[0].token_ids for one in found] == wanted
    assert len(plans) > 3


@needs_core
def test_a_stage_that_cannot_load_reports_the_reason(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send = StageProcess.send

    def elsewhere(self: StageProcess, message: Any) -> None:
        send(self, msgspec.structs.replace(message, model="nowhere.gguf") if isinstance(message, executor.Start) else message)

    monkeypatch.setattr(StageProcess, "send", elsewhere)
    with pytest.raises(ValueError, match=r"stage 0 \(layers 0 to 1\) cannot be loaded: .*nowhere"):
        opened(model, pp=2)


@needs_core
def test_stages_outlive_the_thread_that_opened_the_model(model: Path) -> None:
    """Also for callers in several threads; numbers may be numpy's."""
    made: list[LLM] = []
    opener = threading.Thread(target=lambda: made.append(opened(model, pp=np.int64(2), threads=np.int64(1))))
    opener.start()
    opener.join()
    with made[0] as llm, opened(model) as one:
        wanted = [output.outputs[0].token_ids for output in one.generate(PROMPTS, max_tokens=8, temperature=0.0)]
        with ThreadPoolExecutor(3) as callers:
            found = callers.map(lambda prompt: llm.generate(prompt, max_tokens=8, temperature=0.0), PROMPTS)
            assert [output.outputs[0].token_ids for (output,) in found] == wanted


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pp": 6}, "pp=6: the model has 5 layers; use pp of 1 to 5"),
        ({"pp": 0}, "pp must be 1 or more, not 0"),
        ({"pp": "2"}, "pp must be an integer, not '2'"),
        ({"pp": 2, "stages": [2, 3]}, "stages [2, 3]: give numbers of layers such as 14,16"),
        ({"pp": 2, "stages": "3,3"}, "stages 3,3: give 2 numbers of layers with the sum 5"),
        ({"pp": 2, "stages": "5"}, "stages 5: give 2 numbers"),
        ({"pp": 2, "stages": "5,0"}, "stages 5,0: give 2 numbers"),
        ({"pp": 2, "stages": "a,b"}, "stages 'a,b': give numbers of layers such as 14,16"),
        ({"stages": "2,3"}, "stages 2,3: give 1 numbers of layers with the sum 5"),
        ({"pp": 2, "draft": "itself"}, "leave draft or pp out"),
        ({"pp": 2, "amateur": "itself"}, "leave amateur or pp out"),
        ({"pp": 2, "cascade": "itself"}, "leave cascade or pp out"),
        ({"pp": 2, "backend": "torch"}, "pp runs on the native core: leave backend, dtype and device out"),
    ],
)
def test_settings_without_a_pipeline_are_refused(model: Path, settings: dict[str, Any], why: str) -> None:
    given = {name: model if value == "itself" else value for name, value in settings.items()}
    with pytest.raises(ValueError, match="pp|stages") as refused:
        opened(model, **given)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


# -- cuts -------------------------------------------------------------------------------------------------------------------


def a_config(rng: np.random.Generator) -> ModelConfig:
    count = int(rng.integers(1, 9))
    layers = list[LayerConfig]()
    for _ in range(count):
        own = [number for number, layer in enumerate(layers) if layer.kv_from is None]
        source = int(rng.choice(own)) if own and rng.random() < 0.25 else None
        layers.append(LayerConfig(2, 1, 8, int(rng.integers(1, 40)) * 8, kv_from=source))
    return ModelConfig("llama", int(rng.integers(16, 400)), 16, tuple(layers), 64)


def sizes_of(config: ModelConfig, borders: tuple[int, ...]) -> list[int]:
    """Parameters of each stage."""
    table = config.vocab_size * config.hidden_size
    sizes = [config.hidden_size * (sum(c.qkv.values()) + c.q_size + 3 * c.ffn) for c in config.layers]
    found = [sum(sizes[first:last]) for first, last in pairwise(borders)]
    found[0] += table
    found[-1] += table
    return found


@pytest.mark.parametrize("seed", range(40))
def test_cuts_are_the_best_of_all_and_keep_shared_layers_together(seed: int) -> None:
    config = a_config(np.random.default_rng(seed))
    count = config.num_layers
    sources = [layer.kv_from for layer in config.layers]
    allowed = [at for at in range(1, count) if all(source is None or source >= at for source in sources[at:])]
    for stages in range(1, len(allowed) + 2):
        cuts = [(0, *inner, count) for inner in combinations(allowed, stages - 1)]
        best = min(max(sizes_of(config, cut)) for cut in cuts)
        found = cut_layers(config, stages)
        borders = (*(stage.layers.start for stage in found), found[-1].layers.stop)
        assert borders in cuts
        assert max(sizes_of(config, borders)) == best
    with pytest.raises(ValueError, match="use pp of"):
        cut_layers(config, len(allowed) + 2)


def test_a_cut_between_layers_that_share_k_and_v_is_refused() -> None:
    layers = tuple(LayerConfig(2, 1, 8, 16, kv_from=source) for source in (None, None, 0, None))
    config = ModelConfig("llama", 16, 16, layers, 64)
    for sizes in ([1, 3], [2, 2]):
        with pytest.raises(ValueError, match="layer 2 reads the K/V of layer 0; keep them together"):
            cut_layers(config, 2, sizes)
    assert [stage.layers for stage in cut_layers(config, 2, [3, 1])] == [range(3), range(3, 4)]


# -- real weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.weights
@needs_core
def test_smollm2_in_two_stages(default_model: Path) -> None:
    """Ten prompts, greedy and sampled, with drafts from the prompt: the tokens of one process."""
    prompts = [f"Question {number}: what is {number} times three? Answer in one sentence." for number in range(10)]
    params = [SamplingParams(max_tokens=24, temperature=0.8 * (number % 2), seed=number) for number in range(10)]
    found = []
    for pp in (1, 2):
        with opened(default_model, pp=pp, max_model_len=512, kv_cache_memory="256MiB", max_num_batched_tokens=64) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
    assert found[0] == found[1]
