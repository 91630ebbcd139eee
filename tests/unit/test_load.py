"""The load generator on known timings: a server that answers when it is told to, and bytes that came at known times."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headrace.bench import plots
from headrace.bench.load import drive, report, summary
from headrace.bench.load.client import PendingRequest, Target, TimedAnswer, TimedConnection
from headrace.bench.load.workload import (
    Lengths,
    ScheduledRequest,
    WorkloadLimits,
    describe_truncations,
    poisson,
    read_trace,
    steady,
)
from headrace.bench.machine import commit, machine
from tests.places import data_path

OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HERE = Target("http://127.0.0.1:1/v1", "m")


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str = "", **more: Any) -> bytes:
    choices = [{"index": 0, "text": text}] if "usage" not in more else []
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


USAGE = event(usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def came(parts: list[tuple[float, bytes]], due: float = 10.0) -> TimedAnswer:
    """The answer to a request whose bytes came so."""

    async def make() -> TimedAnswer:
        pending = PendingRequest(HERE, ScheduledRequest(0.0, 7, 3))
        exchange = TimedConnection(b"")
        exchange.parts, exchange.sent = parts, due + 0.001
        pending._exchange, pending._due = exchange, due
        return pending.read()

    return asyncio.run(make())


def whole(*times: float, due: float = 10.0) -> TimedAnswer:
    parts = [(due, OK), *((at, chunk(event("a"))) for at in times), (times[-1], chunk(USAGE) + chunk(DONE) + END)]
    return came(parts, due)


def test_token_times_equal_arrival_times() -> None:
    answer = whole(10.25, 10.5, 10.75)
    assert (answer.error, answer.text, answer.prompt_tokens, answer.output_tokens) == (None, "aaa", 7, 3)
    assert answer.times == [10.25, 10.5, 10.75]
    made = summary.times([answer])
    assert made == {"ttft": [0.25], "itl": [0.25, 0.25], "tpot": [0.25], "e2e": [0.75]}


def test_responses_are_parsed_from_pieces_of_any_size() -> None:
    stream = OK + chunk(event("a") + event("b")) + chunk(event("ä")) + chunk(USAGE) + chunk(DONE) + END
    for size in (1, 7, 1000):
        parts = [(10.0 + place, stream[place : place + size]) for place in range(0, len(stream), size)]
        answer = came(parts)
        assert (answer.error, answer.text, answer.output_tokens, len(answer.times)) == (None, "abä", 3, 3)
        assert answer.times == sorted(answer.times)
    carriage = came([(10.0, OK + chunk(event("a").replace(b"\n", b"\r\n") + DONE.replace(b"\n", b"\r\n")) + END)])
    assert (carriage.error, carriage.text, carriage.output_tokens) == (None, "a", 1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(10.0, OK + chunk(event("a")))], "ended early"),
        ([(10.0, OK + chunk(event("a")) + END)], "ended early"),
        ([(10.0, OK + chunk(b'data: {"error": {"message": "gone"}}\n\n' + DONE) + END)], "gone"),
        ([(10.0, b'HTTP/1.1 429 Too Many\r\nContent-Length: 6\r\n\r\n"busy"')], "429: "),
        ([(10.0, b"nonsense\r\n\r\n")], "is invalid"),
        ([(10.0, OK + chunk(b"data: {\n\n") + END)], "is invalid"),
        ([], "ended early"),
    ],
)
def test_failed_requests_are_errors_and_not_counted(parts: list[tuple[float, bytes]], said: str) -> None:
    answer = came(parts)
    assert said in (answer.error or "")
    told = summary.summary(drive.LoadRun([answer, whole(10.5)], 2.0, 0.0, {}), {"ttft": 1.0})
    assert (told["requests"], told["failed"], told["output_tokens"]) == (2, 1, 3)
    assert told["slo"]["share"] == 0.5


def test_a_client_that_was_late_hides_nothing() -> None:
    answer = whole(12.0, due=10.0)
    answer.sent = 11.5
    told = summary.summary(drive.LoadRun([answer], 2.0, 0.5, {42: 0.003}), {})
    assert told["ttft"]["p50"] == 2.0
    assert told["sent_late_max"] == 1.5
    assert told["cpu_us_per_token"] == {"42": pytest.approx(1000.0)}


def test_percentiles_and_goodput() -> None:
    answers = [whole(10 + n / 100, 10 + n / 100 + 0.2) for n in range(1, 102)]
    told = summary.summary(drive.LoadRun(answers, 10.0, 0.0, {}), summary.parse_slo("ttft:0.505, tpot:0.11"))
    assert told["ttft"]["p50"] == pytest.approx(0.51)
    assert told["ttft"]["p99"] == pytest.approx(1.0)
    assert told["tpot"]["p50"] == pytest.approx(0.1)  # three tokens in two events
    assert told["slo"]["goodput_requests_per_s"] == pytest.approx(5.0)
    assert told["output_tokens_per_s"] == pytest.approx(30.3)
    assert told["events_per_token"] == pytest.approx(2 / 3)
    assert summary.percentiles([]) is None
    for wrong in ("ttft", "speed:1", "ttft:fast"):
        with pytest.raises(ValueError, match="ttft:0.5"):
            summary.parse_slo(wrong)


# -- a server that answers when it is told to ---------------------------------------------------------------------------


class Fake:
    """Serves on a free port; `answer` writes each response. It knows how many requests came, and are open."""

    def __init__(self, answer: Callable[["Fake", int, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most = 0
        self.arrived = asyncio.Condition()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.arrived:
            await self.arrived.wait_for(condition)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        async with self.arrived:
            number = len(self.bodies)
            self.bodies.append(json.loads(await reader.readexactly(length)))
            self.open += 1
            self.most = max(self.most, self.open)
            self.arrived.notify_all()
        await self._answer(self, number, writer)
        self.open -= 1
        writer.close()

    def drive(self, jobs: list[ScheduledRequest], at_once: int | None = None, **target: Any) -> drive.LoadRun:
        """What `drive.drive` does, with the server in the same event loop."""

        async def main() -> drive.LoadRun:
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            pending = [PendingRequest(Target(f"http://127.0.0.1:{port}/v1", "m", **target), job) for job in jobs]
            self.pending = pending
            work = drive._open(pending, jobs) if at_once is None else drive._closed(pending, at_once)
            begun, ended = await work
            server.close()
            return drive.LoadRun([one.read() for one in pending], ended - begun, 0.0, {})

        return asyncio.run(main())


async def at_once(fake: Fake, number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(OK + chunk(event("a")) + chunk(event("b")) + chunk(USAGE) + chunk(DONE) + END)
    await writer.drain()


def test_every_event_is_stamped_between_its_sending_and_its_being_seen() -> None:
    brackets: list[tuple[float, float]] = []

    async def slowly(fake: Fake, number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        for _ in range(5):
            before = time.perf_counter()
            writer.write(chunk(event("a")))
            exchange = fake.pending[0]._exchange
            seen = sum(data.count(b"data:") for _, data in exchange.parts) if exchange else 0
            while exchange is None or sum(data.count(b"data:") for _, data in exchange.parts) == seen:
                await asyncio.sleep(0)
                exchange = fake.pending[0]._exchange
            brackets.append((before, time.perf_counter()))
            await asyncio.sleep(0.002)
        writer.write(chunk(USAGE) + chunk(DONE) + END)

    (answer,) = Fake(slowly).drive([ScheduledRequest(0.0, 4, 5)]).answers
    assert len(answer.times) == 5
    for at, (before, after) in zip(answer.times, brackets, strict=True):
        assert before <= at <= after
    assert answer.due <= answer.sent <= answer.times[0]


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The first answer comes when the last request has arrived: a closed loop of one would never end."""

    async def when_all_have_come(fake: Fake, number: int, writer: asyncio.StreamWriter) -> None:
        await fake.until(lambda: len(fake.bodies) == 4)
        await at_once(fake, number, writer)

    jobs = [ScheduledRequest(number * 0.01, 4, 2) for number in range(4)]
    fake = Fake(when_all_have_come)
    run = fake.drive(jobs)
    assert [answer.error for answer in run.answers] == [None] * 4
    assert fake.most == 4
    gaps = [answer.due - run.answers[0].due for answer in run.answers]
    assert gaps == pytest.approx([0.0, 0.01, 0.02, 0.03], abs=1e-6)
    assert all(answer.sent >= answer.due for answer in run.answers)


