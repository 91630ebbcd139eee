"""The table of methods and features in the docs agrees with the engine on both back ends; windows of sound in every method."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import LLM, SamplingParams, core
from headrace.audio.mel import LogMel
from headrace.data.explicit import params_of
from headrace.data.frames import frames_of
from headrace.engine.admission import AdmissionError
from headrace.startup.speech import speech_model
from tests.composition import METHODS, opened, refusal, table
from tests.pages import stale, written
from tests.tiny_whisper import EOT, noise, write_folder


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_table_is_not_stale(backend: str, tmp_path: Path) -> None:
    decoders, sources = opened(tmp_path, backend=backend, **({"dtype": "float64"} if backend == "torch" else {}))
    found = table(decoders, sources)
    assert found == written("composition"), stale("composition")
    assert "* `logprobs`, `prompt_logprobs`, `logit_bias`" in found
    assert "beam search" in refusal(decoders.plain, {"beam_width": 2}, {"top_p": 0.5})
    decoders.close()
    sources.close()


PROMPT = [EOT + 1, EOT + 2, EOT + 6]
# A text that drafts repeat.
REPEATED = [EOT + 7, *b"the mill and the mill and the mill", EOT + 1, EOT + 2, EOT + 6]
DRAFTED = ("greedy", "sampling", "n > 1", "best_of")
REFUSED = {  # methods that a speech model has no parts for
    "blocks filled in": "needs a mask token",
    "early exit": "needs exits",
    "early exit, propagated": "needs exits",
}
WINDOWS = [name for name in METHODS if name not in REFUSED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whisper"))


def speech(folder: Path, name: str, **settings: Any) -> LLM:
    """A speech model with a method's second model, which is itself."""
    fields = METHODS[name]
    more = {"amateur": folder} if "contrastive_beta" in fields or "defer_rule" in fields else {}
    more |= {"cascade": folder} if "cascade_threshold" in fields else {}
    return LLM(folder, **{"backend": "native", "speculate": None, "threads": 1, **more, **settings})


def params(llm: LLM, name: str, timed: bool) -> SamplingParams:
    rules = {"timestamps": speech_model(llm.opened)[1].rules(50)} if timed else {}
    return params_of({"max_tokens": 40, "ignore_eos": True, **METHODS[name]}).replace(**rules)


def texts(
    llm: LLM, name: str, windows: list[np.ndarray], timed: bool, prompt: list[int] = PROMPT
) -> tuple[list[Any], int, int]:
    """Outputs of each window, run together; how often they were preempted, and how many tokens were drafted."""
    requests = [llm.engine.add(prompt, params(llm, name, timed), source=frames_of(rows)) for rows in windows]
    made: dict[str, list[Any]] = {request.id: [] for request in requests}
    while llm.engine.busy:
        for delta in llm.engine.step():
            assert delta.error is None, delta.error
            made[delta.request_id].append((delta.index, tuple(delta.token_ids)))
    llm.engine.check()
    joined = [[sum((ids for index, ids in parts if index == at), ()) for at in range(9)] for parts in made.values()]
    metrics = [request.metrics for request in requests]
    return joined, sum(one.preemptions for one in metrics), sum(one.drafted for one in metrics)


def sounds() -> list[np.ndarray]:
    """Eight sounds of 1 s of different loudness."""
    return [noise(1.0, seed) * 10.0 ** (-seed / 2) for seed in range(8)]


def mel_rows(sounds: list[np.ndarray]) -> list[np.ndarray]:
    return [LogMel(sound, 80).window(0, 100) for sound in sounds]


def normalised_together(sounds: list[np.ndarray]) -> list[np.ndarray]:
    """A control: rows that keep what is 8 decades below the loudest value of all sounds."""
    mels = [LogMel(sound, 80) for sound in sounds]
    loudest = max(mel.loudest for mel in mels)
    for mel in mels:
        mel.loudest = loudest
    return [mel.window(0, 100) for mel in mels]


@pytest.mark.parametrize(("name", "timed"), [*((name, False) for name in WINDOWS), *((name, True) for name in DRAFTED)])
def test_a_window_of_sound_has_the_same_text_in_every_company(folder: Path, name: str, timed: bool) -> None:
    """Alone, in a batch of eight, after preemption, from the cache and with drafts. Control: rows that a batch normalises."""
    windows = mel_rows(sounds())
    with speech(folder, name) as llm:
        alone = [texts(llm, name, [rows], timed)[0][0] for rows in windows]
        assert all(any(one) for one in alone)
        assert len({str(one) for one in alone}) > 4
        assert texts(llm, name, windows, timed)[:2] == (alone, 0)  # from the cache
        block = llm.memory_plan.kv_bytes // llm.memory_plan.num_blocks
        repeated = texts(llm, name, windows[:3], timed, REPEATED)[0]
        assert texts(llm, name, normalised_together(sounds()), timed)[0] != alone
    with speech(folder, name, enable_prefix_caching=False) as llm:
        assert texts(llm, name, windows, timed)[0] == alone
    with speech(folder, name, kv_cache_memory=24 * block) as tight:
        found, preemptions, _ = texts(tight, name, windows, timed)
        assert found == alone
        assert preemptions
    if name in DRAFTED:
        with speech(folder, name, speculate="ngram", draft_tokens=4) as drafting:
            found, _, drafted = texts(drafting, name, windows[:3], timed, REPEATED)
            assert found == repeated
            assert drafted


@pytest.mark.parametrize("name", REFUSED)
def test_methods_without_their_parts_are_refused_for_a_window(folder: Path, name: str) -> None:
    with speech(folder, name) as llm, pytest.raises(AdmissionError, match=REFUSED[name]):
        texts(llm, name, mel_rows(sounds()[:1]), timed=False)


PROGRAM = """
import sys
from tests.e2e.test_composition import fingerprints
print("\\n".join(map(str, fingerprints(sys.argv[1]))))
"""


def fingerprints(folder: str) -> list[list[Any]]:
    """For each format, tokens and bits of the log-probabilities of windows alone, and of the same in a batch."""
    windows, lines = mel_rows(sounds()), []
    given = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=5)
    for quantize in (None, "int8", "int4"):
        with LLM(folder, backend="native", threads=1, quantize=quantize, enable_prefix_caching=False) as llm:
            for groups in ([[rows] for rows in windows[:2]], [windows]):
                parts: dict[str, list[Any]] = {}
                for group in groups:
                    ids = [llm.engine.add(PROMPT, given, source=frames_of(rows)).id for rows in group][:2]
                    while llm.engine.busy:
                        for delta in llm.engine.step():
                            bits = [(one.top_ids, [value.hex() for value in one.top_logprobs]) for one in delta.logprobs]
                            if delta.request_id in ids:
                                parts.setdefault(delta.request_id, []).extend(bits)
                lines.append([parts[key] for key in sorted(parts)])
    return lines


def test_a_window_has_the_same_bits_on_every_instruction_set(folder: Path) -> None:
    """Alone and in a batch on each, and on all but those whose attention rounds in its own way (tests/native/bits.txt)."""
    found = {}
    for isa in core.module().cpu_info()["isas"]:
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder)]
        run = subprocess.run(command, env={**os.environ, "HEADRACE_ISA": isa}, check=False, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        lines = run.stdout.splitlines()
        assert len(set(lines)) == 3
        assert lines[::2] == lines[1::2], isa
        found[isa] = lines
    common = [lines for isa, lines in found.items() if isa not in ("amx", "avx512", "plain")]
    assert common == common[:1] * len(common)
