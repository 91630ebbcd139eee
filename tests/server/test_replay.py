"""Replay: a request whose engine is lost after any step goes on with the very next token."""

import asyncio
import platform
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import core
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.data.settings import ModelSettings
from headrace.data.structured import StructuredOutputs
from headrace.data.types import Delta
from headrace.engine.engine import AdmissionError
from headrace.llm import LLM
from headrace.server.engines import engine_requests, replay
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.inflight import DeadlineError, EngineDownError, EngineLostError, InflightRequest, QuarantinedError
from headrace.server.engines.messages import Deltas, Submit
from headrace.server.engines.metrics import ModelMetrics, ServerMetrics
from headrace.server.engines.replay import Delivered, DivergedError, Rerun
from headrace.server.engines.replica import MOST_STARTS
from headrace.server.engines.supervision import State
from headrace.startup.bits import bits_digest, portable_bits
from tests.early_exits import write_exits
from tests.server.local_engine import LocalEngine, answers, local, started, submit
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import write_tiny_marian

PROMPT = "The mill stands by the river, the mill stands by"
TOKENS = 12
SCHEMA = {
    "type": "object",
    "properties": {"wheel": {"enum": ["wood", "iron"]}},
    "required": ["wheel"],
    "additionalProperties": False,
}
BEAM = BeamSearchParams(beam_width=3, max_tokens=TOKENS)
# Parameters by mode. `stop` is a string of the undisturbed answer, see `parameters`.
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "penalties": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.7,
        "no_repeat_ngram": 3,
        "dry_multiplier": 0.8,
        "min_tokens": 5,
    },
    "stop": {},
    "regex": {"structured_outputs": StructuredOutputs(regex="[a-z]{9}-[0-9]{9}"), "max_tokens": 24},
    "schema": {"structured_outputs": StructuredOutputs(json=SCHEMA), "max_tokens": 40, "logprobs": 0},
    "logprobs": {"logprobs": 3, "logprobs_mode": "processed", "top_k": 20},
    "ngram": {"allowed_token_ids": (300, 301), "max_tokens": 24},  # of two tokens, so that drafts are accepted
    "n": {"n": 2, "logprobs": 1},
    "best of": {"best_of": 3},
    "beams": {},
    "mirostat": {"mirostat_tau": 3.0},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4, "temperature": 0},
    "exits": {"exit_threshold": 0.02, "temperature": 0},
    "cascade": {"cascade_threshold": 0.02},
    "prompt scores": {"prompt_logprobs": 1},
}
RESUMED = ("greedy", "sampled", "penalties", "stop", "regex", "schema", "logprobs", "ngram")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("replay")
    model = write_tiny_gguf(place / "tiny.gguf", context=512)
    write_tiny_gguf(place / "smaller.gguf", layers=1, seed=3)
    write_exits(place / "exits", model, 1)
    return place


def settings_of(mode: str, folder: Path) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {
        "exits": {"exits": str(folder / "exits")},
        "cascade": {"cascade": str(folder / "smaller.gguf")},
        "ngram": {"speculate": "ngram", "draft_tokens": 3},
    }
    return {"speculate": None, **more.get(mode, {})}


def never(engine: LocalEngine, message: Deltas) -> bool:
    return False


def at_step(step: int) -> Callable[[LocalEngine, Deltas], bool]:
    """The first engine is lost in this step, counted from 1; its message does not arrive."""
    return lambda engine, message: engine.number == 0 and engine.steps == step


class Answer:
    """All that a client has of one request."""

    def __init__(self, request: InflightRequest, outputs: dict[int, list[Delta]]) -> None:
        self.request = request
        self.tokens = {index: [token for delta in deltas for token in delta.token_ids] for index, deltas in outputs.items()}
        self.text = {index: "".join(delta.text for delta in deltas) for index, deltas in outputs.items()}
        self.logprobs = {index: [one for delta in deltas for one in delta.logprobs] for index, deltas in outputs.items()}
        self.exits = {index: [one for delta in deltas for one in delta.exits] for index, deltas in outputs.items()}
        self.ends = {
            index: [(delta.finish_reason, delta.stop_reason) for delta in deltas if delta.finish_reason is not None]
            for index, deltas in outputs.items()
        }

    @property
    def parts(self) -> tuple[Any, ...]:
        return (
            self.tokens,
            self.text,
            self.logprobs,
            self.exits,
            self.ends,
            self.request.generated,
            self.request.prompt_logprobs,
        )


