"""`rope`: a longer context than the model's files give it."""

from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.data.config import RopeConfig
from tests.cli_shell import Shell

PROMPT = list(range(3, 300)) + list(range(3, 300))
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_prompt_longer_than_the_models_own_context(tiny_gguf: Path, backend: str) -> None:
    settings = {"backend": backend, "kv_dtype": "float32", "threads": 1}
    with LLM(tiny_gguf, **settings) as plain:
        assert plain.memory_plan.max_model_len == 512
        with pytest.raises(ValueError, match="512"):
            plain.generate([PROMPT], PARAMS)
    with LLM(tiny_gguf, rope="linear:2", draft=tiny_gguf, **settings) as llm:
        assert llm.memory_plan.max_model_len == 1024
        assert {layer.rope for layer in llm.model_config.layers} == {RopeConfig(scaling="linear", factor=2.0)}
        (output,) = llm.generate([PROMPT], PARAMS)
        assert len(output.outputs[0].token_ids) == 8


def test_the_command_line_says_that_the_scaling_is_not_the_models_own(shell: Shell, tiny_gguf: Path) -> None:
    code, _, err = shell("run", tiny_gguf, "--raw", "hello", "-m", 4, "--rope", "yarn:2")
    assert code == 0
    assert "rope yarn:2 for 1024 tokens (not given by the model's makers)" in err
    code, _, err = shell("run", tiny_gguf, "--raw", "hello", "--rope", "yarn")
    assert code == 1
    assert "rope 'yarn': give a kind (linear or yarn) and a factor above 1" in err
