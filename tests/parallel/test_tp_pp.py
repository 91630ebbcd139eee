"""Pipelines whose stages are groups of ranks: the same tokens as one process, lost processes, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from headrace import core
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
    "settings", [{"kv_dtype": "int8"}, {"speculate": "lookahead", "activations": "token", "quantize": "int8"}]
)
def test_uneven_heads_and_a_tied_head(uneven: Path, settings: dict[str, str]) -> None:
    with opened(uneven, **settings) as llm:
        wanted = everything(llm)
    with opened(uneven, tp=2, pp=2, stages="1,2", **settings) as llm:
        assert everything(llm) == wanted
