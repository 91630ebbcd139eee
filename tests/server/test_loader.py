"""Loading on demand without engines: which models make room, and what becomes of the requests that wait."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.server.engines import loader as loading
from headrace.server.engines import room
from headrace.server.engines.async_llm import AsyncLLM, LoadError, State
from headrace.server.engines.inflight import DeadlineError
from headrace.server.engines.metrics import ServerMetrics
from headrace.server.engines.models import Models, ServedModel, Service, make_service
from headrace.server.engines.room import Resident, choose_victims
from headrace.server.http.api_error import ApiError
from headrace.server.settings import Mode, ServerSettings, SettingsError
from tests.server.harness import PATIENCE

GONE = "the file is gone"


class FakeLLM:
    """Loads when `loads` is set; `broken` is the error of loading."""

    def __init__(self) -> None:
        self.state, self.running, self.restarts, self.detail, self.pid = State.CLOSED, False, 0, "", None
        self.inflight: dict[str, Any] = {}
        self.in_use, self.loaded, self.settings = False, None, {}
        self.queue = SimpleNamespace(max_requests=100)
        self.requests = SimpleNamespace(replica=SimpleNamespace(load_timeout=600.0), observer=None)
        self.loads = asyncio.Event()
        self.loads.set()
        self.closes = asyncio.Event()
        self.closes.set()
        self.broken = ""
        self.begun = 0
        self.replicas = SimpleNamespace(observe=lambda metrics: None)

    def begin(self) -> None:
        self.state, self.running = State.LOADING, True
        self.begun += 1

    async def ready(self) -> None:
        await self.loads.wait()
        if self.broken:
            self.state, self.running = State.CLOSED, False
            raise LoadError(self.broken)
        self.state = State.READY

    async def close(self) -> None:
        self.state = State.CLOSED
        await asyncio.sleep(0)  # the process ends later
        await self.closes.wait()
        self.running = False

    async def drain(self, grace: float) -> bool:
        return True


class Rig:
    """Three models of 10 bytes, and memory for two."""

    def __init__(self, budget: int | None = 20, idle: float | None = None, **modes: Mode) -> None:
        figures, settings = ServerMetrics(), ServerSettings("a", port=0)
        self.llms = {name: FakeLLM() for name in "abc"}
        entries = [
            ServedModel(self._service(name, settings, figures), modes.get(name, Mode.ON_DEMAND), preload=False, size=10)
            for name in self.llms
        ]
        self.models = Models(entries, settings, figures, budget, idle_unload=idle)
        self.entries = {entry.name: entry for entry in entries}
        self.lines: list[str] = []
        self.models.loader.report = self.lines.append

    def _service(self, name: str, settings: ServerSettings, figures: ServerMetrics) -> Service:
        return make_service(cast(AsyncLLM, self.llms[name]), name, settings, figures)

    @property
    def loaded(self) -> str:
        return "".join(name for name, llm in self.llms.items() if llm.state is State.READY)

    async def ask(self, name: str, work: Callable[[], Awaitable[None]] | None = None, seconds: float | None = None) -> str:
        async with self.models.use(name, seconds=seconds) as service:
            if work is not None:
                await work()
            return service.name

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.001)


def play(test: Callable[[Rig], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def run() -> None:
        rig = Rig(**more)
        rig.models.begin()
        await rig.models.ready()
        try:
            await test(rig)
        finally:
            await rig.models.close()

    asyncio.run(run())


def resident(name: str, **more: Any) -> Resident:
    return Resident(**{"name": name, "size": 10, "pinned": False, "busy": False, "used": 0.0, "turn_ends": 0.0, **more})


@pytest.mark.parametrize(
    ("residents", "need", "victims"),
    [
        ([], 10, ""),
        ([resident("a")], 10, ""),
        ([resident("a", used=2.0), resident("b", used=1.0)], 10, "b"),  # the least recently used
        ([resident("a", used=2.0), resident("b", used=1.0)], 20, "ba"),
        ([resident("a", busy=True), resident("b", used=9.0)], 10, "b"),  # idle before busy
        ([resident("a", pinned=True), resident("b", used=9.0)], 10, "b"),
        ([resident("a", busy=True, turn_ends=3.0), resident("b", busy=True, turn_ends=2.0)], 10, "b"),  # the older turn
        ([resident("a", busy=True, turn_ends=6.0), resident("b", busy=True, turn_ends=7.0)], 10, None),  # no turn has ended
        ([resident("a", busy=True, turn_ends=6.0), resident("b")], 20, None),
        ([resident("a", pinned=True, size=15), resident("b")], 10, "b"),  # measured sizes exceed the plan
    ],
)
def test_idle_models_make_room_first_and_busy_ones_after_their_turn(
    residents: list[Resident], need: int, victims: str | None
) -> None:
    chosen = choose_victims(residents, need, 20, now=5.0)
    assert (None if chosen is None else "".join(one.name for one in chosen)) == victims


def test_a_turn_is_several_times_as_long_as_the_load() -> None:
    assert room.turn_seconds(0.1) == room.MIN_TURN
    assert room.turn_seconds(10) == 40


def test_one_load_answers_all_that_wait() -> None:
    async def test(rig: Rig) -> None:
        rig.llms["a"].loads.clear()
        asked = [asyncio.create_task(rig.ask("a")) for _ in range(5)]
        await rig.until(lambda: rig.llms["a"].begun == 1)
        assert len(rig.entries["a"].tickets) == 5
        rig.llms["a"].loads.set()
        assert await asyncio.gather(*asked) == ["a"] * 5
        assert (rig.llms["a"].begun, rig.entries["a"].users) == (1, 0)
        assert rig.lines[0].startswith("a: loading")
        assert rig.lines[1].startswith("a: loaded in")

    play(test)


def test_the_least_recently_used_makes_room() -> None:
    async def test(rig: Rig) -> None:
        for name in "abab":
            await rig.ask(name)
        await rig.ask("c")
        assert rig.loaded == "bc"

    play(test)


def test_a_busy_model_finishes_its_requests_and_new_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MIN_TURN", 0.0)
    monkeypatch.setattr(room, "LOADS_PER_TURN", 0.0)

    async def test(rig: Rig) -> None:
        ends = asyncio.Event()
        first = [asyncio.create_task(rig.ask(name, ends.wait)) for name in "ab"]  # type: ignore[arg-type]
        await rig.until(lambda: rig.loaded == "ab")
        await rig.until(lambda: all(one.users for one in (rig.entries["a"], rig.entries["b"])))
        third = asyncio.create_task(rig.ask("c"))
        await rig.until(lambda: rig.entries["a"].yields)
        late = asyncio.create_task(rig.ask("a"))
        await rig.until(lambda: len(rig.entries["a"].tickets) == 1)
        assert not third.done()
        ends.set()
        assert await asyncio.gather(*first, third, late) == ["a", "b", "c", "a"]
        assert [rig.llms[name].begun for name in "abc"] == [2, 1, 1]

    play(test)


def test_a_request_that_arrives_while_its_model_is_unloaded_waits_for_the_next_load() -> None:
    async def test(rig: Rig) -> None:
        for name in "ab":
            await rig.ask(name)
        rig.llms["a"].closes.clear()
        third = asyncio.create_task(rig.ask("c"))
        await rig.until(lambda: rig.llms["a"].state is State.CLOSED)
        late = asyncio.create_task(rig.ask("a"))
        await rig.until(lambda: len(rig.entries["a"].tickets) == 1)
        rig.llms["a"].closes.set()
        assert await asyncio.gather(third, late) == ["c", "a"]
        assert rig.llms["a"].begun == 2

    play(test)


def test_fifty_clients_of_three_models_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without a shortest turn every load answers at least one request, in the order of the models' first requests."""
    monkeypatch.setattr(room, "MIN_TURN", 0.0)
    monkeypatch.setattr(room, "LOADS_PER_TURN", 0.0)
    answered = []

    async def client(rig: Rig, number: int) -> None:
        for turn in range(6):
            answered.append(await rig.ask("abc"[(number + turn) % 3], lambda: asyncio.sleep(0)))

    async def test(rig: Rig) -> None:
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(client(rig, number) for number in range(50)))
        assert sorted(answered) == sorted("abc" * 100)
        loads = sum(llm.begun for llm in rig.llms.values())
        assert 3 <= loads <= 100, "a load answers several of the 300 requests"
        assert not any(one.users or one.tickets for one in rig.entries.values())

    play(test)