def test_a_closed_loop_holds_its_number() -> None:
    async def in_threes(fake: Fake, number: int, writer: asyncio.StreamWriter) -> None:
        await fake.until(lambda: len(fake.bodies) >= min(9, number + 3 - number % 3))
        await at_once(fake, number, writer)

    fake = Fake(in_threes)
    run = fake.drive([ScheduledRequest(0.0, 4, 2, seed=number) for number in range(9)], at_once=3)
    assert [answer.error for answer in run.answers] == [None] * 9
    assert fake.most == 3


def test_request_bodies_have_the_scheduled_lengths() -> None:
    fake = Fake(at_once)
    fake.drive([ScheduledRequest(0.0, 5, 9, seed=3)], kind="chat", extra={"temperature": 0.5})
    (body,) = fake.bodies
    assert len(body["messages"][0]["content"].split()) == 5
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (9, 0.5, True)
    fake = Fake(at_once)
    fake.drive(
        [ScheduledRequest(0.0, 5, 9, seed=3), ScheduledRequest(0.0, 5, 9, seed=4), ScheduledRequest(0.0, 5, 9, seed=3)],
        at_once=1,
    )
    prompts = [body["prompt"] for body in fake.bodies]
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert prompts[0] == prompts[2] != prompts[1]


def test_no_server_and_no_answer_in_time_are_errors() -> None:
    async def never(fake: Fake, number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    (answer,) = Fake(never).drive([ScheduledRequest(0.0, 1, 1)], timeout=0.05).answers
    assert answer.error == "no complete answer within 0.05 s"
    answers = drive.drive(HERE, [ScheduledRequest(0.0, 1, 1)]).answers
    assert "no connection" in (answers[0].error or "")
    with pytest.raises(ValueError, match="answers none of 1 requests: no connection"):
        drive.warm_up(HERE, [ScheduledRequest(0.0, 1, 1)], print)
    with pytest.raises(ValueError, match="is not the address of a server"):
        Target("localhost:8000", "m").address()


# -- workloads ----------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_and_heavy_tails() -> None:
    jobs = poisson(4000, 20.0, Lengths(200, 50, 1.0), seed=1)
    gaps = [after.at - before.at for before, after in pairwise(jobs)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)  # exponential: 1/e
    prompts = sorted(job.prompt for job in jobs)
    assert sum(prompts) / len(prompts) == pytest.approx(200, rel=0.08)
    assert prompts[int(0.99 * len(prompts))] > 5 * prompts[len(prompts) // 2]
    assert {job.prompt for job in steady(50, Lengths(200, 50))} == {200}
    assert jobs == poisson(4000, 20.0, Lengths(200, 50, 1.0), seed=1)


def test_traces_are_read_truncated_and_summarized(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0299600,100,800\n2023-11-16 18:17:05.9799600,7,1\n"
    )
    bounds = WorkloadLimits(scale=0.5, prompt=1000, output=100, limit=2)
    jobs = bounds.apply(read_trace(azure))
    assert [(round(job.at, 3), job.prompt, job.output) for job in jobs] == [(0.0, 1000, 10), (0.025, 100, 100)]
    assert bounds.cut.summary() == (
        "the first 2 of 3 requests, 1 prompt shortened by 3,808 tokens in all, 1 output shortened by 700 tokens in all"
    )
    mooncake = tmp_path / "mooncake.jsonl"
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 4, "hash_ids": [5, 6, 7]},
        {"timestamp": 1000, "input_length": 1030, "output_length": 4, "hash_ids": [5, 6, 9]},
    ]
    mooncake.write_text("\n".join(map(json.dumps, lines)))
    later, first = sorted(read_trace(mooncake), key=lambda job: -job.at)
    assert (first.at, later.at) == (0.0, 2.0)
    assert [len(first.ids()), len(later.ids())] == [1030, 1100]
    assert first.ids()[:1024] == later.ids()[:1024]  # equal hashes are equal tokens
    assert first.ids()[1024:] != later.ids()[1024:1030]
    assert len(WorkloadLimits(prompt=600).apply([later])[0].ids()) == 600
    for wrong in ("nothing", "timestamp\n1"):
        (tmp_path / "x.csv").write_text(wrong)
        with pytest.raises(ValueError, match=r"x\.csv"):
            read_trace(tmp_path / "x.csv")


