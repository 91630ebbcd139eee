"""best_of and self-consistency: several sampled outputs, one chosen."""

import json
import re

import pytest

from headrace.data.params import SamplingParams
from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta, Request, Sequence
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.llm import LLM
from headrace.workflows.consistency import last_number, majority, self_consistency
from tests.drafters import Replaying
from tests.places import data_path
from tests.tiny import VOCAB, tiny_engine, tiny_model

PROMPT = [5, 9, 2, 11]
DRAWN = {"temperature": 1.0, "seed": 3, "max_tokens": 10}


def run(engine: Engine, *requests: SamplingParams) -> list[list[Delta]]:
    """The deltas of each request, all in one engine."""
    names = [engine.add(PROMPT, params).id for params in requests]
    found: dict[str, list[Delta]] = {name: [] for name in names}
    for _ in range(2000):
        if not engine.busy:
            break
        for delta in engine.step():
            found[delta.request_id].append(delta)
        engine.check()
    assert not engine.busy
    return [found[name] for name in names]


def means(model: object) -> list[tuple[float, list[int]]]:
    """Mean log-probability and tokens of the outputs of a plain run with n = 6."""
    (deltas,) = run(tiny_engine(model), SamplingParams(**DRAWN, n=6, logprobs=0))  # type: ignore[arg-type]
    outputs: dict[int, list] = {}
    for delta in deltas:
        outputs.setdefault(delta.index, []).extend(delta.logprobs)
    return [
        (sum(e.logprob for e in entries) / len(entries), [e.token for e in entries]) for _, entries in sorted(outputs.items())
    ]


def test_best_of_returns_the_likeliest_of_n_samples() -> None:
    model = tiny_model()
    every = sorted(means(model), key=lambda pair: -pair[0])
    (deltas,) = run(tiny_engine(model), SamplingParams(**DRAWN, n=2, best_of=6))
    assert [delta.token_ids for delta in deltas] == [tokens for _, tokens in every[:2]]
    assert [delta.score for delta in deltas] == pytest.approx([mean for mean, _ in every[:2]])
    assert deltas[0].cumulative_logprob == pytest.approx(every[0][0] * 10)
    assert [delta.index for delta in deltas] == [0, 1]
    assert every[0][0] > every[1][0] > every[-1][0]
    assert not any(delta.logprobs for delta in deltas)
    (told,) = run(tiny_engine(model), SamplingParams(**DRAWN, n=2, best_of=6, logprobs=2))
    assert [len(delta.logprobs) for delta in told] == [10, 10]
    assert all(len(entry.top_ids) == 2 for entry in told[0].logprobs)


def test_accepted_tokens_after_an_end_do_not_count() -> None:
    """A draft may be accepted beyond a stop; the mean is that of the output."""
    model = tiny_model()
    drawn = means(model)
    stop = drawn[0][1][3]
    params = SamplingParams(**DRAWN, n=6, best_of=6, stop_token_ids=(stop,), logprobs=0)
    (plain,) = run(tiny_engine(model), params)
    engine = tiny_engine(model)
    answers = {(tuple(PROMPT), 3, child): tokens for child, (_, tokens) in enumerate(drawn)}
    engine.speculation = Speculation([Replaying(answers, VOCAB)], 256, 5)
    beyond: list[int] = []
    extend = engine.stopping.extend

    def noted(request: Request, seq: Sequence, tokens: list[int], logprobs: tuple[TokenLogprob, ...]) -> Delta:
        delta = extend(request, seq, tokens, logprobs)
        beyond.append(len(tokens) - len(delta.token_ids))
        return delta

    engine.stopping.extend = noted  # type: ignore[method-assign]
    (drafted,) = run(engine, params)
    assert max(beyond) > 0, "no draft went beyond a stop"
    assert [delta.token_ids for delta in drafted] == [delta.token_ids for delta in plain]
    assert [delta.score for delta in drafted] == [delta.score for delta in plain]
    for delta in drafted:
        assert delta.score == pytest.approx(sum(entry.logprob for entry in delta.logprobs) / len(delta.token_ids))
        assert len(delta.logprobs) == len(delta.token_ids)


def test_best_of_survives_preemption() -> None:
    model = tiny_model()
    params = [SamplingParams(**{**DRAWN, "max_tokens": 30}, best_of=4), *[SamplingParams(seed=9, max_tokens=40)] * 2]
    engine = tiny_engine(model, blocks=34)
    found = run(engine, *params)
    assert engine.scheduler.preemptions > 0
    for one, params_of_it in zip(found, params, strict=True):
        (alone,) = run(tiny_engine(model, blocks=400), params_of_it)
        assert [t for d in one for t in d.token_ids] == [t for d in alone for t in d.token_ids]


def test_mirostat_survives_preemption_and_depends_on_its_state() -> None:
    model = tiny_model()
    steered = SamplingParams(seed=4, max_tokens=40, mirostat_tau=2.0, mirostat_eta=0.5, n=2)
    engine = tiny_engine(model, blocks=30)
    found = run(engine, *[SamplingParams(seed=9, max_tokens=40)] * 2, steered)
    assert engine.scheduler.preemptions > 0
    (alone,) = run(tiny_engine(model, blocks=400), steered)
    (still,) = run(tiny_engine(model, blocks=400), steered.replace(mirostat_eta=0.0))  # the control: mu stays where it begins

    def tokens(deltas: list[Delta]) -> list[list[int]]:
        return [[t for d in deltas if d.index == index for t in d.token_ids] for index in (0, 1)]

    assert tokens(found[2]) == tokens(alone)
    assert tokens(still) != tokens(alone)


# -- self-consistency --------------------------------------------------------------------------------------------------


def test_extracting_and_voting() -> None:
    assert last_number("so 3 + 4 = 7.") == "7"
    assert last_number("it costs $1,250.50 in all") == "1250.5"
    assert last_number("#### 72\nThat was 3 times") == "72"
    assert last_number("-5 degrees") == "-5"
    assert last_number("none") is None
    assert majority(["7", None, "8", "7"]) == ("7", 2)
    assert majority(["8", "7", "7", "8"]) == ("8", 2)
    assert majority([None]) == (None, 0)


def test_the_extractor_reads_the_answers_of_gsm8k() -> None:
    for line in data_path("gsm8k/train_first1000.jsonl").read_text("utf-8").splitlines():
        answer = json.loads(line)["answer"]
        marked = answer.split("####")[1].strip().replace(",", "")
        assert last_number(answer) == marked
        assert float(last_number(re.sub(r"####", "The answer is", answer)) or "nan") == float(marked)


def test_a_vote_among_outputs(tiny_llm: LLM) -> None:
    params = SamplingParams(n=5, temperature=1.0, seed=1, max_tokens=4)
    (vote,) = self_consistency(tiny_llm, ["The river"], params, extract=lambda text: "yes" if len(text) % 2 else "no")
    counts = [("yes" if len(one.text) % 2 else "no") for one in vote.output.outputs]
    assert vote.votes == counts.count(vote.answer or "") >= 3
    assert vote.answered == 5
    with pytest.raises(ValueError, match="n to 2 or more"):
        self_consistency(tiny_llm, ["The river"], params.replace(n=1))
