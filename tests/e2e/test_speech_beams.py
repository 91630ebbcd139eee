"""Beam search with timestamps: against a reference that recomputes everything, in batches, and by the command."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from headrace import LLM
from headrace.audio.transcription import SpeechSettings
from headrace.cli.app import main
from headrace.data.frames import frames_of
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.decoding.beam import BeamSearch
from headrace.decoding.speech_beams import SpeechBeamSearch
from headrace.models.base import Model
from headrace.startup.speech import speech_model
from headrace.weights.loader import load_model
from tests.models.test_whisper import logits
from tests.models.zoo import MemorySource
from tests.tiny_whisper import EOT, frames, noise, oracle, with_likely_ends, write_folder, write_wav

PROMPT = [EOT + 1, EOT + 2, EOT + 6]
FIRST = EOT + 11
WIDTH, LENGTH = 5, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whisper"), likely_ends=True)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, backend="torch", dtype="float64", kv_dtype="float64") as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> Model:
    theirs = with_likely_ends(oracle().float()).double()
    return load_model(MemorySource("safetensors", theirs.state_dict(), theirs.config.to_dict()), torch.float64)


def params(llm: LLM, length: int = LENGTH, width: int = WIDTH) -> SamplingParams:
    beams = BeamSearchParams(beam_width=width, max_tokens=length, stop_token_ids=(EOT,))
    return beams.sampling().replace(logprobs_mode="masked", timestamps=speech_model(llm.opened)[1].rules(50))


def found(llm: LLM, windows: list[np.ndarray], given: SamplingParams) -> list[tuple[list[int], float]]:
    """Tokens and score of the best hypothesis of each window, run together."""
    requests = [llm.engine.add(PROMPT, given, source=frames_of(rows)) for rows in windows]
    made: dict[str, Any] = {}
    while llm.engine.busy:
        for delta in llm.engine.step():
            assert delta.error is None
            if delta.token_ids:
                made[delta.request_id] = delta.token_ids, delta.cumulative_logprob
    llm.engine.check()
    return [made[request.id] for request in requests]


def reference(llm: LLM, model: Model, rows: np.ndarray, length: int = LENGTH) -> tuple[list[int], float]:
    """openai-whisper's beam search by recomputing everything, written for clarity alone."""
    rules = params(llm).timestamps
    assert rules is not None
    config = SimpleNamespace(
        no_timestamps_token_id=FIRST - 1, eos_token_id=EOT, bos_token_id=EOT, max_initial_timestamp_index=rules.latest
    )
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))

    def chances(tokens: list[int]) -> torch.Tensor:
        row = logits(model, rows, [*PROMPT, *tokens])[-1].clone()
        row[list(rules.suppressed)] = -math.inf
        if not tokens:
            row[list(rules.blank)] = -math.inf
        result: torch.Tensor = processor(torch.tensor([[*PROMPT, *tokens]]), row[None])[0].log_softmax(-1)
        return result

    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(length):
        options = []
        for tokens, score in live:
            best = chances(tokens).topk(WIDTH + 1)
            options += [([*tokens, token], score + value) for value, token in zip(*map(torch.Tensor.tolist, best), strict=True)]
        options.sort(key=lambda option: -option[1])
        live = []
        for option in options:
            (ended if option[0][-1] == EOT else live).append(option)
            if len(live) == WIDTH:
                break
        if len(ended) >= WIDTH:
            break
    ended = [*ended, *live][:WIDTH] if len(ended) < WIDTH else ended[:WIDTH]
    return max(ended, key=lambda option: option[1] / sum(token != EOT for token in option[0]))


SEEDS = range(8)


@pytest.fixture(scope="module")
def expected(llm: LLM, model: Model) -> list[tuple[list[int], float]]:
    return [reference(llm, model, frames(seed=seed)) for seed in SEEDS]


@pytest.fixture(scope="module")
def windows() -> list[np.ndarray]:
    return [frames(seed=seed) for seed in SEEDS]


def tokens(outputs: list[tuple[list[int], float]]) -> list[list[int]]:
    return [[token for token in written if token != EOT] for written, _ in outputs]


def test_hypotheses_are_those_of_the_reference(
    llm: LLM, windows: list[np.ndarray], expected: list[tuple[list[int], float]]
) -> None:
    """Together in one batch; some end by a token, some by length."""
    outputs = found(llm, windows, params(llm))
    assert tokens(outputs) == tokens(expected)
    assert [score for _, score in outputs] == pytest.approx([score for _, score in expected], abs=1e-5)
    ends = {written[-1] == EOT for written, _ in expected}
    assert ends == {True, False}


def _ranked_by_sum(self: SpeechBeamSearch, seq: Any) -> float:
    return float(seq.decode.score)


def _first_ones(self: SpeechBeamSearch, request: Any, seq: Any, candidates: Any) -> Any:
    """Ended candidates take the places of those that go on."""
    return candidates[:WIDTH]


SLIPS: dict[str, Any] = {"_rank": _ranked_by_sum, "_keep": _first_ones, "done": BeamSearch.done}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_caught(
    llm: LLM,
    windows: list[np.ndarray],
    expected: list[tuple[list[int], float]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(SpeechBeamSearch, name, SLIPS[name])
    assert tokens(found(llm, windows, params(llm))) != tokens(expected)


def test_without_the_comparison_of_all_timestamps_the_text_is_another(
    llm: LLM, windows: list[np.ndarray], expected: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.ops.penalties.compare_mass", lambda z, firsts: z)
    assert tokens(found(llm, windows, params(llm))) != tokens(expected)


def test_hypotheses_are_the_same_in_every_company(folder: Path, windows: list[np.ndarray]) -> None:
    """On the core: alone, together, and after preemption."""
    with LLM(folder, backend="native", quantize="int8") as llm:
        alone = [found(llm, [rows], params(llm, 60))[0] for rows in windows]
        assert found(llm, windows, params(llm, 60)) == alone
        block = llm.memory_plan.kv_bytes // llm.memory_plan.num_blocks
    with LLM(folder, backend="native", quantize="int8", kv_cache_memory=34 * block) as tight:
        requests = [tight.engine.add(PROMPT, params(tight, 60), source=frames_of(rows)) for rows in windows]
        made = {}
        while tight.engine.busy:
            for delta in tight.engine.step():
                if delta.token_ids:
                    made[delta.request_id] = delta.token_ids, delta.cumulative_logprob
        assert [made[request.id] for request in requests] == alone
        assert sum(request.metrics.preemptions for request in requests)


def test_files_are_transcribed_with_beams(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"language": "en", "temperatures": (0.0,), "vad": False}
    with LLM(folder) as llm:
        greedy, beams = (llm.transcribe(noise(1.3), **given, beams=count) for count in (1, 5))
        assert [one.text for one in beams.segments] != [one.text for one in greedy.segments]
        assert beams.segments[0].avg_logprob > greedy.segments[0].avg_logprob
        warm = given | {"temperatures": (0.7,)}
        assert llm.transcribe(noise(0.6), **warm, beams=5) == llm.transcribe(noise(0.6), **warm)
    command = ["transcribe", str(folder), str(write_wav(tmp_path / "a.wav", noise(1.3))), "--language", "en", "--no-vad"]
    assert main([*command, "--temperature", "0", "--beams", "5", "--format", "json"]) == 0
    made = json.loads(capsys.readouterr().out)["segments"]
    assert [one["tokens"] for one in made] == [one.tokens for one in beams.segments]
    with pytest.raises(ValueError, match="beams must be between 1"):
        SpeechSettings(beams=17)
