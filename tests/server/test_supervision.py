"""The supervision table row by row, without a process; and the quarantine of requests that crash the engine."""

import asyncio
from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.data.types import Delta, RequestMetrics
from headrace.server.engines import supervision
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.engine_client import EngineGoneError
from headrace.server.engines.engine_requests import EngineRequests
from headrace.server.engines.inflight import (
    EngineDownError,
    EngineLostError,
    InflightRequest,
    QuarantinedError,
    RequestFailedError,
)
from headrace.server.engines.messages import Deltas, FromEngine, Load, Loaded, NotLoaded, Stats, Submit
from headrace.server.engines.quarantine import KEPT, MOST, Quarantine
from headrace.server.engines.replica import LoadError, Replica
from headrace.server.engines.supervision import CALM, FAILURES, PAUSES, TABLE, Action, Event, State, Supervision
from headrace.server.http.errors import as_api_error
from tests.server.harness import PATIENCE, ROOT

AGAIN = "it broke; it is being started again"
BYE = "the server is shutting down"
# state, event: state, action, what those in flight hear, what everybody else does
ROWS = """
closed    begin    loading   start    -     the model is being loaded
closed    drain    draining  nothing  -     BYE
closed    close    closed    stop     down  the server has shut down
loading   loaded   ready     nothing  -
loading   refused  closed    kill     -     it broke
loading   late     closed    kill     -     it broke; allow it more time (--load-timeout)
loading   gone     dead      restart  -     AGAIN
loading   cut      dead      restart  -     it broke; trying to connect
loading   drain    draining  nothing  -     BYE
loading   close    closed    stop     down  the server has shut down
ready     gone     dead      restart  lost  AGAIN
ready     silent   stuck     restart  lost  AGAIN
ready     failed   failing   restart  lost  AGAIN
ready     cut      dead      restart  down  it broke; trying to connect
ready     renew    dead      restart  down  the operator restarts it
ready     drain    draining  nothing  -     BYE
ready     close    closed    stop     down  the server has shut down
draining  begin    draining  nothing  -     BYE
draining  loaded   draining  nothing  -     BYE
draining  refused  draining  kill     lost  BYE
draining  late     draining  kill     lost  it broke; BYE
draining  gone     draining  kill     lost  it broke; BYE
draining  silent   draining  kill     lost  it broke; BYE
draining  failed   draining  kill     lost  it broke; BYE
draining  cut      draining  kill     lost  it broke; BYE
draining  renew    draining  kill     lost  BYE
draining  resume   draining  kill     -     BYE
draining  drain    draining  nothing  -     BYE
draining  close    closed    stop     down  the server has shut down
DOWN      resume   DOWN      start    -     AGAIN
DOWN      loaded   ready     nothing  -
DOWN      refused  dead      restart  -     the model cannot be loaded again; the log says why
DOWN      late     dead      restart  -     AGAIN
DOWN      gone     dead      restart  -     AGAIN
DOWN      cut      dead      restart  -     it broke; trying to connect
DOWN      drain    draining  nothing  lost  BYE
DOWN      close    closed    stop     down  the server has shut down
"""
HEARS = {"-": None, "lost": EngineLostError, "down": EngineDownError}


def rows() -> dict[tuple[State, Event], tuple[State, Action, type[EngineDownError] | None, str]]:
    found = {}
    for line in ROWS.strip().splitlines():
        before, event, after, action, lost, *says = line.split(None, 5)
        text = (says[0] if says else "").replace("AGAIN", AGAIN).replace("BYE", BYE)
        for down in ["dead", "stuck", "failing"] if before == "DOWN" else [""]:
            key = State(down or before), Event(event)
            found[key] = State(down if after == "DOWN" else after), Action(action), HEARS[lost], text
    return found


@pytest.mark.parametrize(("state", "event"), rows())
def test_every_row(state: State, event: Event) -> None:
    after, action, lost, says = rows()[state, event]
    one = Supervision()
    one.state, one.detail = state, AGAIN
    row = one.on(event, "it broke" if event in supervision.ENDS else "")
    assert (one.state, row.action, row.lost, one.detail) == (after, action, lost, says)


def test_the_transition_table_is_complete() -> None:
    assert set(TABLE) == set(rows())
    with pytest.raises(KeyError):
        Supervision().on(Event.GONE)


def test_ready_is_reachable_from_every_state() -> None:
    """From every state an engine is ready again, or its end was asked for."""
    for state in State:
        reached, todo = {state}, [state]
        while todo:
            now = todo.pop()
            for (before, _), row in TABLE.items():
                if before is now and row.state not in reached:
                    reached.add(row.state)
                    todo.append(row.state)
        assert State.READY in reached, state
    assert all(row.action is not Action.NOTHING for (_, event), row in TABLE.items() if event in supervision.ENDS)


