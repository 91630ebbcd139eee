"""Several replicas behind one queue: routing, lost replicas, restarts one by one. Engines in the test's event loop, no time."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import host
from headrace.data.params import SamplingParams
from headrace.server.engines import replay
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.inflight import EngineLostError, InflightRequest, QuarantinedError
from headrace.server.engines.messages import Deltas, Submit
from headrace.server.engines.metrics import ModelMetrics, ServerMetrics
from headrace.server.engines.replica import LoadError
from headrace.server.engines.replicas import Replicas
from headrace.server.engines.supervision import State
from tests.server.local_engine import LocalEngine, answers, local, started, submit
from tests.server.test_supervision import come
from tests.tiny_files import write_tiny_gguf

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, seed=3)
LONG = "The mill stands by the river, and the wheel turns. " * 12  # several entries of the router


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("replicas") / "tiny.gguf", context=2048)


def never(engine: LocalEngine, message: Deltas) -> bool:
    return False


def number(llm: AsyncLLM, request: InflightRequest) -> int:
    """The replica of a request."""
    assert request.engine is not None
    return request.engine.number


async def text(request: InflightRequest) -> dict[int, list[int]]:
    outputs = await answers(request)
    return {index: [token for delta in deltas for token in delta.token_ids] for index, deltas in outputs.items()}


def with_replicas(
    tiny: Path, work: Callable[[AsyncLLM, type[LocalEngine]], Awaitable[Any]], loses: Any = never, **more: Any
) -> Any:
    async def main() -> Any:
        link = local(loses)
        llm = await started(tiny, link, **{"replicas": 2, **more})
        await come(lambda: len(link.made) == len(llm.replicas.engines))
        await come(lambda: all(engine.up for engine in llm.replicas.engines))
        try:
            result = await work(llm, link)
            assert not llm.inflight
            assert llm.queue.requests == 0
            assert await llm.check() == ""
            return result
        finally:
            await llm.close()

    return asyncio.run(main())


def right(tiny: Path, params: list[SamplingParams], prompts: list[str]) -> list[dict[int, list[int]]]:
    """The answers of one engine."""

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> list[dict[int, list[int]]]:
        return [await text(submit(llm, prompt, each)) for prompt, each in zip(prompts, params, strict=True)]

    found: list[dict[int, list[int]]] = with_replicas(tiny, work, replicas=1)
    return found


MIXED = [PARAMS.replace(seed=seed) for seed in range(4)] + [PARAMS.replace(temperature=0), PARAMS.replace(n=2)]
PROMPTS = [f"{LONG} {place}" for place in range(len(MIXED))]


@pytest.mark.parametrize("step", [1, 5, 12])
def test_the_requests_of_a_lost_replica_go_on_in_the_other_at_once(tiny: Path, step: int) -> None:
    expected = right(tiny, MIXED, PROMPTS)

    def loses(engine: LocalEngine, message: Deltas) -> bool:
        return engine.number == 0 and engine.steps == step

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        llm.replica.supervision.pauses = (3600.0,)  # it does not come back
        requests = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        assert {number(llm, request) for request in requests} == {0, 1}
        first = [request for request in requests if number(llm, request) == 0]
        assert await asyncio.gather(*map(text, requests)) == expected
        assert (llm.state, llm.replica.state) == (State.READY, State.DEAD)
        assert {number(llm, request) for request in requests} == {1}
        assert [request.replays for request in first] == [1] * len(first)
        assert len(link.made) == 2
        again = submit(llm, PROMPTS[0], MIXED[0])  # all new ones go to the ready replica
        assert await text(again) == expected[0]

    with_replicas(tiny, work, loses, route="round")


def test_the_control_a_seed_drawn_in_the_engine_gives_other_answers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [PARAMS.replace(seed=None)] * 2
    monkeypatch.setattr(replay.secrets, "randbits", lambda bits: 4711)
    expected = right(tiny, params, PROMPTS[:2])

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> list[dict[int, list[int]]]:
        return list(await asyncio.gather(*(text(submit(llm, prompt, params[0])) for prompt in PROMPTS[:2])))

    def loses(engine: LocalEngine, message: Deltas) -> bool:
        return engine.number == 0 and engine.steps == 5

    assert with_replicas(tiny, work, loses, route="round") == expected
    seeds = iter(range(100))
    monkeypatch.setattr("headrace.engine.engine.secrets.randbits", lambda bits: next(seeds))
    monkeypatch.setattr(replay, "request_seed", lambda params: None)
    assert with_replicas(tiny, work, loses, route="round") != expected


def test_without_another_replica_of_equal_bits_a_begun_request_waits_for_its_own(tiny: Path) -> None:
    (expected,) = right(tiny, [PARAMS], [LONG])

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        request = submit(llm, LONG, PARAMS)
        mine = number(llm, request)
        llm.replicas.engines[1 - mine].bits = "another model"
        assert await text(request) == expected
        assert number(llm, request) == mine
        assert len(link.made) == 3

    with_replicas(tiny, work, lambda engine, message: engine.number < 2 and engine.steps == 5)


def test_requests_that_wait_for_a_lost_replica_go_to_another_that_becomes_ready(tiny: Path) -> None:
    (expected,) = right(tiny, [PARAMS], [LONG])

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        request = submit(llm, LONG, PARAMS)
        first, other = llm.replicas.engines[number(llm, request)], llm.replicas.engines[1 - number(llm, request)]
        first.replica.supervision.pauses = (3600.0,)
        other.up = False  # as while its process starts
        await come(lambda: first.replica.state is State.DEAD)
        assert request.engine is first
        other.up = True
        llm.replicas.began(other)
        assert request.engine is other
        assert await text(request) == expected

    with_replicas(tiny, work, lambda engine, message: engine.number < 2 and engine.steps == 3)


def test_a_poisonous_request_ends_two_replicas_and_fails_alone(tiny: Path) -> None:
    expected = right(tiny, MIXED, PROMPTS)
    poison = PARAMS.replace(seed=99)

    def loses(engine: LocalEngine, message: Deltas) -> bool:
        given = {one.request_id: len(one.given) for one in engine.submitted if one.params.seed == 99}
        return any(engine.tokens[one.request_id] + given.get(one.request_id, -99) == 4 for one in message.deltas)

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        bad = submit(llm, LONG, poison)
        requests = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        with pytest.raises(EngineLostError):
            await text(bad)
        llm.abort([bad])
        with pytest.raises(QuarantinedError):
            submit(llm, LONG, poison)
        assert await asyncio.gather(*map(text, requests)) == expected

    with_replicas(tiny, work, loses, route="round")


def test_restarts_one_by_one_drop_no_request(tiny: Path) -> None:
    expected = right(tiny, MIXED, PROMPTS)

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        requests = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        states: list[tuple[State, ...]] = []
        for engine in llm.replicas.engines:
            report = engine.replica._report
            engine.replica._report = lambda report=report: (  # type: ignore[misc]
                states.append(tuple(one.replica.state for one in llm.replicas.engines)),
                report(),
            )
        llm.renew(0.0)
        llm.renew(0.0)  # one at a time
        assert await asyncio.gather(*map(text, requests)) == expected
        await come(lambda: len(link.made) == 4 and all(engine.up for engine in llm.replicas.engines))
        assert all(State.READY in both for both in states)
        assert llm.restarts == 2
        assert all(request.crashes == 0 for request in requests)
        assert llm.quarantine.banned == 0
        assert not any(engine.resting for engine in llm.replicas.engines)

    with_replicas(tiny, work, route="round")


def test_a_restart_lets_requests_end_and_sends_new_ones_elsewhere(tiny: Path) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        requests = [submit(llm, prompt, PARAMS) for prompt in PROMPTS[:2]]
        llm.renew(3600.0)
        await asyncio.sleep(0)
        resting = next(engine for engine in llm.replicas.engines if engine.resting)
        late = submit(llm, PROMPTS[3], PARAMS)
        assert late.engine is not resting
        for request in (*requests, late):
            await text(request)
            assert request.replays == 0
        await come(lambda: len(link.made) == 4 and all(engine.up for engine in llm.replicas.engines))

    with_replicas(tiny, work, route="round")


def test_a_single_engine_restarts_and_its_requests_go_on(tiny: Path) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=3)
    (expected,) = right(tiny, [params], [PROMPTS[0]])

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        request = submit(llm, PROMPTS[0], params)
        await come(lambda: request.generated > 3)
        llm.renew(3600.0)
        assert await text(request) == expected
        assert (request.replays, request.crashes, len(link.made)) == (1, 0, 2)

    with_replicas(tiny, work, replicas=1)


def test_a_replica_that_cannot_start_again_stops_the_restarts(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        async def refuses(message: Any) -> Any:
            raise LoadError("no memory")

        before = link.start
        link.start = refuses  # type: ignore[method-assign,assignment]
        llm.replica.supervision.pauses = (3600.0,)
        llm.renew(0.0)
        await come(lambda: llm.replica.supervision.failed_starts == 1)
        await come(lambda: llm.replicas._renewing is not None and llm.replicas._renewing.done())
        link.start = before  # type: ignore[method-assign]
        assert llm.replicas.engines[1].replica.supervision.restarts == 0
        assert llm.state is State.READY
        await text(submit(llm, LONG, PARAMS))

    with_replicas(tiny, work)
    assert "the new process of replica 0 is not ready; no other replica is restarted" in caplog.messages
    assert "replica 0: dead: no memory" in caplog.messages


def test_equal_beginnings_meet_in_one_replica_and_metrics_count_them(tiny: Path) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        figures = ServerMetrics()
        metrics = ModelMetrics(figures, "tiny")
        llm.replicas.observe(metrics)
        used = set()
        for place in range(4):
            request = submit(llm, f"{LONG} {place}", PARAMS)
            await text(request)
            used.add(number(llm, request))
            assert request.metrics is not None
            assert (request.metrics.cached_tokens > 0) == (place > 0)
        (mine,) = used
        other = submit(llm, LONG, PARAMS)
        llm.abort([other])
        metrics.supervise(llm.state, llm.replicas.engines, 0)

        def value(name: str, **labels: str) -> float | None:
            return figures.registry.get_sample_value(f"headrace:{name}", {"model_name": "tiny", **labels})

        assert value("routed_prefix_hits_total", replica=str(mine)) == 4 * 128 * (request.route.hit // 128)  # type: ignore[union-attr]
        assert value("routed_prompt_tokens_total", replica=str(1 - mine)) is None
        assert [value("replica_ready", replica=name) for name in "01"] == [1, 1]
        assert value("engine_state", state="ready") == 1

    with_replicas(tiny, work)


def test_tenants_do_not_meet(tiny: Path) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        ids = llm.opened.tokenizer.encode(LONG)
        for salt in (b"one", b"two"):
            (request,) = llm.submit([ids], PARAMS, salt=salt)
            await text(request)
            assert request.route is not None
            assert request.route.hit == 0

    with_replicas(tiny, work)


def test_answers_run_in_all_replicas_and_drain_waits_for_them(tiny: Path) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        requests = [submit(llm, prompt, PARAMS) for prompt in PROMPTS]
        assert {number(llm, request) for request in requests} == {0, 1}
        waiting = asyncio.gather(*map(text, requests))
        drained = asyncio.create_task(llm.drain(3600.0))
        await waiting
        llm.abort(requests)
        assert await drained
        assert llm.state is State.DRAINING

    with_replicas(tiny, work)


# -- start ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("processors", "count", "expected"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([4, 5, 6], 2, [[4], [5, 6]]),
        ([0, 1], 3, [[0], [0], [1]]),
        ([7], 2, [[7], [7]]),
        ([0, 1], 1, [[]]),
    ],
)
def test_replicas_divide_the_processors(
    processors: list[int], count: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "processors", lambda: processors)
    replicas = AsyncLLM("none", replicas=count).replicas
    assert [sorted(replicas.processors(number)) for number in range(count)] == expected


def test_more_replicas_than_cores_are_a_warning(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "cores", lambda: 1)

    async def nothing(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        pass

    with_replicas(tiny, nothing)
    assert "2 replicas share 1 cores and wait for each other; fewer are faster" in caplog.messages


def test_the_others_go_on_without_a_replica_that_cannot_be_loaded(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        link = local(never)
        llm = AsyncLLM(tiny, replicas=2, stuck_after=3600.0, threads=1, device="cpu", backend="native")
        link_start = link.start

        async def start(message: Any) -> Any:
            if message.replica == "1":
                raise LoadError("no memory")
            return await link_start(message)

        link.start = start  # type: ignore[method-assign,assignment]
        for engine in llm.replicas.engines:
            engine.replica.link = link  # type: ignore[assignment]
        async with llm:
            await come(lambda: "replica 1 cannot be loaded, and the others go on: no memory" in caplog.messages)
            await text(submit(llm, LONG, PARAMS))
            assert llm.replicas.states() == {"0": "ready", "1": "closed: no memory"}

    asyncio.run(main())


def test_no_replica_that_can_be_loaded_is_an_error(tiny: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(tiny, replicas=2)

        async def refuses(engine: Any) -> Any:
            raise LoadError("no memory")

        for engine in llm.replicas.engines:
            engine.replica._open = lambda: refuses(engine)  # type: ignore[assignment,return-value]  # noqa: B023
        with pytest.raises(LoadError, match="no memory"):
            await llm.start()
        await llm.close()

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"route": "best"}])
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AsyncLLM("none", **wrong)


def test_pooled_texts_have_no_prefix(tiny: Path) -> None:
    assert isinstance(AsyncLLM("none", replicas=2).replicas, Replicas)
    assert Submit("r", [1], PARAMS, pool="mean").pool
