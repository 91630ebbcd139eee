"""Contrastive decoding and contrastive search on the native core equal their references in its own arithmetic."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import core
from headrace.data.params import SamplingParams
from headrace.engine.engine import AdmissionError
from headrace.llm import LLM
from headrace.models.base import Model
from tests.contrast_reference import contrastive_decoding, contrastive_search
from tests.e2e.test_constrained import CASES
from tests.e2e.test_contrastive import DECODING, LIMITS, SEARCH, outputs, prompts
from tests.native_reference import bfloat16_attention, reference_of
from tests.tiny_files import write_tiny_gguf

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

from tests.contrast_engines import native_engine_of
from tests.tiny import tiny_config, tiny_model
from tests.tiny_native import as_bfloat16, native_model, packed


@pytest.fixture(scope="module")
def expert() -> Model:
    return native_model("llama")


@pytest.fixture(scope="module")
def amateur() -> Model:
    return as_bfloat16(tiny_model(tiny_config(num_layers=1), seed=5))


@pytest.fixture
def references(expert: Model, amateur: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Model, Model]]:
    """What the core computes, said in torch."""
    with bfloat16_attention(monkeypatch):
        yield reference_of(expert, packed(expert)), reference_of(amateur, packed(amateur))


@pytest.mark.parametrize("budget", [64, 9])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_contrastive_decoding(
    expert: Model, amateur: Model, references: tuple[Model, Model], temperature: float, budget: int
) -> None:
    jobs = [(prompt, DECODING.replace(temperature=temperature, seed=3)) for prompt in prompts(1, 2, 9, 30)]
    expected = [contrastive_decoding(*references, *job) for job in jobs]
    assert outputs(native_engine_of(expert, amateur, budget=budget), jobs) == expected
    plain = [(prompt, params.replace(contrastive_beta=None)) for prompt, params in jobs]
    assert outputs(native_engine_of(expert, amateur, budget=budget), plain) != expected


@pytest.mark.parametrize("kind", LIMITS)
def test_plausible_tokens_are_chosen_among_permitted_tokens(
    expert: Model, amateur: Model, references: tuple[Model, Model], kind: str
) -> None:
    jobs = [(prompt, DECODING.replace(contrastive_alpha=0.5, **LIMITS[kind])) for prompt in prompts(9, 3, 14)]
    expected = [contrastive_decoding(*references, *job) for job in jobs]
    assert outputs(native_engine_of(expert, amateur), jobs) == expected


@pytest.mark.parametrize("budget", [64, 9])
def test_contrastive_search(expert: Model, amateur: Model, references: tuple[Model, Model], budget: int) -> None:
    jobs = [(prompt, SEARCH.replace(top_k=k)) for k, prompt in enumerate(prompts(5, 2, 8, 37), 3)]
    expected = [contrastive_search(references[0], *job) for job in jobs]
    engine = native_engine_of(expert, amateur, budget=budget)
    assert outputs(engine, jobs) == expected
    assert outputs(engine, jobs) == expected  # from the prefix cache
    assert expected != [contrastive_search(references[0], *job, first=len(job[0]) - 1) for job in jobs]  # the control


# -- held to a grammar, on both back ends --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("contrast")
    return write_tiny_gguf(folder / "expert.gguf"), write_tiny_gguf(folder / "amateur.gguf", seed=9)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_grammar_leaves_something_plausible(files: tuple[Path, Path], backend: str) -> None:
    more: dict[str, Any] = {"dtype": "float32"} if backend == "torch" else {}
    llm = LLM(files[0], amateur=files[1], backend=backend, threads=1, device="cpu", seed=1, **more)
    for kind in ("regex", "choice", "gbnf"):
        constraint, fits = CASES[kind]
        params = SamplingParams(
            structured_outputs=constraint, contrastive_beta=0.5, contrastive_alpha=0.9, temperature=0.8, max_tokens=60, n=3
        )
        (output,) = llm.generate("The mill", params)
        assert output.error is None
        assert all(fits(one.text) for one in output.outputs), [one.text for one in output.outputs]
    llm.close()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_memory_of_hidden_states_is_taken_when_it_is_needed_and_must_fit(
    files: tuple[Path, Path], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(files[0], backend=backend, threads=1, device="cpu")
    params = SamplingParams(penalty_alpha=0.6, top_k=4, max_tokens=4)
    before = llm.engine.executor.kv_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("headrace.host.free_memory", lambda: 1000)
        with pytest.raises(AdmissionError, match=r"leave penalty_alpha out, or open the model with kv_cache_memory=\d+"):
            llm.generate("The mill", params)
        (plain,) = llm.generate("The mill", SamplingParams(max_tokens=4))
        assert plain.error is None
        assert llm.engine.executor.kv_bytes() == before
    (output,) = llm.generate("The mill", params)
    assert len(output.outputs[0].token_ids) == 4
    width = 4 if backend == "native" else getattr(torch, llm.dtype).itemsize
    tokens = llm.memory_plan.num_blocks * 16
    assert llm.engine.executor.kv_bytes() - before == tokens * llm.model_config.hidden_size * width
    llm.close()
