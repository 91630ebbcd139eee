"""`AsyncLLM` by itself: the engine for asyncio programs."""

import asyncio
from pathlib import Path

import pytest

from headrace import AsyncLLM, SamplingParams
from headrace.llm import LLM
from headrace.server.engines.async_llm import LoadError, RequestRefusedError
from headrace.server.engines.inflight import EngineDownError
from tests.server.harness import ENGINE

GREEDY = SamplingParams(temperature=0, max_tokens=12)


async def text_of(llm: AsyncLLM, prompt: str | list[int], params: SamplingParams = GREEDY) -> str:
    return "".join([delta.text async for delta in llm.generate(prompt, params)])


def test_concurrent_requests_have_the_texts_of_generate(tiny: Path, offline: LLM) -> None:
    prompts = ["The mill", "A river", "Water " * 30, "x"]
    expected = [output.outputs[0].text for output in offline.generate(prompts, GREEDY)]

    async def main() -> None:
        async with AsyncLLM(tiny, **ENGINE) as llm:
            assert await asyncio.gather(*(text_of(llm, prompt) for prompt in prompts)) == expected
            assert await text_of(llm, offline.tokenizer.encode("The mill")) == expected[0]
            await leave_and_cancel(llm)
            with pytest.raises(RequestRefusedError, match="maximum context length is 256"):
                await text_of(llm, "word " * 500)
            with pytest.raises(RequestRefusedError, match="not in the vocabulary"):
                await text_of(llm, [10**6])
            assert await text_of(llm, prompts[0]) == expected[0]
            await asyncio.to_thread(lambda: None)
        with pytest.raises(EngineDownError, match="this LLM is closed"):
            await text_of(llm, [1])

    asyncio.run(main())


async def leave_and_cancel(llm: AsyncLLM) -> None:
    """Leaving the loop, and cancelling the task, both abort the request."""
    endless = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
    stream = llm.generate("The mill", endless)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert not llm.inflight
    task = asyncio.create_task(text_of(llm, "A river", endless))
    while not llm.inflight:
        await asyncio.sleep(0)  # no longer: it might be answered meanwhile
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not llm.inflight
    while llm.requests.stats.running or llm.requests.stats.waiting:
        await asyncio.sleep(0.01)
    assert llm.requests.stats.blocks_used == 0


def test_a_missing_model_file_is_a_load_error(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(LoadError, match="there is no file or folder"):
            async with AsyncLLM(tmp_path / "none.gguf"):
                pass

    asyncio.run(main())