def test_pauses_grow_with_each_restart() -> None:
    now = 0.0
    one = Supervision(lambda: now)
    one.on(Event.BEGIN)
    paused = []
    for _ in range(8):
        one.on(Event.LOADED)
        now += CALM - 1  # not long enough to be forgiven
        one.on(Event.GONE, "it broke")
        paused.append(one.pause)
        assert one.refusal().retry_after == max(5, one.pause)
        one.on(Event.RESUME)
    assert paused == [*PAUSES, PAUSES[-1], PAUSES[-1]]
    assert (one.restarts, one.ends[Event.GONE]) == (8, 8)
    one.on(Event.LOADED)
    now += CALM
    one.on(Event.GONE, "it broke")
    assert one.pause == PAUSES[0]
    one.on(Event.RESUME)
    one.on(Event.REFUSED, "no memory")  # it never was ready
    assert one.pause == PAUSES[1]


def test_the_page_lists_these_numbers() -> None:
    page = (ROOT / "docs/en/reference/http.md").read_text("utf-8")
    pauses = ", ".join(f"{pause:g}" for pause in PAUSES[1:-1])
    for text in (
        f"{FAILURES} steps in a row fail",
        f"the next after {pauses} and then {PAUSES[-1]:g} seconds",
        "`--load-timeout` seconds (600)",
    ):
        assert text in page
    assert (CALM, KEPT, AsyncLLM("none").replica.load_timeout) == (120, 3600, 600)


# -- a replica of a process that is none ---------------------------------------------------------------------------------------

LOADED = Loaded(256, 32, 402, 512, 16, "note", bits="same")


class FakeLink:
    """An engine process that says what it is told to say; None: silence, an exception: its end."""

    scripts: list[list[FromEngine | Exception | None]]
    made: list["FakeLink"]

    def __init__(self) -> None:
        self.pid = 1
        self.sent: list[Any] = []
        self.ended = ""
        self.says = list(self.scripts.pop(0)) if self.scripts else [None]
        self.go_on = asyncio.Event()

    @classmethod
    async def start(cls, load: Load) -> "FakeLink":
        cls.made.append(cls())
        return cls.made[-1]

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> FromEngine:
        said = self.says.pop(0) if self.says else None
        if said is None:
            await self.go_on.wait()
            raise EngineGoneError("it ended")
        await asyncio.sleep(0)
        if isinstance(said, Exception):
            raise said
        return said

    async def kill(self) -> None:
        self.ended = "killed"

    async def stop(self) -> None:
        self.ended = "stopped"


def scripted(*scripts: list[FromEngine | Exception | None]) -> type[FakeLink]:
    return type("Scripted", (FakeLink,), {"scripts": list(scripts), "made": []})


def replica_of(link: Any, heard: list[Any], *, stuck_after: float = 3600.0, load_timeout: float = 3600.0) -> Replica:
    async def open() -> Load:
        return Load("m", {}, 30, 1.0)

    made = Replica(stuck_after, load_timeout, open=open, ready=heard.append, take=heard.append, lost=heard.append)
    made.link = link
    made.supervision.pauses = (0.0,)
    return made