def test_truncations_are_described_per_load() -> None:
    """--limit 8 takes 8 of the 100 requests of each of two loads, and not 16 of 200."""
    bounds = {name: WorkloadLimits(limit=8) for name in ("1 at once", "8 at once", "short")}
    for name, each in bounds.items():
        assert len(each.apply(steady(5 if name == "short" else 100, Lengths()))) == (5 if name == "short" else 8)
    cuts = {name: each.cut for name, each in bounds.items()}
    assert describe_truncations(cuts) == "1 at once, 8 at once: the first 8 of 100 requests each; short: 5 requests"
    assert describe_truncations({"1/s": cuts["1 at once"]}) == "1/s: the first 8 of 100 requests"


@pytest.mark.parametrize("name", ["azure_code_2023.csv", "mooncake_synthetic.jsonl"])
def test_real_traces(name: str) -> None:
    jobs = read_trace(data_path("traces") / name)
    assert len(jobs) > 3000
    assert jobs[0].at == 0.0
    assert all(job.prompt > 0 and job.output >= 0 for job in jobs)


def test_plots_are_svg_with_markers_and_where_they_are_from_in_both_schemes() -> None:
    lines = plots.distribution({"a < b": [0.1, 0.2, 0.4], "none": []})
    assert [(line.name, line.x[0], line.x[-1], line.y[-1]) for line in lines] == [("a < b", 100.0, 400.0, 100.0)]
    few = plots.Line("few", [1.0, 2.0, 3.0], [5.0, 3.0, 4.0])
    text = plots.draw("T & T", "ms", "%", [*lines, few], plots.about("mine & yours"))
    drawn = ElementTree.fromstring(text)
    assert "a &lt; b" in text
    assert "T &amp; T" in text
    assert text.count("<path") == 2
    assert text.count("<circle") == 3, "points of a distribution are no measurements of their own"
    said = "".join(drawn.itertext())
    for part in ("mine & yours", str(machine()["cpu"]), commit(), str(datetime.now(UTC).year)):
        assert part in said
    assert "prefers-color-scheme: dark" in text
    assert not set(plots.LIGHT) & set(plots.DARK)
    assert ElementTree.fromstring(plots.draw("nothing", "ms", "%", [])).tag.endswith("svg")


