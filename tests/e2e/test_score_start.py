"""Scores from a token on equal those of the whole text bit for bit; the tokens before come from the prefix cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams, core
from headrace.data.fields import ParamError
from headrace.engine.admission import AdmissionError

CONTEXT = [5 + at * 7 % 60 for at in range(70)]
TEXTS = [[*CONTEXT, *end] for end in ([3, 4], [9, 8, 7], [6])]
BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not core.available(), reason=core.reason()))]


@pytest.fixture(params=BACKENDS)
def llm(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[LLM]:
    with LLM(str(tiny_gguf), backend=request.param, threads=1) as made:
        yield made


def test_they_are_the_scores_of_the_whole_text(llm: LLM) -> None:
    whole = [score.logprobs for score in llm.score(TEXTS)]
    assert [len(found) for found in whole] == [len(text) - 1 for text in TEXTS]
    for start in (0, 1, 33, len(CONTEXT), [len(text) - 1 for text in TEXTS]):
        starts = [start] * 3 if isinstance(start, int) else start
        found = [score.logprobs for score in llm.score(TEXTS, start=start)]
        assert found == [one[max(at, 1) - 1 :] for one, at in zip(whole, starts, strict=True)]
    assert [score.logprobs for score in llm.score(TEXTS, start=len(CONTEXT) + 0)] != [one[len(CONTEXT) :] for one in whole]


def test_tokens_before_the_start_come_from_the_cache(llm: LLM) -> None:
    """As whole blocks; the token before the first scored one is fed. Control: without a start all of the prompt is."""
    size = llm.engine.config.cache.block_size

    def cached(start: int) -> int:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        (output,) = llm.generate([TEXTS[0]], params)
        assert output.prompt_logprobs is not None
        assert [entry is None for entry in output.prompt_logprobs] == [at < max(start, 1) for at in range(len(TEXTS[0]))]
        return output.metrics.cached_tokens

    assert cached(0) == 0
    assert cached(len(CONTEXT)) == (len(CONTEXT) - 1) // size * size > 0
    assert cached(2 * size) == size
    assert cached(2 * size + 1) == 2 * size
    assert cached(0) == 0


def test_an_invalid_start_is_a_one_line_error(llm: LLM) -> None:
    with pytest.raises(AdmissionError, match="^the prompt has 72 tokens, so none from token 72 on; lower"):
        llm.score(TEXTS[0], start=72)
    with pytest.raises(ParamError, match=r"^start has 2 numbers for 3 texts; give one, or one for each$"):
        llm.score(TEXTS, start=[1, 2])
    with pytest.raises(ParamError, match="prompt_logprobs_start"):
        llm.score(TEXTS, start=-1)