def test_a_failed_load_fails_its_requests_once_and_is_tried_again_after_a_pause() -> None:
    async def test(rig: Rig) -> None:
        rig.llms["a"].broken = GONE
        await rig.ask("b")
        results = await asyncio.gather(*(rig.ask("a") for _ in range(3)), rig.ask("b"), return_exceptions=True)
        assert results[3] == "b"
        for error in results[:3]:
            assert isinstance(error, ApiError)
            assert (error.status, error.code, error.retry_after) == (503, "model_unusable", 2)
            assert GONE not in error.message, "it may name files"
        with pytest.raises(ApiError, match="see the server's log"):
            await rig.ask("a")
        assert rig.llms["a"].begun == 1, "within the pause nothing is tried"
        rig.entries["a"].retry = 0.0
        rig.llms["a"].broken = ""
        assert await rig.ask("a") == "a"
        assert rig.entries["a"].failures == 0

    play(test)


def test_a_process_that_always_ends_while_it_loads_is_given_up() -> None:
    async def test(rig: Rig) -> None:
        rig.llms["a"].loads.clear()
        asked = asyncio.create_task(rig.ask("a"))
        await rig.until(lambda: rig.llms["a"].begun == 1)
        rig.llms["a"].restarts = loading.MOST_STARTS
        with pytest.raises(ApiError, match="cannot be loaded"):
            await asked
        assert rig.loaded == ""
        assert not rig.llms["a"].running

    play(test)


