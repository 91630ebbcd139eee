"""Pipelines whose stages are groups of ranks: the same tokens and bytes as one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import core
from headrace.backends.native.program import NativeProgram
from headrace.data.plan import RankLostError, StepPlan
from headrace.llm import LLM
from headrace.parallel.ranks import lead
from headrace.parallel.ranks.follower import LoadShare
from headrace.startup.fit.headers import open_shape
from headrace.startup.fit.sizes import Layout, Load, bytes_of, stages
from tests.parallel.engines import PROMPTS, everything, no_process_is_left, opened
from tests.tiny_files import Sizes, write_tiny_gguf

__all__ = ["no_process_is_left"]

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

# 8 ranks have at least a head, 64 columns and 64 tokens each.
EIGHT = Sizes(heads=8, kv_heads=4, head_dim=64, ffn=512, unused=64)
UNEVEN = Sizes(heads=9, kv_heads=3, head_dim=64, ffn=320)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "eight.gguf", layers=8, sizes=EIGHT)


@pytest.fixture(scope="module")
def wanted(eight: Path) -> dict[str, Any]:
    with opened(eight) as llm:
        return everything(llm, PROMPTS[:1])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tied head and 9 heads on 3 K/V heads."""
    path = tmp_path_factory.mktemp("model") / "uneven.gguf"
    return write_tiny_gguf(path, layers=3, sizes=UNEVEN, edit=lambda tensors: tensors.pop("output.weight"))


@pytest.mark.parametrize(
    ("tp", "pp"), [(4, 2), (2, 4), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((8, 1), (1, 8)))]
)
def test_every_factorisation_of_eight_ranks(eight: Path, wanted: dict[str, Any], tp: int, pp: int) -> None:
    with opened(eight, tp=tp, pp=pp) as llm:
        assert everything(llm, PROMPTS[:1]) == wanted


@pytest.mark.parametrize(
    "settings", [{"kv_dtype": "int8", "rope": "yarn:4"}, {"speculate": "lookahead", "activations": "token", "quantize": "int8"}]
)
def test_uneven_heads_and_a_tied_head(uneven: Path, settings: dict[str, str]) -> None:
    with opened(uneven, **settings) as llm:
        wanted = everything(llm)
    with opened(uneven, tp=2, pp=2, stages="1,2", **settings) as llm:
        assert everything(llm) == wanted


# -- memory ----------------------------------------------------------------------------------------------------------------


def planned(model: Path, monkeypatch: pytest.MonkeyPatch, **layout: int) -> tuple[int, list[int]]:
    """Bytes of weights that the memory check counts; those of each stage's first rank, without vectors."""
    needs: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr("headrace.backends.memory.check_weights_fit", lambda need, *_, **__: needs.append(need))
        with opened(model, **layout) as llm:
            last: Any = llm.runner.programs[0]
            stages = [stage.weight_bytes for stage in getattr(llm.engine.executor, "loaded", [])]
            return needs[0], [*stages, last.weights.bytes]


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 3}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_the_memory_check_counts_each_process_as_fit_does(
    uneven: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], tied: bool
) -> None:
    model = uneven if tied else write_tiny_gguf(tmp_path / "untied.gguf", layers=3, sizes=UNEVEN)
    found, load = open_shape(str(model)), Load(256)
    tp, pp = layout.get("tp", 1), layout.get("pp", 1)
    by_rank = [[bytes_of(found, load, Layout(tp, pp), rank, stage).weights for rank in range(tp)] for stage in range(pp)]
    need, firsts = planned(model, monkeypatch, **layout)
    assert need == sum(map(sum, by_rank))
    # The arena holds the matrices of a stage's first rank; norms are vectors next to it.
    vectors = [len(layers) * 2 * 4 * 32 for layers in stages(found, Layout(tp, pp))]
    vectors[-1] += 4 * 32
    assert [ranks[0] - norms for ranks, norms in zip(by_rank, vectors, strict=True)] == firsts


def test_a_tied_table_is_counted_twice_in_a_pipeline(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, (held,) = planned(uneven, monkeypatch)
    twice, halves = planned(uneven, monkeypatch, pp=2)
    table = open_shape(str(uneven)).head.nbytes
    assert table > 0
    assert twice - whole == sum(halves) - held == table


# -- controls: a broken group gives other outputs, or is lost --------------------------------------------------------------


def followers_hold_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The followers of the last stage load the layers of the stage before."""
    start = lead.start

    def elsewhere(message: LoadShare, *more: Any) -> lead.Follower:
        assert message.layers is not None
        first, last = message.layers
        return start(msgspec.structs.replace(message, layers=(first - 1, last - 1)), *more)

    monkeypatch.setattr(lead, "start", elsewhere)


def moves_and_copies_of_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank of the last stage moves and copies K/V, and the others do not hear of it."""

    def rearrange(self: NativeProgram, plan: StepPlan) -> None:
        if plan.moves:
            self.kv.move([(source, to) for _, source, to in plan.moves])
        if plan.copies:
            self.kv.copy_blocks([(source, to) for _, source, to in plan.copies])

    monkeypatch.setattr(NativeProgram, "rearrange", rearrange)


def outputs_or_loss(llm: LLM) -> dict[str, Any] | str:
    try:
        return everything(llm, PROMPTS[:1])
    except RankLostError as error:
        return str(error)


@pytest.mark.parametrize("breaks", [followers_hold_other_layers, moves_and_copies_of_the_first_rank_alone])
def test_a_broken_group_is_noticed(uneven: Path, monkeypatch: pytest.MonkeyPatch, breaks: Callable[..., None]) -> None:
    with opened(uneven) as llm:
        wanted = everything(llm, PROMPTS[:1])
    breaks(monkeypatch)
    with opened(uneven, tp=2, pp=2, stages="1,2") as llm:
        assert outputs_or_loss(llm) != wanted