async def run(folder: Path, mode: str, params: SamplingParams, loses: Any = never) -> tuple[Answer, type[LocalEngine]]:
    link = local(loses)
    llm = await started(folder / "tiny.gguf", link, **settings_of(mode, folder))
    try:
        request = submit(llm, PROMPT, params)
        answer = Answer(request, await answers(request))
        llm.abort([request])
        assert not llm.inflight
        assert llm.queue.requests == 0
        assert await llm.check() == ""
        return answer, link
    finally:
        await llm.close()


async def parameters(mode: str, folder: Path) -> SamplingParams:
    if mode == "beams":
        return BEAM.sampling()
    params = SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **MODES[mode]})
    if mode == "stop":
        params = params.replace(seed=11)
        whole, _ = await run(folder, mode, params)
        return params.replace(stop=(whole.text[0][-5:-1],), include_stop_str_in_output=True)
    return params


async def lost_at_each_step(folder: Path, mode: str, stride: int) -> int:
    """Lose the engine in each step of an answer, and compare with the undisturbed run. Returns the replays."""
    params = await parameters(mode, folder)
    right, _ = await run(folder, mode, params)
    if mode == "ngram":
        assert right.request.metrics is not None
        assert right.request.metrics.accepted > 0
    if mode in ("exits", "cascade"):
        assert len({one.layers for one in right.exits[0]}) == 2
    step = replays = 0
    while True:
        step += stride
        lost, link = await run(folder, mode, params, at_step(step))
        assert lost.parts == right.parts, (mode, step)
        if len(link.made) == 1:
            return replays
        replays += 1
        (again,) = link.made[1].submitted
        assert again.given == (lost.tokens[0][: len(again.given)] if mode in RESUMED else [])
        assert lost.request.replays == 1


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawn seeds of all runs are equal."""
    monkeypatch.setattr(replay.secrets, "randbits", lambda bits: 4711)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("seeded")
def test_an_answer_lost_at_some_steps_is_the_undisturbed_one(folder: Path, mode: str) -> None:
    assert asyncio.run(lost_at_each_step(folder, mode, 3)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("seeded")
def test_an_answer_lost_at_any_step_is_the_undisturbed_one(folder: Path, mode: str) -> None:
    assert asyncio.run(lost_at_each_step(folder, mode, 1)) >= 9


# -- controls ------------------------------------------------------------------------------------------------------------------


async def differs(folder: Path, mode: str, step: int = 7, seed: int | None = None) -> bool:
    params = (await parameters(mode, folder)).replace(**{} if seed is None else {"seed": seed})
    right, _ = await run(folder, mode, params)
    lost, link = await run(folder, mode, params, at_step(step))
    assert len(link.made) == 2
    return lost.parts != right.parts


def test_the_control_a_seed_drawn_in_the_engine_gives_another_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    seeds = iter(range(100))
    monkeypatch.setattr("headrace.engine.engine.secrets.randbits", lambda bits: next(seeds))
    monkeypatch.setattr(replay, "request_seed", lambda params: None)
    lost, _ = asyncio.run(run(folder, "sampled", params, at_step(7)))
    first, _ = asyncio.run(run(folder, "sampled", params.replace(seed=0)))
    assert lost.tokens[0][:6] == first.tokens[0][:6]
    assert lost.tokens != first.tokens


def test_the_control_a_delivered_part_that_is_not_removed_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rerun, "undelivered", lambda self, delta: delta)
    assert asyncio.run(differs(folder, "n", seed=1))


def test_the_control_an_engine_that_starts_again_instead_of_going_on_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.engine.resume", lambda *_: None)
    assert asyncio.run(differs(folder, "greedy"))


def test_the_control_a_grammar_that_does_not_see_the_given_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.engine.resume", lambda request, seq, given, *_: seq.tokens.extend(given))
    assert asyncio.run(differs(folder, "regex", step=3, seed=1))


# -- one request ---------------------------------------------------------------------------------------------------------------


def test_rejection_sampling_goes_on_from_the_given_tokens(folder: Path) -> None:
    """It keeps the distribution, not the sample."""

    async def main() -> None:
        params = SamplingParams(**MODES["ngram"], ignore_eos=True, verification="rejection", seed=3)
        answer, link = await run(folder, "ngram", params, at_step(6))
        (again,) = link.made[1].submitted
        assert answer.request.metrics is not None
        assert answer.request.metrics.drafts > 0
        assert len(again.given) >= 4
        assert answer.tokens[0][: len(again.given)] == again.given
        assert len(answer.tokens[0]) == 24

    asyncio.run(main())


def test_a_rerun_with_other_tokens_fails_with_the_error_of_the_crash(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds of the two runs differ, as if the engines computed other bits."""
    seeds = iter(range(100))
    monkeypatch.setattr("headrace.engine.engine.secrets.randbits", lambda bits: next(seeds))
    monkeypatch.setattr(replay, "request_seed", lambda params: None)
    with pytest.raises(EngineLostError, match=r"ended \(test\); it is being started again"):
        asyncio.run(run(folder, "n", SamplingParams(n=2, max_tokens=TOKENS, ignore_eos=True), at_step(7)))