def test_points_have_numbers_and_axes_that_hold_them() -> None:
    """From 0 to a round number, or in powers of ten; the middle of both is where it should be."""
    plain, wide = plots.Axis.of("MB", [40.0, 93.0]), plots.Axis.of("ppl", [13.0, 1300.0], log=True)
    assert [said for _, said in plain.ticks()] == ["0", "20", "40", "60", "80", "100"]
    assert (plain.at(50.0), wide.at(130.0)) == (0.5, pytest.approx(0.5))
    assert [said for _, said in wide.ticks()] == ["10", "20", "50", "100", "200", "500", "1000"]
    line = plots.Line("memory <read>", [10.0, 90.0], [20.0, 900.0], True)
    text = plots.scatter("S", plain, wide, [plots.Point(7, 50.0, 130.0)], [line])
    drawn = ElementTree.fromstring(text)
    (mark,) = drawn.iter("{http://www.w3.org/2000/svg}circle")
    left, right, top, bottom = plots.LEFT, plots.WIDTH - plots.RIGHT, plots.TOP, plots.HEIGHT - plots.BOTTOM
    middle = (float(mark.get("cx", 0)), float(mark.get("cy", 0)))
    assert middle == pytest.approx(((left + right) / 2, (top + bottom) / 2), abs=0.1)
    assert "memory &lt;read&gt;" in text
    assert "stroke-dasharray" in text


def test_a_report_is_one_self_contained_page() -> None:
    told = {name: {"p50": 0.1, "p90": 0.2, "p99": 0.3} for name in ("ttft", "itl", "tpot", "e2e")}
    times = {name: [0.1, 0.2, 0.3] for name in ("ttft", "itl", "e2e")}
    made = {f"{n} at once": ({**told, "output_tokens_per_s": 10.0 * n}, times) for n in (2, 1)}
    drawn = report.pictures("<model>", made)
    assert set(drawn) == {"ttft", "itl", "e2e", "ttft-load", "itl-load"}, "times of one size share an axis"
    assert drawn["ttft-load"].count("<circle") == 4
    counts = dict.fromkeys(("requests", "failed", "output_tokens", "cached_tokens", "prompt_tokens"), 1)
    rates = dict.fromkeys(("requests_per_s", "seconds", "sent_late_max", "client_cpu_s"), 1.0)
    rest = counts | rates | {"cpu_us_per_token": {}}
    made = {f"{name} <b>": (rest | figures, latencies) for name, (figures, latencies) in made.items()}
    page = report.page("<model>", "2 of 2", made)
    assert page.count("<svg") == 5
    assert "&lt;model&gt;" in page
    assert "<model>" not in page
    assert "<b>" not in page
    assert "default-src 'none'" in page
    assert re.findall(r"(?:src|href|url|import|action)\s*[=(]", page) == []
    assert set(re.findall(r"https?://[^\s\"<]+", page)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page
