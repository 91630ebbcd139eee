"""Sampling settings in force without given ones: values, origins, and the line that states them."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run as run_module
from headrace.data.params import BeamSearchParams, ParamError, SamplingParams
from headrace.llm import LLM
from headrace.startup.opening import open_files
from headrace.weights import catalog, store
from headrace.weights.defaults import FALLBACK, Setting, family_of, gguf_settings, own_settings, stated, summary, values
from tests.cli_shell import Shell
from tests.places import default_model
from tests.tiny_files import write_tiny_gguf

NONE: dict[str, Any] = {"max_tokens": None}
SAID = "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 (default)"


def enter(shell: Shell, path: Path, **sampling: float) -> None:
    """A catalog of the user's own, with the bytes of this file in it under the name "known"."""
    entry = {"name": "known", "file": "known.gguf", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    lines = [f'{name} = "{value}"' for name, value in entry.items()]
    lines += [f"size = {path.stat().st_size}", f"sampling = {{ {', '.join(f'{n} = {v}' for n, v in sampling.items())} }}"]
    folder = shell.folder / "config" / "headrace"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.toml").write_text("\n".join(["[[model]]", *lines, "[[model.source]]", 'hub = "a/b"', ""]))


def used_by_run(shell: Shell, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[SamplingParams, str]:
    """What `run` draws by, and the first line that it says."""
    used: list[SamplingParams] = []
    monkeypatch.setattr(run_module, "_answer", lambda llm, prompt, params, *_: used.append(params) or 0)
    code, _, err = shell("run", *arguments)
    assert code == 0, err
    return used[0], err.splitlines()[0]


def test_a_model_that_states_nothing_is_run_by_the_documented_defaults(
    shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FALLBACK == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    params, first = used_by_run(shell, monkeypatch, tiny_gguf, "hi")
    assert params == SamplingParams(**NONE, **FALLBACK)
    assert first == f"{tiny_gguf}: {SAID}"


def test_neutral_defaults_leave_out_the_settings_of_the_model(
    shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(shell, tiny_gguf, temperature=0.3, repetition_penalty=1.2)
    params, first = used_by_run(shell, monkeypatch, tiny_gguf, "hi")
    assert (params.temperature, params.repetition_penalty) == (0.3, 1.2)  # the control
    params, first = used_by_run(shell, monkeypatch, tiny_gguf, "hi", "--sampling-defaults", "neutral")
    assert params == SamplingParams(**NONE)
    assert first == f"{tiny_gguf}: nothing is filtered"
    params, _ = used_by_run(shell, monkeypatch, tiny_gguf, "hi", "--sampling-defaults", "neutral", "-t", "0.5")
    assert params == SamplingParams(**NONE, temperature=0.5)


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("-t 0", {**FALLBACK, "temperature": 0}, "temperature 0 (given)"),
    (
        "-t 1 --top-k 0",
        {**FALLBACK, "temperature": 1, "top_k": 0},
        "temperature 1, top_k 0 (given), top_p 0.95, min_p 0.05 (default)",
    ),
    ("--preset creative", {"temperature": 1.1, "min_p": 0.05}, "temperature 1.1, min_p 0.05 (preset: creative)"),
    ("--mirostat-tau 5", {"temperature": 0.8, "mirostat_tau": 5}, "mirostat_tau 5 (given), temperature 0.8 (default)"),
    ("--penalty-alpha 0.6 --top-k 4", {"penalty_alpha": 0.6, "top_k": 4}, "top_k 4, penalty_alpha 0.6 (given)"),
]


@pytest.mark.parametrize(("flags", "expected", "said"), CASES)
def test_given_settings_are_used_and_printed(
    shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: dict[str, Any], said: str
) -> None:
    params, first = used_by_run(shell, monkeypatch, tiny_gguf, "hi", *flags.split())
    assert params == SamplingParams(**NONE, **expected)
    assert first == f"{tiny_gguf}: {said}"


def test_beams_ignore_sampling_settings(shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params, first = used_by_run(shell, monkeypatch, tiny_gguf, "hi", "--beams", "3")
    assert params.beam == BeamSearchParams(beam_width=3)
    assert (params.temperature, params.top_k) == (0, 0)
    assert first == f"{tiny_gguf}: beam_width 3 (given)"


def test_a_catalog_file_is_identified_by_its_hash(shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(shell, tiny_gguf, temperature=0.25, top_p=0.9)
    renamed = shell.folder / "my own words.gguf"
    shutil.copy(tiny_gguf, renamed)
    expected = SamplingParams(temperature=0.25, top_p=0.9, **NONE)
    for path in (tiny_gguf, renamed):
        params, first = used_by_run(shell, monkeypatch, path, "hi")
        assert (params, first) == (expected, f"{path}: temperature 0.25, top_p 0.9 (catalog: known)")
    data = bytearray(renamed.read_bytes())
    data[-1] ^= 1
    renamed.write_bytes(data)
    params, first = used_by_run(shell, monkeypatch, renamed, "hi")
    assert params == SamplingParams(**NONE, **FALLBACK), "as large, and other bytes"


def test_a_file_is_hashed_once_and_again_when_it_changed(
    shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(shell, tiny_gguf, temperature=0.25)
    path = shell.folder / "copy.gguf"
    shutil.copy(tiny_gguf, path)
    hashed: list[int] = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: hashed.append(1) or real(file, kind))
    entries = catalog.load()
    assert [store.catalog_entry(path, entries) == entries["known"] for _ in range(3)] == [True] * 3
    assert len(hashed) == 1
    os.utime(path, ns=(1, 1))
    assert store.catalog_entry(path, entries) == entries["known"]
    assert len(hashed) == 2
    other = write_tiny_gguf(shell.folder / "other.gguf", context=511, control="<x>")
    if other.stat().st_size != path.stat().st_size:
        assert store.catalog_entry(other, entries) is None
        assert len(hashed) == 2, "a file of another size is not read"
    (shell.folder / "home" / store.SEEN).write_text("[1, 2]")
    assert store.catalog_entry(path, entries) == entries["known"], "what cannot be read is nothing but time"


def test_files_state_settings_of_their_own(tmp_path: Path) -> None:
    assert own_settings({"temperature": 0.6, "top_p": None, "eos_token_id": 3}) == {"temperature": 0.6}
    assert own_settings({"do_sample": False, "temperature": 0.6}) == {"temperature": 0.0}
    assert own_settings({"eos_token_id": 3}) == {}
    metadata = {"general.sampling.temp": 0.6000000238418579, "general.sampling.top_k": 20, "general.sampling.min_p": "x"}
    assert gguf_settings(metadata) == {"temperature": 0.6, "top_k": 20}


FAMILIES = [
    ("qwen2", "Qwen2.5 Coder 0.5B Instruct AWQ", "Qwen2.5"),
    ("qwen2", "qwen2_5-7b-instruct.gguf", "Qwen2.5"),
    ("qwen2", "DeepSeek R1 Distill Qwen 1.5B", None),
    ("llama", "SmolLM2-1.7B-Instruct", "SmolLM2"),
    ("llama", "Meta Llama 3.1 8B Instruct", "Llama-3"),
    ("llama", "Llama-2-7b", None),
    ("mistral", "SmolLM2", None),
    ("gemma3_text", "gemma-3-4b-it", "gemma-3"),
]


@pytest.mark.parametrize(("architecture", "name", "expected"), FAMILIES)
def test_families_that_the_catalog_knows(architecture: str, name: str, expected: str | None) -> None:
    found = family_of(catalog.families(), architecture, [name])
    assert (found.name if found else None) == expected


def test_a_file_of_a_family_takes_its_settings_and_generate_does_not(
    shell: Shell, tiny_gguf: Path, tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` answers as documented: by what is known of the model, and never by a guess."""
    path = shell.folder / "SmolLM2-tiny.gguf"
    shutil.copy(tiny_gguf, path)
    params, first = used_by_run(shell, monkeypatch, path, "hi")
    assert params == SamplingParams(temperature=0.2, top_p=0.9, **NONE)
    assert first.endswith("temperature 0.2, top_p 0.9 (family: SmolLM2)")
    assert stated(open_files(path).defaults) == {}
    source, target = shell.folder / "in.jsonl", shell.folder / "out.jsonl"
    source.write_text('{"prompt": "The mill", "max_tokens": 12, "seed": 5}\n')
    assert shell("generate", path, "-i", source, "-o", target, "--dtype", "float64")[0] == 0
    neutral, *_ = tiny_llm.generate("The mill", SamplingParams(max_tokens=12, seed=5))
    assert neutral.outputs[0].text in target.read_text()
    other, *_ = tiny_llm.generate("The mill", SamplingParams(max_tokens=12, seed=5, temperature=0.2, top_p=0.9))
    assert other.outputs[0].text != neutral.outputs[0].text


def test_chat_in_python_is_as_long_and_as_drawn_as_on_the_command_line(tmp_path: Path) -> None:
    tiny_llm = LLM(write_tiny_gguf(tmp_path / "tiny.gguf", context=96), dtype="float64", threads=1)
    talk = [{"role": "user", "content": "hi"}]
    (plain,) = tiny_llm.chat(talk, seed=3)
    (expected,) = tiny_llm.generate(tiny_llm.render(talk), SamplingParams(**FALLBACK, **NONE, seed=3))
    assert plain.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(plain.outputs[0].token_ids) > 16
    assert tiny_llm.default_params() == SamplingParams(**FALLBACK, **NONE)
    (short,) = tiny_llm.generate(tiny_llm.render(talk))
    assert len(short.outputs[0].token_ids) == 16, "generate stays as documented"


def test_parameters_in_all_their_forms(tiny_llm: LLM) -> None:
    (expected,) = tiny_llm.generate("The mill", SamplingParams(temperature=0, max_tokens=5))
    params = SamplingParams(temperature=0, max_tokens=9)
    for found in (
        tiny_llm.generate("The mill", temperature=0, max_tokens=5),
        tiny_llm.generate("The mill", sampling_params=params.replace(max_tokens=5)),
        tiny_llm.generate("The mill", params, max_tokens=5),
        tiny_llm.generate(["The mill"], [params], max_tokens=5),
    ):
        assert found[0].outputs[0].token_ids == expected.outputs[0].token_ids
    assert "".join(delta.text for delta in tiny_llm.stream("The mill", temperature=0, max_tokens=5)) == expected.outputs[0].text
    (beams,) = tiny_llm.generate("The mill", beam_width=2, max_tokens=4)
    (same,) = tiny_llm.generate("The mill", BeamSearchParams(beam_width=2, max_tokens=4))
    assert beams.outputs[0].token_ids == same.outputs[0].token_ids
    with pytest.raises(TypeError, match="there is no setting 'max_token'; did you mean max_tokens"):
        tiny_llm.generate("The mill", max_token=5)
    with pytest.raises(
        TypeError, match=r"'temprature' is neither a setting nor a variable of the template; did you mean temperature"
    ):
        tiny_llm.chat("The mill", temprature=0.5)
    with pytest.raises(TypeError, match="two names of one argument"):
        tiny_llm.generate("The mill", params, sampling_params=params)
    with pytest.raises(ParamError, match="top_p"):
        tiny_llm.chat("The mill", top_p=2)


def test_a_text_is_a_user_message(tiny_llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    greedy = {"temperature": 0, "max_tokens": 4}
    (expected,) = tiny_llm.chat(talk, **greedy)
    for asked in ("hello", ["hello"], [talk]):
        (found,) = tiny_llm.chat(asked, **greedy)
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(tiny_llm.chat(["hello", talk], **greedy)) == 2


def test_a_summary_groups_settings_by_origin() -> None:
    found = {"temperature": Setting(0.5, "name"), "top_p": Setting(0.9, "catalog", "x"), "top_k": Setting(3, "model")}
    assert summary(found) == "temperature 0.5 (name), top_p 0.9 (catalog: x), top_k 3 (the model's own)"
    assert summary({}) == "nothing is filtered"


@pytest.mark.weights
def test_the_default_model_by_name_by_path_and_renamed(tmp_path: Path) -> None:
    path = default_model()
    renamed = tmp_path / "mine.gguf"
    renamed.symlink_to(path)
    entry = catalog.load()[catalog.DEFAULT]
    for name in (path, renamed):
        assert values(open_files(name).defaults) == entry.sampling
