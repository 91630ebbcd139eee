"""Real models on several processes: the tokens of one, with drafts, beams, grammars; the bytes of each rank."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.backends.native.weights import packed_bytes
from headrace.data.explicit import params_of
from headrace.models.registry import describe
from headrace.parallel.ranks.share import Share
from tests.models.real import PROMPTS
from tests.places import default_model, model_file

pytestmark = pytest.mark.weights

FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"beam_width": 2},
    {"temperature": 0.0, "structured_outputs": {"regex": "[a-zA-Z0-9 ,.]+"}},
)
MODELS = {
    "smollm2": default_model,
    "qwen-0.5b": lambda: model_file("Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"),
    "qwen-1.5b": lambda: model_file("Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"),
}


LAYOUTS = ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2})


def answers(model: Path, prompts: list[str], tokens: int, fields: tuple[dict[str, Any], ...] = FIELDS, **settings: Any) -> Any:
    """Tokens of every prompt with every method, all in one batch; the bytes of the first rank's weights; the closed model."""
    with LLM(model, threads=1, max_model_len=512, **settings) as llm:
        params = [params_of({"max_tokens": tokens, "ignore_eos": True, **each}) for each in fields]
        outputs = llm.generate([prompt for prompt in prompts for _ in params], params * len(prompts))
        assert [output.error for output in outputs] == [None] * len(outputs)
        target: Any = llm.runner.programs[0]
        return [[one.token_ids for one in output.outputs] for output in outputs], target.weights.bytes, llm


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_one_process(name: str) -> None:
    model = MODELS[name]()
    expected, whole, llm = answers(model, PROMPTS[:2], 6)
    found, held, _ = answers(model, PROMPTS[:2], 6, tp=2)
    assert found == expected
    source, described = llm.opened.source, describe(llm.model_config)
    norms = packed_bytes(described, source) - whole
    assert held == packed_bytes(described, source, "", Share(0, 2, llm.model_config)) - norms, "as planned, to the byte"
    if name == "qwen-1.5b":
        assert held / whole == pytest.approx(0.5, rel=0.02)
    assert answers(model, PROMPTS[:2], 6, tp=2, pp=2)[0] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_many_prompts(name: str) -> None:
    """20 prompts of 64 tokens, greedy and sampled, with drafts from the text."""
    run = partial(answers, MODELS[name](), PROMPTS, 64, FIELDS[:2], speculate="ngram")
    expected, *_ = run()
    assert len(expected) == 40
    for layout in LAYOUTS:
        assert run(**layout)[0] == expected, layout


@pytest.mark.slow
def test_a_draft_model_with_two_ranks() -> None:
    draft = {"draft": MODELS["qwen-0.5b"](), "draft_tokens": 3}
    run = partial(answers, MODELS["qwen-1.5b"](), PROMPTS[:4], 32, FIELDS[:2], **draft)
    assert run(tp=2)[0] == run()[0]


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_more_ranks_than_processors(world: int) -> None:
    run = partial(answers, default_model(), PROMPTS[:2], 8, FIELDS[:2])
    assert run(tp=world)[0] == run()[0]