async def come(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_model_that_does_not_load_is_killed_after_the_timeout() -> None:
    async def main() -> None:
        link, heard = scripted([None], [None]), []  # type: ignore[var-annotated]
        one = replica_of(link, heard, load_timeout=0.05)
        one.begin()
        with pytest.raises(LoadError, match=r"not loaded within 0\.05 s; allow it more time"):
            await one.ready()
        await come(lambda: not one.running)
        assert [each.ended for each in link.made] == ["killed"]

    asyncio.run(main())


def test_an_engine_that_was_ready_once_is_restarted_without_end() -> None:
    async def main() -> None:
        gone = EngineGoneError("it ended")
        link, heard = scripted([LOADED, gone], [None], [NotLoaded("no memory")], [gone], [LOADED]), []  # type: ignore[var-annotated]
        one = replica_of(link, heard, load_timeout=0.05)
        one.begin()
        await come(lambda: len(link.made) == 5 and one.state is State.READY)
        assert [each.ended for each in link.made] == ["killed"] * 4 + [""]
        assert "no memory" not in one.supervision.detail
        assert {event: count for event, count in one.supervision.ends.items() if count} == {
            Event.GONE: 2,
            Event.LATE: 1,
            Event.REFUSED: 1,
        }
        # After MOST_STARTS failed starts the requests that wait for the engine fail.
        assert [type(each) for each in heard] == [Loaded, EngineLostError, EngineLostError, Loaded]
        assert one.supervision.failed_starts == 0
        await one.close()
        assert link.made[-1].ended == "stopped"

    asyncio.run(main())


@pytest.mark.parametrize("failing", [FAILURES - 1, FAILURES])
def test_steps_that_fail_in_a_row_end_the_process(failing: int) -> None:
    async def main() -> None:
        link, heard = scripted([LOADED, Deltas(stats=Stats(failing=failing))], [LOADED]), []  # type: ignore[var-annotated]
        one = replica_of(link, heard)
        one.begin()
        await come(lambda: len(heard) == 2 + 2 * (failing == FAILURES))
        assert one.supervision.ends[Event.FAILED] == (failing == FAILURES)
        if failing == FAILURES:
            assert str(heard[2]) == "8 steps of the engine failed in a row; it is being started again"
        await one.close()

    asyncio.run(main())


def test_a_silent_engine_is_killed() -> None:
    async def main() -> None:
        link, heard = scripted([LOADED, None], [LOADED]), []  # type: ignore[var-annotated]
        one = replica_of(link, heard, stuck_after=0.05)
        one.begin()
        await come(lambda: one.supervision.ends[Event.SILENT])
        await come(lambda: link.made[0].ended == "killed")
        await one.close()

    asyncio.run(main())


def test_an_engine_that_ends_during_shutdown_is_not_restarted() -> None:
    async def main() -> None:
        link, heard = scripted([LOADED, None]), []  # type: ignore[var-annotated]
        one = replica_of(link, heard)
        one.begin()
        await one.ready()
        one.drain()
        link.made[0].go_on.set()
        await come(lambda: not one.running)
        assert (one.state, len(link.made), type(heard[-1])) == (State.DRAINING, 1, EngineLostError)
        await one.close()

    asyncio.run(main())


def test_an_error_in_a_message_handler_restarts_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        link = scripted([LOADED, Deltas()], [LOADED, None])
        one = replica_of(link, [])

        def take(message: FromEngine) -> None:
            raise KeyError("a mistake")

        one._take = take
        one.begin()
        await come(lambda: len(link.made) == 2 and one.state is State.READY)
        assert one.supervision.ends[Event.GONE] == 1
        await one.close()

    asyncio.run(main())


# -- quarantine ---------------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(temperature=0, max_tokens=8)


async def ready(link: Any) -> AsyncLLM:
    llm = AsyncLLM("none", stuck_after=3600.0)

    async def open() -> Load:
        return Load("m", {}, 30, 1.0)

    llm.replica._open = open
    llm.replica.link = link
    llm.replica.supervision.pauses = (0.0,)
    await llm.start()
    return llm


def had(link: Any) -> list[list[int]]:
    """The prompts that the process of now was sent."""
    return [message.prompt for message in link.made[-1].sent if isinstance(message, Submit)]


def answer(llm: AsyncLLM, submitted: InflightRequest, *, end: bool = True, error: str | None = None) -> None:
    delta = Delta(submitted.request_id, 0, [5], "x", finish_reason="length" if end else None, error=error, finished=end)
    llm.requests.take(Deltas([delta], {submitted.request_id: RequestMetrics()} if end else {}))


async def die(llm: AsyncLLM, link: Any) -> None:
    before = len(link.made)
    link.made[-1].go_on.set()
    await come(lambda: len(link.made) == before + 1 and llm.state is State.READY)


def test_a_request_that_ended_the_engine_twice_is_quarantined_and_others_run() -> None:
    """One of five requests kills the engine. All five are replayed, one by one, so that the second crash shows which it is."""

    async def main() -> None:
        link = scripted(*[[LOADED, None]] * 3)
        llm = await ready(link)
        prompts = [[1], [2], [3], [4], [5]]  # [3] is the poison
        one, two, three, four, five = (llm.submit([prompt], PARAMS)[0] for prompt in prompts)
        assert had(link) == prompts
        answer(llm, two, end=False)
        await die(llm, link)
        fresh = llm.submit([[9]], PARAMS)[0]
        assert had(link) == [[1], [9]]
        answer(llm, one)
        assert had(link) == [[1], [9], [2]]
        answer(llm, two, end=False)  # it has one token more than at the crash: the next request is sent next to it
        assert had(link)[3:] == [[3]]
        await die(llm, link)
        with pytest.raises(EngineLostError):
            three.take()
        with pytest.raises(QuarantinedError, match="ended 2 times while it had this request"):
            llm.submit([[3]], PARAMS)
        with pytest.raises(QuarantinedError):
            llm.submit([[7], [3]], PARAMS)
        assert llm.quarantine.banned == 1
        llm.submit([[3]], PARAMS.replace(max_tokens=9))  # another request
        for submitted in (four, five, two, fresh):  # each in its turn
            answer(llm, submitted)
        assert had(link) == [[4], [3], [5], [2], [9]]
        (begun,) = (message for message in link.made[-1].sent if isinstance(message, Submit) and message.given)
        assert (begun.prompt, begun.given) == ([2], [5, 5])
        assert [len(one.take()) for one in (one, two, four, five, fresh)] == [1, 3, 1, 1, 1]
        llm.submit([[2]], PARAMS)
        assert had(link)[-1] == [2]
        await llm.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["aborted", "failed", "expired"])
