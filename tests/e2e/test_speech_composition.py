"""Windows of sound with other features: penalties, beams, K/V in integers, drafts by suffixes, a choice; and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM
from headrace.data.explicit import params_of
from headrace.data.frames import frames_of
from headrace.data.params import ParamError
from headrace.startup.speech import speech_model
from tests.e2e.test_composition import PROMPT, REPEATED, mel_rows, normalised_together, sounds
from tests.tiny_whisper import TEXT, write_folder

CHOICE = ["river", "mill", "a wheel"]
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "log-probabilities and a seed": {"temperature": 0.9, "seed": 7, "logprobs": 3},
    "eight beams": {"beam_width": 8},
    "a length rule": {"beam_width": 3, "length_rule": "hf", "length_penalty": 0.6, "ignore_eos": False},
}

BLOCKS = {"eight beams": 28}  # of a pool in which requests are preempted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whisper"))


def opened(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"backend": "native", "device": "cpu", "threads": 1, "speculate": None, **settings})


def run(llm: LLM, windows: list[np.ndarray], fields: dict[str, Any], prompt: list[int] = PROMPT) -> tuple[list[Any], int]:
    """Tokens, log-probabilities and ranks of beams of each window's outputs, run together; how many tokens were drafted."""
    params = params_of({"max_tokens": 40, "ignore_eos": True, **fields})
    requests = [llm.engine.add(prompt, params, source=frames_of(rows)) for rows in windows]
    made: dict[str, dict[int, list[Any]]] = {request.id: {} for request in requests}
    while llm.engine.busy:
        for delta in llm.engine.step():
            assert delta.error is None, delta.error
            bits = [(one.top_ids, [value.hex() for value in one.top_logprobs]) for one in delta.logprobs]
            rank = [] if delta.cumulative_logprob is None else [delta.cumulative_logprob.hex()]
            made[delta.request_id].setdefault(delta.index, []).extend([*delta.token_ids, *bits, *rank])
    llm.engine.check()
    return list(made.values()), sum(request.metrics.drafted for request in requests)


def texts(llm: LLM, windows: list[np.ndarray], fields: dict[str, Any], prompt: list[int] = PROMPT) -> list[Any]:
    return run(llm, windows, fields, prompt)[0]


def preemptions(llm: LLM) -> int:
    return int(llm.engine.scheduler.preemptions)


@pytest.mark.parametrize("name", FEATURES)
def test_features_give_a_window_the_same_text_in_every_company(folder: Path, name: str) -> None:
    """Alone, in a batch of eight and after preemption. Control: rows that a batch normalises."""
    windows, fields = mel_rows(sounds()), FEATURES[name]
    with opened(folder) as llm:
        alone = [texts(llm, [rows], fields)[0] for rows in windows]
        assert len({str(one) for one in alone}) > 4
        assert texts(llm, windows, fields) == alone
        assert texts(llm, normalised_together(sounds()), fields) != alone
        block = llm.memory_plan.kv_bytes // llm.memory_plan.num_blocks
    with opened(folder, kv_cache_memory=BLOCKS.get(name, 24) * block) as tight:
        assert texts(tight, windows, fields) == alone
        assert preemptions(tight)


def test_a_choice_without_timestamps(folder: Path) -> None:
    """Voice commands, alone and in a batch. Control: without the choice the texts are others."""
    windows, fields = mel_rows(sounds()), {"temperature": 0.0, "structured_outputs": {"choice": CHOICE}, "ignore_eos": False}
    with opened(folder) as llm:

        def words(outputs: list[Any]) -> set[str]:
            return {llm.tokenizer.decode([token for token in one[0] if token < TEXT]) for one in outputs}

        alone = [texts(llm, [rows], fields)[0] for rows in windows]
        assert texts(llm, windows, fields) == alone
        assert words(alone) <= set(CHOICE)
        assert not words(texts(llm, windows, {"temperature": 0.0})) & set(CHOICE)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_k_and_v_of_sound_in_integers(folder: Path, kv_dtype: str) -> None:
    """The same bits alone, from the cache and in a batch; other log-probabilities than with K and V in bfloat16."""
    windows, fields = mel_rows(sounds()), {"temperature": 0.0, "logprobs": 3}
    with opened(folder) as llm:
        wide = texts(llm, windows, fields)
    with opened(folder, kv_dtype=kv_dtype) as llm:
        alone = [texts(llm, [rows], fields)[0] for rows in windows]
        assert texts(llm, windows, fields) == alone
        assert alone != wide
    with opened(folder, kv_dtype=kv_dtype, enable_prefix_caching=False) as llm:
        assert texts(llm, windows, fields) == alone


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=str)
@pytest.mark.parametrize("timed", [False, True])
def test_drafts_by_suffixes_change_no_token(folder: Path, fields: dict[str, Any], timed: bool) -> None:
    windows = mel_rows(sounds())[:3]
    with opened(folder) as llm:
        fields = fields | ({"timestamps": speech_model(llm.opened)[1].rules(50)} if timed else {})
        plain = texts(llm, windows, fields, REPEATED)
    with opened(folder, speculate="suffix", draft_tokens=4) as llm:
        made, drafted = run(llm, windows, fields, REPEATED)
    assert made == plain
    assert drafted


def test_a_choice_under_timestamps_is_refused(folder: Path) -> None:
    with opened(folder) as llm:
        rules = speech_model(llm.opened)[1].rules(50)
        with pytest.raises(ParamError, match="two constraints of one answer; leave one out"):
            params_of({"structured_outputs": {"choice": CHOICE}, "timestamps": rules})


def test_sound_has_no_scores_and_embeddings(folder: Path) -> None:
    with opened(folder) as llm:
        for work in (llm.score, llm.embed):
            with pytest.raises(ValueError, match="transcribes sound and reads no text"):
                work("The mill")
