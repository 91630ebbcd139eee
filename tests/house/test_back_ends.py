"""A back end is a file with an offer, and what works beside a target is a role: toys of both, at work in real engines."""

import math
from pathlib import Path

import pytest

from headrace.backends.recipe import BLOCK_SIZE, SELF, Recipe, Role
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import DRAFT, TARGET
from headrace.data.settings import ModelSettings
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.llm import LLM
from headrace.runner.span import Span
from headrace.startup import backend
from headrace.startup.backend import Started, start
from headrace.startup.opening import open_model
from tests.house.toy_back_end import Counting, Toy
from tests.tiny import finish, tokens_of
from tests.tiny_files import write_tiny_gguf
from tests.unit.test_imports import SOURCES, wrong_imports

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [40, 40, 40])
PARAMS = (SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), SamplingParams(seed=3, max_tokens=12))
NAMES = ("native", "torch")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("back-ends") / "tiny.gguf")


# -- a back end: one file and a row ------------------------------------------------------------------------------------------


def test_a_back_end_is_one_file(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, chunks and batches change nothing on it that they do not change in torch."""
    monkeypatch.setattr(backend, "BACKENDS", (*backend.BACKENDS, Toy()))
    made = {}
    for name in ("toy", "torch"):
        llm = LLM(tiny, backend=name, dtype="float64", speculate="ngram", max_num_batched_tokens=7)
        outputs = llm.generate([*PROMPTS, *PROMPTS], [params for params in PARAMS for _ in PROMPTS])
        made[name] = [output.outputs[0].token_ids for output in outputs]
        assert (llm.backend, llm.exactness) == (name, "near-tie-exact")
    assert made["toy"] == made["torch"]
    assert Counting.steps > 12


def test_without_its_row_a_back_end_is_unknown(tiny: Path) -> None:
    with pytest.raises(ValueError, match="unknown backend 'toy'; use auto, native, torch"):
        LLM(tiny, backend="toy")


def test_a_back_end_obeys_the_import_rules_of_its_package() -> None:
    source = Path(__file__).with_name("toy_back_end.py").read_text()
    assert wrong_imports("headrace.backends.eager.toy", source, {*SOURCES}) == []
    assert wrong_imports("headrace.engine.toy", source, {*SOURCES}), "any room would do"


def test_torch_reads_a_file_once(tiny: Path, tmp_path: Path) -> None:
    """For all who run it; the control: another file."""
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    for path, shared in ((tiny, True), (other, False)):
        first, second = begin(tiny, "torch", Role(DRAFT, open_model(path)))[1].runner.programs
        assert (first.model is second.model) == shared  # type: ignore[attr-defined]
        assert first.pool is not second.pool  # type: ignore[attr-defined]


def test_torch_reads_no_weights_if_the_models_exceed_the_memory(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [open_model(tiny), open_model(write_tiny_gguf(tmp_path / "other.gguf", seed=1))]
    numbers = sum(math.prod(models[0].source.info(name).shape) for name in models[0].source.names())
    monkeypatch.setattr("headrace.backends.eager.loading.load_model", None)  # it would be called
    roles = [Role(name, each) for name, each in zip((TARGET.name, DRAFT), models, strict=True)]
    for memory, fits in (("1024GiB", "kv_cache_memory is 1024.00 GiB"), (None, "need .* for their weights")):
        with pytest.raises(ValueError, match=fits):
            start(Recipe(tuple(roles), ModelSettings(device="cpu", backend="torch", dtype="float64", kv_cache_memory=memory)))
        monkeypatch.setattr("headrace.host.free_memory", lambda: 12 * numbers)  # for one and a half
    with pytest.raises(TypeError):
        start(Recipe((roles[0],), ModelSettings(device="cpu", backend="torch", dtype="float64", max_model_len=16)))


# -- a role: one row ---------------------------------------------------------------------------------------------------------


def begin(tiny: Path, name: str, *more: Role) -> tuple[Recipe, Started]:
    settings = ModelSettings(
        device="cpu", backend=name, dtype="float64" if name == "torch" else "auto", threads=1, max_model_len=64
    )
    recipe = Recipe((Role(TARGET.name, open_model(tiny)), *more), settings)
    return recipe, start(recipe)


def outputs(recipe: Recipe, started: Started, drafter: DraftModel | None) -> tuple[list[list[list[int]]], int]:
    config = EngineConfig(SchedulerConfig(8, 64, 64), CacheConfig(started.plan.num_blocks, BLOCK_SIZE))
    speculation = None if drafter is None else Speculation([drafter], 64, 3)
    vocabulary = recipe.target.config.vocab_size
    engine = Engine(InProcess(started.runner), config, vocab_size=vocabulary, groups=recipe.groups(), speculation=speculation)
    requests = [engine.add(list(prompt), params) for prompt in PROMPTS for params in PARAMS]
    finish(engine)
    assert engine.blocks.used == 0
    return [tokens_of(request) for request in requests], sum(request.metrics.accepted for request in requests)


@pytest.mark.parametrize("name", NAMES)
def test_a_role_is_one_row(tiny: Path, tmp_path: Path, name: str) -> None:
    """A second draft beside the first: its number, its KV group and its bytes follow from the row, and it drafts."""
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=5)
    first, second = Role("draft", open_model(other)), Role("second", open_model(tiny))
    (alone, plain), (recipe, started) = begin(tiny, name), begin(tiny, name, first, second)
    assert (recipe.number("draft"), recipe.number("second"), recipe.number("third")) == (1, 2, 0)
    assert [(group.name, group.model) for group in recipe.groups()][:3] == [("target", 0), ("draft", 1), ("second", 2)]
    blocks, more = plain.plan.kv_bytes / plain.plan.num_blocks, started.plan.kv_bytes / started.plan.num_blocks
    assert more == 3 * blocks
    expected, _ = outputs(alone, plain, None)
    for number, group, right in ((1, 1, False), (2, 2, True)):
        found, accepted = outputs(recipe, started, DraftModel(model=number, group=group, least=0.0))
        assert found == expected
        assert (accepted > 3 * 3 * len(PROMPTS)) is right  # the second is the target itself


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_with_a_model_is_a_role(tiny: Path, name: str) -> None:
    """The target's first layer: it has no K and V of its own, so no group and no bytes."""
    (alone, plain), (recipe, started) = begin(tiny, name), begin(tiny, name, Role(SELF, span=Span(layers=1)))
    assert recipe.groups() == alone.groups()
    assert started.runner.kv_bytes() == plain.runner.kv_bytes()
    companion = recipe.drafter()
    assert companion is not None
    found, _ = outputs(recipe, started, DraftModel(SELF, model=companion.model, group=companion.group, least=0.0))
    assert found == outputs(alone, plain, None)[0]


@pytest.mark.parametrize("name", NAMES)
def test_without_its_row_a_role_has_no_program(tiny: Path, name: str) -> None:
    """Control: a plan that names a model nobody opened fails, and the drafter is given up; nobody's answer is."""
    recipe, started = begin(tiny, name)
    assert recipe.drafter() is None
    expected, _ = outputs(recipe, started, None)
    found, accepted = outputs(recipe, started, DraftModel(model=1, group=None, least=0.0))
    assert (found, accepted) == (expected, 0)


# -- a KV group: it follows from the row of a role --------------------------------------------------------------------------


class Later(DraftModel):
    """Drafts for none but those it is told to."""

    on = False

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        return super().draft(request, seq, most) if self.on else None


def again(recipe: Recipe, started: Started, drafter: Later) -> tuple[list[list[int]], list[list[int]], int]:
    """Tokens of long prompts without a draft, and with drafts when the target's part of them is cached; what was accepted."""
    config = EngineConfig(SchedulerConfig(8, 64, 64), CacheConfig(started.plan.num_blocks, BLOCK_SIZE))
    speculation = Speculation([drafter], 64, 3)
    vocabulary = recipe.target.config.vocab_size
    engine = Engine(InProcess(started.runner), config, vocab_size=vocabulary, groups=recipe.groups(), speculation=speculation)
    rounds = []
    for drafter.on in (False, True):
        rounds.append([engine.add((list(prompt) * 9)[:40], PARAMS[0]) for prompt in PROMPTS])
        finish(engine)
    first, second = rounds
    assert all(request.metrics.cached_tokens for request in second)
    return [tokens_of(r)[0] for r in first], [tokens_of(r)[0] for r in second], sum(r.metrics.accepted for r in second)


@pytest.mark.parametrize("name", NAMES)
def test_a_kv_group_follows_from_a_role(tiny: Path, name: str) -> None:
    """What only the target has computed is not taken for the draft's: its group is filled before it drafts from it."""
    recipe, started = begin(tiny, name, Role("second", open_model(tiny)))
    group = next(number for number, group in enumerate(recipe.groups()) if group.name == "second")
    first, second, accepted = again(recipe, started, Later(model=1, group=group, least=0.0))
    assert first == second
    assert accepted > 2 * 3 * len(PROMPTS)  # the draft is the target itself


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_without_its_group_reads_uncomputed_kv(tiny: Path, name: str) -> None:
    """Control: the same model as if the target's feeds filled its K and V. Answers stay, and its drafts are worth little."""
    recipe, started = begin(tiny, name, Role("second", open_model(tiny)))
    first, second, accepted = again(recipe, started, Later(model=1, group=None, least=0.0))
    assert first == second
    assert accepted <= 2 * 3 * len(PROMPTS)
