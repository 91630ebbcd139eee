"""A closed `LLM`: closing twice does nothing, and every use afterwards is one clear error."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncLLM, SamplingParams
from headrace.engine.lockstep import ClosedError
from headrace.llm import LLM
from headrace.server.engines.async_llm import LoadError
from headrace.server.engines.inflight import EngineDownError

CLOSED = "this LLM is closed"
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
USES: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("The mill"),
    "generate nothing": lambda llm: llm.generate([]),
    "chat": lambda llm: llm.chat("Hello"),
    "stream": lambda llm: next(llm.stream("The mill")),
    "add": lambda llm: llm.add("The mill"),
    "step": lambda llm: llm.step(),
    "score": lambda llm: llm.score("The mill"),
    "embed": lambda llm: llm.embed("The mill"),
}


@pytest.fixture(params=["native", "torch"])
def llm(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[LLM]:
    with LLM(tiny_gguf, backend=request.param, max_num_seqs=4, threads=1) as llm:
        yield llm


def test_every_use_after_close_raises_closed_error(llm: LLM) -> None:
    for name, use in USES.items():
        use(llm)
        assert name
    llm.close()
    llm.close()
    for use in USES.values():
        with pytest.raises(ClosedError, match=CLOSED):
            use(llm)


def test_a_stream_that_is_open_ends_with_the_error(llm: LLM) -> None:
    stream = llm.stream("The mill", ENDLESS)
    next(stream)
    other = llm.stream("A river", ENDLESS)
    next(other)
    llm.close()
    with pytest.raises(ClosedError, match=CLOSED):
        for _ in stream:
            pass
    other.close()  # type: ignore[attr-defined]
    assert llm.callers.open == 0


def test_a_request_of_another_thread_ends_with_the_error(llm: LLM) -> None:
    runs, errors = threading.Event(), []

    def generate() -> None:
        try:
            for _ in llm.stream("The mill", SamplingParams(max_tokens=400, ignore_eos=True)):
                runs.set()
                closed.wait(60)
        except ClosedError as error:
            errors.append(error)

    closed = threading.Event()
    thread = threading.Thread(target=generate)
    thread.start()
    assert runs.wait(60)
    llm.close()
    closed.set()
    thread.join(60)
    assert len(errors) == 1
    assert llm.callers.open == 0


def test_async_without_a_start_and_after_close(tiny_gguf: Path) -> None:
    async def first(llm: AsyncLLM, prompt: str | list[int]) -> Any:
        return await anext(llm.generate(prompt))  # type: ignore[arg-type]

    async def main() -> None:
        llm = AsyncLLM(tiny_gguf, threads=1)
        for prompt in ("The mill", [5, 6]):
            with pytest.raises(EngineDownError, match="this LLM is not started; use `async with"):
                await first(llm, prompt)
        with pytest.raises(LoadError, match="not started"):
            await llm.ready()
        async with llm:
            await first(llm, "The mill")
        await llm.close()
        for prompt in ("The mill", [5, 6]):
            with pytest.raises(EngineDownError, match=CLOSED):
                await first(llm, prompt)
        async with llm:  # it can be started again
            await first(llm, "The mill")

    asyncio.run(main())