def test_a_suspect_that_ends_early_frees_the_next_suspect(how: str) -> None:
    async def main() -> None:
        link = scripted([LOADED, None], [LOADED, None])
        llm = await ready(link)
        first, _ = llm.submit([[1], [2]], PARAMS)
        await die(llm, link)
        assert had(link) == [[1]]
        if how == "aborted":
            llm.abort([first])
        elif how == "expired":
            llm._expire(first, 0.01)
        elif how == "failed":
            answer(llm, first, error="the step failed")
            with pytest.raises(RequestFailedError):
                first.take()
        await come(lambda: had(link) == [[1], [2]])
        await llm.close()

    asyncio.run(main())


def test_a_repeated_request_runs_alone_after_a_crash() -> None:
    """The client of a lost request left and sends it again; while it is a suspect, the next one waits."""

    async def main() -> None:
        link = scripted([LOADED, None], [LOADED, None])
        llm = await ready(link)
        lost = llm.submit([[1], [2]], PARAMS)
        await die(llm, link)
        llm.abort(lost[::-1])
        again = [llm.submit([prompt], PARAMS)[0] for prompt in ([1], [2])]
        assert had(link) == [[1], [1]]
        answer(llm, again[0])
        assert had(link) == [[1], [1], [2]]
        await llm.close()

    asyncio.run(main())


def test_a_shutdown_makes_no_request_suspect() -> None:
    async def main() -> None:
        link = scripted(*[[LOADED, None]] * 4)
        llm = await ready(link)
        for _ in range(3):
            llm.submit([[1]], PARAMS)
            await llm.close()
            await llm.start()
        llm.submit([[1]], PARAMS)
        assert had(link) == [[1]]
        await llm.close()

    asyncio.run(main())


def test_the_quarantine_is_bounded_and_expires() -> None:
    now = 0.0
    quarantine = Quarantine(lambda: now)
    one = Submit("a", [1], PARAMS)
    quarantine.ended_under([(one, 3)])
    found = quarantine.find(Submit("b", [1], PARAMS))
    assert found is not None
    assert (found.ends, found.reached) == (1, 3)
    assert quarantine.find(Submit("b", [1], PARAMS, b"another")) is None
    assert quarantine.find(Submit("b", [1], PARAMS, pool="mean")) is None
    quarantine.ended_under([(one, 3)])
    assert quarantine.banned == 1
    now += KEPT
    assert quarantine.find(one) is None
    quarantine.ended_under((Submit("a", [number], PARAMS), 0) for number in range(MOST + 5))
    assert len(quarantine._known) == MOST
    assert quarantine.find(Submit("a", [4], PARAMS)) is None
    assert quarantine.find(Submit("a", [5], PARAMS)) is not None


@pytest.mark.parametrize(
    ("error", "status", "again"),
    [
        (EngineLostError("gone"), 503, "true"),
        (EngineDownError("gone", 30), 503, "true"),
        (QuarantinedError("no"), 422, None),
        (RequestFailedError("no"), 500, "false"),
    ],
)
def test_errors_carry_x_should_retry(error: Exception, status: int, again: str | None) -> None:
    told = as_api_error(error)
    assert told is not None
    assert (told.status, told.headers().get("x-should-retry")) == (status, again)
    if isinstance(error, EngineDownError):
        assert told.headers()["Retry-After"] == str(error.retry_after)


def test_without_turns_innocent_requests_are_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: suspects are sent together. Those that ran next to the poison twice fail, too."""

    def together(self: EngineRequests) -> None:
        while self.up and self._suspects:
            submitted, _ = self._suspects.popleft()
            assert submitted.message is not None
            self.replica.send(submitted.message)

    monkeypatch.setattr(EngineRequests, "_send_suspect", together)

    async def main() -> None:
        link = scripted(*[[LOADED, None]] * 3)
        llm = await ready(link)
        inflight = [llm.submit([prompt], PARAMS)[0] for prompt in ([1], [3])]
        for _ in range(2):
            await die(llm, link)
        assert llm.quarantine.banned == 2
        for submitted in inflight:
            with pytest.raises(EngineLostError):
                submitted.take()
        await llm.close()

    asyncio.run(main())