def test_a_client_that_leaves_while_the_model_loads_leaves_nothing() -> None:
    async def test(rig: Rig) -> None:
        rig.llms["a"].loads.clear()
        asked = asyncio.create_task(rig.ask("a"))
        await rig.until(lambda: rig.llms["a"].begun == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        rig.llms["a"].loads.set()
        await rig.until(lambda: rig.loaded == "a")
        assert rig.entries["a"].users == 0
        rig.llms["b"].loads.clear()
        left = asyncio.create_task(rig.ask("b"))  # before its load begins
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert await rig.ask("c") == "c"
        assert rig.entries["b"].users == 0

    play(test)


def test_a_request_waits_until_its_deadline() -> None:
    async def test(rig: Rig) -> None:
        rig.llms["a"].loads.clear()
        with pytest.raises(DeadlineError, match=r"deadline of 0\.01 s"):
            await rig.ask("a", seconds=0.01)
        rig.llms["a"].loads.set()
        assert await rig.ask("a") == "a"

    play(test)


def test_a_model_without_room_next_to_the_pinned_ones_gets_a_503_that_names_them() -> None:
    async def test(rig: Rig) -> None:
        assert rig.loaded == "ab"
        with pytest.raises(ApiError, match="does not fit next to the pinned models a, b") as caught:
            await rig.ask("c")
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (503, "no_room", None)
        assert any("c takes" in line for line in rig.models.summary())
        await rig.models.set_mode("a", Mode.ON_DEMAND)
        assert await rig.ask("c") == "c"
        assert rig.loaded == "bc"
        rig.entries["c"].mode = Mode.PINNED
        with pytest.raises(ApiError, match="does not fit next to the pinned"):
            await rig.models.set_mode("a", Mode.PINNED)
        assert rig.entries["a"].mode is Mode.ON_DEMAND

    play(test, a=Mode.PINNED, b=Mode.PINNED)


def test_models_that_never_fit_are_refused_at_the_start() -> None:
    with pytest.raises(SettingsError, match="never be loaded"):
        asyncio.run(build(budget=9))
    with pytest.raises(SettingsError, match="a, b are pinned or loaded at the start"):
        asyncio.run(build(budget=19, a=Mode.PINNED, b=Mode.PINNED))
    with pytest.raises(SettingsError, match="all models are off"):
        asyncio.run(build(a=Mode.OFF, b=Mode.OFF, c=Mode.OFF))


async def build(**more: Any) -> Rig:
    return Rig(**more)


def test_the_end_of_the_server_fails_requests_that_wait_for_a_load() -> None:
    async def test(rig: Rig) -> None:
        rig.llms["a"].loads.clear()
        asked = [asyncio.create_task(rig.ask(name)) for name in "ab"]
        await rig.until(lambda: rig.llms["a"].begun == 1 and bool(rig.entries["b"].tickets))
        await rig.models.drain(0.1)
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, ApiError)
            assert error.message == "the server is shutting down"
        with pytest.raises(ApiError, match="shutting down"):
            await rig.ask("c")
        await rig.models.close()
        assert not any(llm.running for llm in rig.llms.values())

    play(test)


def test_idle_models_are_unloaded_and_pinned_ones_stay() -> None:
    async def test(rig: Rig) -> None:
        await rig.ask("b")
        assert rig.loaded == "ab"
        for entry in rig.entries.values():
            entry.used = time.monotonic() - 3601
        rig.models.loader._news.set()
        await rig.until(lambda: rig.loaded == "a")
        assert await rig.ask("b") == "b"

    play(test, idle=3600.0, a=Mode.PINNED)


def test_the_operator_loads_unloads_and_turns_off() -> None:
    async def test(rig: Rig) -> None:
        await rig.models.load("a")
        assert rig.loaded == "a"
        ends = asyncio.Event()
        asked = asyncio.create_task(rig.ask("a", ends.wait))  # type: ignore[arg-type]
        await rig.until(lambda: rig.entries["a"].users == 1)
        unloading = asyncio.create_task(rig.models.unload("a"))
        await rig.until(lambda: rig.entries["a"].closing)
        ends.set()
        await unloading
        assert await asked == "a"
        assert rig.loaded == ""
        await rig.models.set_mode("a", Mode.OFF)
        with pytest.raises(ApiError, match="'a' is not served here; use 'b', 'c'"):
            await rig.ask("a")
        with pytest.raises(ApiError, match="a is off"):
            await rig.models.load("a")
        with pytest.raises(ApiError, match="not listed here"):
            await rig.models.load("../../etc/passwd")
        await rig.models.set_mode("a", Mode.PINNED)
        assert rig.loaded == "a"

    play(test)


def test_without_a_limit_an_unloaded_model_is_loaded_again() -> None:
    async def test(rig: Rig) -> None:
        assert rig.loaded == "abc"
        await rig.models.unload("b")
        assert rig.loaded == "ac"
        assert rig.models.state[0] is State.READY
        assert await rig.ask("b") == "b"

    play(test, budget=None, a=Mode.PINNED, b=Mode.PINNED, c=Mode.PINNED)