@pytest.mark.parametrize("bits", ["", "other"])
def test_a_begun_answer_needs_the_same_bits(folder: Path, bits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a digest (torch), or after another model file: what has begun fails, what has not is answered."""
    digests = iter([bits and "first", bits])
    monkeypatch.setattr("headrace.server.engines.engine_process.bits_digest", lambda *_: next(digests))
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1)
    with pytest.raises(EngineLostError):
        asyncio.run(run(folder, "sampled", params, at_step(5)))
    digests = iter([bits and "first", bits])
    answer, link = asyncio.run(run(folder, "beams", BEAM.sampling(), at_step(5)))
    assert len(link.made) == 2
    assert answer.tokens[0]


def test_the_digests_follow_the_order_of_sums(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with AVX2 continues what another with AVX-512 but without bfloat16 products began, and no other."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    found: list[tuple[str, str]] = []
    for isa in ("avx2", "avx512vnni", "avx512", "amx", "plain"):
        monkeypatch.setattr(core, "module", lambda isa=isa: SimpleNamespace(cpu_info=lambda: {"isa": isa}))
        found.append((bits_digest(folder, ModelSettings(), "native"), portable_bits("files", ModelSettings(), "native")))
    assert found[0] == found[1]
    assert len({one for both in found for one in both}) == 8


def test_the_digest_follows_the_file(tmp_path: Path) -> None:
    def digest(path: Path, **settings: Any) -> str:
        with LLM(path, threads=1, device="cpu", backend="native", **settings) as llm:
            return bits_digest(llm.opened.path, llm.settings, llm.dtype)

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = digest(path)
    assert first == digest(path)
    assert first != digest(path, kv_dtype="int8")
    write_tiny_gguf(path, seed=1)
    assert first != digest(path)
    assert bits_digest(tmp_path / "none.gguf", ModelSettings(), "") == ""


def test_the_digests_follow_the_files_of_adapters(folder: Path, tmp_path: Path) -> None:
    """Another adapter under the same name has other bits; on another host the same one may lie elsewhere."""
    files = {name: tmp_path / name for name in ("here.gguf", "there.gguf")}
    for file in files.values():
        file.write_bytes(b"one")
    here, there = (ModelSettings(adapter=f"mine={file}") for file in files.values())
    before = bits_digest(folder, here, ""), portable_bits("", here, "")
    assert before[1] == portable_bits("", there, "") != portable_bits("", ModelSettings(), "")
    files["here.gguf"].write_bytes(b"other")
    after = bits_digest(folder, here, ""), portable_bits("", here, "")
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_engines_refuse_given_tokens_that_cannot_go_on(folder: Path) -> None:
    with LLM(folder / "tiny.gguf", threads=1, device="cpu", backend="native") as llm:
        for given, more in (
            ([5], {"n": 2}),
            ([5], {"beam": BEAM, "temperature": 0}),
            ([10**6], {}),
            ([5, 6], {"max_tokens": 2}),
        ):
            with pytest.raises(AdmissionError) as refused:
                llm.engine.add([1, 2], SamplingParams(**{"max_tokens": TOKENS, **more}), given=given)
            assert refused.value.field == "given"
        assert not llm.engine.busy


def test_a_rerun_drops_delivered_tokens() -> None:
    def delta(tokens: list[int], text: str, index: int = 0, end: str | None = None) -> Delta:
        return Delta("a", index, tokens, text, finish_reason=end)

    delivered = {0: Delivered([1, 2, 3], 5), 1: Delivered([7], 1, finished=True)}
    again = Rerun(delivered)
    assert again.undelivered(delta([1, 2], "abc")) is None
    assert again.undelivered(delta([3, 4], "defg")) == delta([4], "fg")
    assert again.undelivered(delta([5], "h")) == delta([5], "h")
    assert again.undelivered(delta([], "", end="stop")) == delta([], "", end="stop")
    assert again.undelivered(delta([7], "x", 1, "stop")) is None
    assert again.undelivered(delta([9], "y", 2)) == delta([9], "y", 2)
    wrong = (delta([2], "b"), delta([1], "a", end="stop"), delta([7, 8], "xy", 1, "stop"), delta([1, 2, 4], "abcde"))
    for one in wrong:
        with pytest.raises(DivergedError):
            Rerun(delivered).undelivered(one)
    failed = Delta("a", 0, finish_reason="error", error="the step failed")
    assert Rerun(delivered).undelivered(failed) is failed


# -- several requests ----------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


async def texts(llm: AsyncLLM, requests: list[InflightRequest]) -> list[str | Exception]:
    found = await asyncio.gather(*map(answers, requests), return_exceptions=True)
    llm.abort(requests)
    return [
        one if isinstance(one, BaseException) else "".join(delta.text for delta in one[0])  # type: ignore[misc]
        for one in found
    ]


def with_llm(folder: Path, loses: Any, work: Callable[[AsyncLLM, type[LocalEngine]], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        link = local(loses)
        llm = await started(folder / "tiny.gguf", link, **settings)
        try:
            await work(llm, link)
        finally:
            await llm.close()

    asyncio.run(main())


def right_texts(folder: Path, prompts: list[str]) -> list[str]:
    with LLM(folder / "tiny.gguf", threads=1, device="cpu", backend="native") as llm:
        return [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("token", [0, 4])
def test_a_poison_request_costs_its_neighbours_a_prefill_and_no_answer(folder: Path, token: int) -> None:
    """It ends its engine each time it is to get its `token`-th token."""
    prompts = [f"river {number}" for number in range(5)]
    right = right_texts(folder, prompts)

    def loses(engine: LocalEngine, message: Deltas) -> bool:
        poison = [one for one in engine.submitted if one.params.priority]
        return any(len(one.given) + engine.tokens.get(one.request_id, 0) > token for one in poison)

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        requests = [submit(llm, prompt, GREEDY) for prompt in prompts[:3]]
        poison = submit(llm, "poison", GREEDY.replace(priority=1))
        requests += [submit(llm, prompt, GREEDY) for prompt in prompts[3:]]
        *found, failed = await texts(llm, [*requests, poison])
        assert found == right
        assert isinstance(failed, EngineLostError)
        assert len(link.made) == 3, "the poison ended two engines"
        for request in requests:
            sent = sum(one.request_id == request.request_id for engine in link.made for one in engine.submitted)
            assert sent == 1 + request.replays <= 3
            assert request.crashes == 0
        with pytest.raises(QuarantinedError):
            submit(llm, "poison", GREEDY.replace(priority=1))
        assert llm.quarantine.banned == 1

    with_llm(folder, loses, work)


def test_lost_requests_run_one_at_a_time_and_reruns_last(folder: Path) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        several = submit(llm, "several", GREEDY.replace(n=2, temperature=1))
        plain = [submit(llm, f"river {number}", GREEDY) for number in range(3)]
        await texts(llm, [several, *plain])
        again = link.made[1].submitted
        assert [one.request_id for one in again] == [one.request_id for one in (*plain, several)]
        assert link.steps_at == sorted(set(link.steps_at)), "each after the step that gave the one before its token"  # type: ignore[attr-defined]

    async def main() -> None:
        link = local(at_step(5))
        link.steps_at = []  # type: ignore[attr-defined]
        send = link.send

        def noted(self: LocalEngine, message: Any) -> None:
            if isinstance(message, Submit) and self.number == 1:
                link.steps_at.append(self.steps)  # type: ignore[attr-defined]
            send(self, message)

        link.send = noted  # type: ignore[method-assign]
        llm = await started(folder / "tiny.gguf", link)
        try:
            await work(llm, link)
        finally:
            await llm.close()

    asyncio.run(main())


def test_equal_requests_are_lost_once_at_a_crash(folder: Path) -> None:
    right = right_texts(folder, ["river"])

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        assert await texts(llm, [submit(llm, "river", GREEDY) for _ in range(4)]) == right * 4
        assert llm.quarantine.banned == 0

    with_llm(folder, at_step(5), work)


def test_one_of_many_answers_may_be_lost_again_after_it_went_on(folder: Path) -> None:
    """The engine is lost five times; each time the answer has one token more."""
    right = right_texts(folder, ["river"])

    def loses(engine: LocalEngine, message: Deltas) -> bool:
        return engine.number < 5 and engine.steps == 3

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        request = submit(llm, "river", GREEDY)
        assert await texts(llm, [request]) == right
        assert (request.replays, len(link.made)) == (5, 6)

    with_llm(folder, loses, work)


# -- waiting for the engine ----------------------------------------------------------------------------------------------------


async def come(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["deadline", "client", "drain", "close", "failed starts"])
def test_a_request_that_waits_for_the_engine_ends_when_it_must(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        llm.replica.supervision.pauses = (0.0 if how == "failed starts" else 3600.0,)
        if how == "failed starts":
            monkeypatch.setattr("tests.server.local_engine.load", broken)
        (request,) = llm.submit([[1, 2, 3]], GREEDY, deadline=3600)
        assert request.timer is not None
        await come(lambda: llm.state is State.DEAD)
        if how != "failed starts":
            assert request.request_id in llm.inflight
            assert request.generated == 4
        if how == "deadline":
            request.timer._callback(*request.timer._args)  # type: ignore[attr-defined]
        elif how == "client":
            llm.abort([request])
        elif how == "drain":
            assert await llm.drain(0.0)
        elif how == "close":
            await llm.close()
        await come(lambda: not llm.inflight)
        error = {
            "deadline": DeadlineError,
            "drain": EngineLostError,
            "close": EngineDownError,
            "failed starts": EngineLostError,
        }
        if how in error:
            with pytest.raises(error[how]):
                await answers(request)
        if how == "failed starts":
            assert llm.replica.supervision.failed_starts >= MOST_STARTS
        llm.abort([request])
        assert llm.queue.requests == 0

    def broken(*_: Any) -> Any:
        from headrace.server.engines.engine_client import EngineGoneError

        raise EngineGoneError("it cannot be started")

    with_llm(folder, at_step(5), work)


def test_parts_of_a_begun_api_request_wait_for_the_engine(folder: Path) -> None:
    right = right_texts(folder, ["river"])

    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        llm.replica.supervision.pauses = (0.05,)
        first = submit(llm, "mill", GREEDY)
        await come(lambda: llm.state is State.DEAD)
        ids = llm.opened.tokenizer.encode("river")
        with pytest.raises(EngineDownError):
            llm.submit([ids], GREEDY)
        (second,) = llm.submit([ids], GREEDY, begun=True)
        assert (await texts(llm, [first, second]))[1:] == right

    with_llm(folder, at_step(5), work)


# -- figures -------------------------------------------------------------------------------------------------------------------


def test_replays_are_counted_and_no_token_twice(folder: Path) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        figures = ServerMetrics()
        llm.replicas.observe(ModelMetrics(figures, "tiny"))
        requests = [submit(llm, "river", GREEDY), submit(llm, "mill", GREEDY.replace(n=2, temperature=1))]
        await texts(llm, requests)

        def value(name: str) -> float:
            found = figures.registry.get_sample_value(f"headrace:{name}", {"model_name": "tiny"})
            assert found is not None
            return found

        assert value("request_replays_total") == 2
        assert value("generation_tokens_total") == 3 * TOKENS
        assert value("time_to_first_token_seconds_count") == 2
        assert value("inter_token_latency_seconds_count") == 3 * (TOKENS - 1)
        assert value("request_generation_tokens_sum") == 3 * TOKENS
        assert value("prefix_cache_hits_total") <= value("prefix_cache_queries_total")

    # Without drafts each token has a message of its own, and so a latency.
    with_llm(folder, at_step(5), work, speculate=None)


def test_a_lost_engine_logs_the_counts_in_one_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(llm: AsyncLLM, link: type[LocalEngine]) -> None:
        await texts(llm, [submit(llm, "river", GREEDY), submit(llm, "mill", GREEDY)])

    with caplog.at_level("WARNING"):
        with_llm(folder, at_step(5), work)
    assert [line for line in caplog.messages if "go on" in line] == ["2 requests go on when the engine is ready, 0 fail"]


def test_steps_that_fail_are_not_replayed() -> None:
    """The engine's process answered: it would fail the same requests again."""
    assert State.FAILING not in engine_requests.REPLAYED


def test_an_encoder_decoder_goes_on_after_given_tokens(tmp_path: Path) -> None:
    """Its source is encoded again."""
    prompt, params = [5, 9, 11, 7], SamplingParams(max_tokens=8, ignore_eos=True, seed=4)
    with LLM(write_tiny_marian(tmp_path / "marian"), threads=1, device="cpu", backend="native") as llm:

        def rest(given: list[int]) -> list[int]:
            llm.engine.add(prompt, params, given=given)
            tokens: list[int] = []
            while llm.engine.busy:
                tokens += [token for delta in llm.engine.step() for token in delta.token_ids]
            return tokens

        right = rest([])
        assert len(right) == 8
        for count in range(1, 8):
            assert rest(right[:count]) == right[count:], count
