"""Drafts by real models change no token, greedy and sampled: bitwise on the native core."""

import pytest

from headrace.data.params import SamplingParams
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.speculation import Speculation
from headrace.llm import LLM
from headrace.runner.runner import Runner
from headrace.runner.span import ATTENTION, MLP, Span
from tests.places import default_model, model_file

pytestmark = pytest.mark.weights

PROMPTS = ["def fibonacci(n):\n", "The old mill by the river"]
SETTINGS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True),
]


def check(llm: LLM, least: float) -> None:
    """With and without speculation the same tokens; at least this share of what was drafted is accepted."""
    prompts = [prompt for prompt in PROMPTS for _ in SETTINGS]
    speculation, llm.engine.speculation = llm.engine.speculation, None
    plain = llm.generate(prompts, SETTINGS * len(PROMPTS))
    llm.engine.speculation = speculation
    drafted = llm.generate(prompts, SETTINGS * len(PROMPTS))
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    metrics = [out.metrics for out in drafted]
    assert sum(each.drafted for each in metrics) > 20
    assert sum(each.accepted for each in metrics) >= least * sum(each.drafted for each in metrics)


def test_the_qwen_pair() -> None:
    """The draft chooses from the frequent part of its vocabulary."""
    target, draft = (model_file(f"Qwen2.5-Coder-{size}-Instruct.Q4_K_M.gguf") for size in ("1.5B", "0.5B"))
    llm = LLM(target, draft=draft, backend="native", max_model_len=256, speculate="draft", draft_tokens=4)
    check(llm, 0.4)
    llm.close()


@pytest.mark.parametrize("part", [Span(layers=20), Span(skips=(0,) * 14 + (ATTENTION, MLP) * 4)], ids=["layers", "skips"])
def test_smollm2_drafts_for_itself(part: Span) -> None:
    llm = LLM(default_model(), backend="native", max_model_len=256, speculate="off")
    llm.engine.executor.runner = Runner(llm.runner.programs[0], [part])  # type: ignore[attr-defined]
    llm.engine.speculation = Speculation([DraftModel("self", group=None, least=0.0)], 256, 3)
    check(llm, 0.0)
    llm.close()
