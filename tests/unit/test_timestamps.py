"""Whisper's timestamp rules against transformers on random prefixes and logits; every rule has a case that needs it."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from headrace import core
from headrace.backends.native.live import sample_params
from headrace.data.params import ParamError, SamplingParams, StructuredOutputs, TimestampParams
from headrace.decoding import timestamps
from headrace.decoding.timestamps import TimestampRules
from headrace.ops import penalties
from headrace.ops.keys import key
from headrace.ops.processing import RowSpec
from headrace.ops.sampling import process, sample

TEXT, END, NO_TIMES, FIRST, VOCAB, LATEST = 20, 20, 23, 24, 60, 10
CASES = 2000


def prefix(rng: np.random.Generator) -> list[int]:
    """An output that the rules allow: pairs of rising times around text, cut anywhere."""
    tokens, time = [], 0
    for _ in range(rng.integers(0, 4)):
        time += int(rng.integers(0, 4))
        tokens.append(FIRST + time)
        tokens += rng.integers(0, TEXT, rng.integers(1, 4)).tolist()
        time += int(rng.integers(1, 4))
        tokens.append(FIRST + time)
    return tokens[: rng.integers(0, len(tokens) + 1)]


def params(**changes: object) -> SamplingParams:
    fields = {"first": FIRST, "end": END, "suppressed": (NO_TIMES,), "latest": LATEST, **changes}
    return SamplingParams(temperature=0.0, logprobs=0, logprobs_mode="masked", timestamps=TimestampParams(**fields))


def rules(**changes: object) -> TimestampRules:
    given = params(**changes).timestamps
    assert given is not None
    return TimestampRules(given, VOCAB)


def after(made: TimestampRules, output: list[int]) -> TimestampRules:
    copied = made.copy()
    for token in output:
        copied.push(token)
    return copied


def spec(made: TimestampRules, output: list[int], **changes: object) -> RowSpec:
    return RowSpec(params(**changes), [key(0, 0)], [1, *output], 1, mask=after(made, output).masks())


def ours(made: TimestampRules, logits: np.ndarray, output: list[int]) -> np.ndarray:
    """Logits after the masks and the stage of the sampler."""
    row: np.ndarray = process(torch.from_numpy(logits)[None], [spec(made, output)])[0].numpy()
    return row


def theirs(logits: np.ndarray, output: list[int]) -> np.ndarray:
    config = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=LATEST
    )
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=1)
    row: np.ndarray = processor(torch.tensor([[1, *output]]), torch.from_numpy(logits)[None])[0].numpy()
    return row


def cases() -> list[tuple[np.ndarray, list[int]]]:
    rng = np.random.default_rng(0)
    return [((rng.standard_normal(VOCAB) * rng.choice([1, 4])).astype(np.float32), prefix(rng)) for _ in range(CASES)]


def test_masks_equal_those_of_transformers() -> None:
    made = rules()
    for logits, output in cases():
        assert np.array_equal(ours(made, logits, output), theirs(logits, output)), output


LINES = {  # each rule, and what stands in its place
    "self._allowed[list(params.suppressed)] = False": "pass",
    "elif after_time:": "elif False:",
    "if after_time and after_pair:": "if False:",
    "(not opens)": "0",
    "row[first + params.latest + 1 :] = False": "pass",
    "            row[:first] = False\n": "",
    "self._params.first if self._last < 0 else self._last": "self._last",
}


@pytest.mark.parametrize("line", LINES)
def test_each_rule_is_needed(line: str) -> None:
    source = inspect.getsource(TimestampRules)
    assert source.count(line) == 1
    names = dict(vars(timestamps))
    exec(source.replace(line, LINES[line]), names)
    given = params().timestamps
    broken = names["TimestampRules"](given, VOCAB)
    assert any(not np.array_equal(ours(broken, logits, output), theirs(logits, output)) for logits, output in cases())


def test_the_comparison_of_probabilities_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rules()
    monkeypatch.setattr(penalties, "compare_mass", lambda z, firsts: z)
    assert any(not np.array_equal(ours(made, logits, output), theirs(logits, output)) for logits, output in cases())


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_core_samples_the_tokens_of_torch(temperature: float) -> None:
    made, sampler = rules(), core.module().Sampler(VOCAB)
    reported = []
    for logits, output in cases()[:: 1 if temperature == 0 else 10]:
        row = spec(made, output)
        row.params = row.params.replace(temperature=temperature)
        (expected,) = sample(torch.from_numpy(logits)[None], [row])
        history = core.module().History([1])
        history.extend(output)
        mask = np.frombuffer(row.mask, np.uint32)
        copied = logits.copy()
        (report,), error = sampler.draw(copied, sample_params(row.params), history, row.keys, logprobs=0, mask=mask)
        assert not error
        assert report.id == expected.tokens[0], output
        if temperature == 0:
            assert report.id == int(theirs(logits, output).argmax())
        assert np.array_equal(copied, logits)
        assert report.logprob == pytest.approx(expected.logprobs[0].logprob, abs=1e-6)
        reported.append(report.logprob)
        whole = torch.from_numpy(theirs(logits, output)).log_softmax(-1)[report.id]
        assert report.logprob == pytest.approx(float(whole), abs=1e-5)
    assert len(set(reported)) > 100


def test_large_vocabularies_have_the_same_tokens_in_the_core() -> None:
    """Timestamps that begin and end inside blocks of the vocabulary, and blocks without an allowed token."""
    rng = np.random.default_rng(1)
    for first, size in ((150, 400), (192, 448), (130, 131), (70, 200)):
        given = TimestampParams(first=first, end=first - 4, suppressed=(*range(64, 70), first - 1), latest=40)
        made, sampler = TimestampRules(given, size), core.module().Sampler(size)
        chosen = params().replace(timestamps=given)
        for at in range(100):
            logits = (rng.standard_normal(size) * 2).astype(np.float32)
            logits[:first] += 3 if at % 2 else 0
            output = [[], [first], [first, 3], [first, 3, first + 1][: 3 if first + 1 < size else 2]][at % 4]
            row = RowSpec(chosen, [key(0, 0)], [1, *output], 1, mask=after(made, output).masks())
            (expected,) = sample(torch.from_numpy(logits)[None], [row])
            history = core.module().History([1])
            history.extend(output)
            (report,), error = sampler.draw(
                logits, sample_params(chosen), history, row.keys, logprobs=0, mask=np.frombuffer(row.mask, np.uint32)
            )
            assert bool(error) == bool(expected.error)
            if not error:
                assert report.id == expected.tokens[0]
                assert report.logprob == pytest.approx(expected.logprobs[0].logprob, abs=1e-6)


def test_nodes_of_a_draft_have_the_masks_of_their_paths() -> None:
    made, width = rules(), -(-VOCAB // 32) * 4
    tokens, parents = [FIRST, 4, FIRST + 3, FIRST + 1], [-1, 0, 1, -1]
    masks = made.masks(tokens, parents)
    paths = [[], [FIRST], [FIRST, 4], [FIRST, 4, FIRST + 3], [FIRST + 1]]
    assert [masks[at * width : (at + 1) * width] for at in range(5)] == [after(made, path).masks() for path in paths]
    assert made.fitting(tokens, parents) == [True] * 4
    assert made.fitting([4, FIRST, FIRST], [-1, 0, 1]) == [False] * 3
    assert made.fitting([FIRST, FIRST], [-1, 0]) == [True, False]


def test_blank_tokens_do_not_come_first() -> None:
    made = rules(suppressed=(), blank=(3, FIRST))
    logits = np.zeros(VOCAB, np.float32)
    logits[:FIRST] = 50  # so that text is more likely than all times
    first, later = ours(made, logits, []), ours(made, logits, [FIRST])
    assert first[FIRST] == -np.inf
    assert later[3] == 50


def test_rules_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ParamError, match="timestamps names token 60, but the model's ids end at 59"):
        params(blank=(VOCAB,)).check_vocab(VOCAB)
    with pytest.raises(ParamError, match="leave one out"):
        params().replace(structured_outputs=StructuredOutputs(regex="a"))
