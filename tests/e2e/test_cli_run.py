"""The command run: prompts, options, and one-line errors."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import inputs
from headrace.cli import run as run_module
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM
from headrace.weights import fetch
from headrace.weights.defaults import FALLBACK
from tests.cli_shell import SECONDS, Shell
from tests.hub_server import HubServer, sha256
from tests.places import model_file
from tests.tiny_files import write_tiny_gguf

EXACT = ("--dtype", "float64")


def greedy(llm: LLM, prompt: str | list[int], count: int) -> str:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=count))
    return output.outputs[0].text


def test_answer_on_stdout_figures_on_stderr(shell: Shell, tiny_gguf: Path, tiny_llm: LLM) -> None:
    expected = greedy(tiny_llm, tiny_llm.render([{"role": "user", "content": "水轮怎么转？"}]), 20)
    code, out, err = shell("run", tiny_gguf, "水轮怎么转？", "-t", "0", "-m", "20", *EXACT)
    assert (code, out) == (0, expected + "\n")
    _, begun, said, figures = err.splitlines()
    assert begun == f"loading {tiny_gguf.name}"
    assert "float64 on cpu (torch, near-tie-exact)" in said
    assert "KV cache" in said
    assert "prompt tokens, TTFT" in figures
    assert "20 tokens at" in figures
    assert "\x1b" not in err, "plain where there is no terminal"
    assert shell("run", "-q", tiny_gguf, "水轮怎么转？", "-t", "0", "-m", "20", *EXACT) == (0, out, "")


def test_contrastive_search_runs_to_the_end_of_the_context(shell: Shell, tmp_path: Path) -> None:
    """The pool of `run` holds one full context and the candidates that the last step verifies."""
    model = write_tiny_gguf(tmp_path / "short.gguf", context=64)
    arguments = ("run", "-q", "--raw", model, "The water", "--penalty-alpha", "0.6", "--top-k", "4", "--ignore-eos", *EXACT)
    code, out, _ = shell(*arguments)
    _, shorter, _ = shell(*arguments, "-m", "40")
    assert (code, out.startswith(shorter.rstrip("\n")), len(out) > len(shorter)) == (0, True, True)


def test_raw_continues_the_text_and_system_goes_first(shell: Shell, tiny_gguf: Path, tiny_llm: LLM) -> None:
    code, out, _ = shell("run", "--raw", tiny_gguf, "The water", "-t", "0", "-m", "9", *EXACT)
    assert (code, out) == (0, greedy(tiny_llm, "The water", 9) + "\n")
    roles = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The water"}]
    code, out, _ = shell("run", "--system", "Be brief.", tiny_gguf, "The water", "-t", "0", "-m", "9", *EXACT)
    assert (code, out) == (0, greedy(tiny_llm, tiny_llm.render(roles), 9) + "\n")


def test_argument_files_and_pipe_are_joined(
    shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("第一\n")
    (tmp_path / "two.txt").write_text("two\n\n")
    asked: list[str] = []
    monkeypatch.setattr(run_module, "_answer", lambda llm, prompt, params, *_: asked.append(prompt) or 0)
    files = ("--file", tmp_path / "one.txt", "-f", tmp_path / "two.txt")
    assert shell("run", "--raw", tiny_gguf, "Read:", *files, stdin="piped\n")[0] == 0
    assert shell("run", "--raw", tiny_gguf, stdin="  piped \n\n")[0] == 0
    assert asked == ["Read:\n\n第一\n\ntwo\n\n\npiped", "  piped \n"], "one newline at the end of a text is its file's"


def test_a_silent_pipe_is_reported(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    process = shell.start("run", "none.gguf", before="from headrace.cli import inputs; inputs.WAIT = 0.01", stdin=reader)
    assert process.stderr is not None
    assert "reading standard input" in process.stderr.readline()
    os.close(writer)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "the prompt is empty" in err
    os.close(reader)
    assert inputs.WAIT > 1


FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("--temperature 0.5 --top-k 7 --top-p 0.8 --min-p 0.1", {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1}),
    ("-t 2 --typical 0.9", {"temperature": 2.0, "typical_p": 0.9}),
    ("--typical-p 0.8", {"typical_p": 0.8}),
    ("--repetition-penalty 1.2 --presence-penalty 0.5", {"repetition_penalty": 1.2, "presence_penalty": 0.5}),
    ("--frequency-penalty -0.5 --no-repeat-ngram 3", {"frequency_penalty": -0.5, "no_repeat_ngram": 3}),
    ("--logit-bias 5=-2.5 --logit-bias 6=1", {"logit_bias": {5: -2.5, 6: 1.0}}),
    ("--min-tokens 2 --max-tokens 9 --ignore-eos", {"min_tokens": 2, "max_tokens": 9, "ignore_eos": True}),
    ("-m 4 --stop 。 --stop END", {"max_tokens": 4, "stop": ("。", "END")}),
    ("--stop-token-id 4 --stop-token-id 5 --seed 3 -n 2", {"stop_token_ids": (4, 5), "seed": 3, "n": 2}),
    ("--preset precise", {"temperature": 0.0}),
    ("--preset balanced --top-p 0.5", {"temperature": 0.7, "top_p": 0.5}),
    ("--preset creative --seed 1", {"temperature": 1.1, "min_p": 0.05, "seed": 1}),
    ("--logprobs 2 --json", {"logprobs": 2}),
    (
        "--top-n-sigma 1 --xtc-probability 0.5 --xtc-threshold 0.2",
        {"top_n_sigma": 1, "xtc_probability": 0.5, "xtc_threshold": 0.2},
    ),
    ("--mirostat-tau 5 --mirostat-eta 0.2", {"mirostat_tau": 5, "mirostat_eta": 0.2}),
    (
        "--dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3",
        {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3},
    ),
    ("--dry-multiplier 1 --dry-range 9", {"dry_multiplier": 1, "dry_range": 9}),
    ("--best-of 5 -n 2", {"best_of": 5, "n": 2}),
    ("", {}),
]


@pytest.mark.parametrize(("flags", "expected"), FLAGS)
def test_sampling_flags(
    shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: dict[str, Any]
) -> None:
    used: list[SamplingParams] = []
    monkeypatch.setattr(run_module, "_answer", lambda llm, prompt, params, *_: used.append(params) or 0)
    assert shell("run", "--raw", tiny_gguf, "hi", *flags.split())[0] == 0
    own = {} if "--preset" in flags else {"temperature": 0.8} if "--mirostat" in flags else FALLBACK
    assert used == [SamplingParams(**{"max_tokens": None, **own, **expected})]


def test_beam_flags(shell: Shell, tiny_gguf: Path, tiny_llm: LLM) -> None:
    flags = "--beams 4 -n 2 -m 6 --beam-groups 2 --diversity-penalty 0.5 --length-penalty 0.5 --early-stopping never --json"
    code, out, _ = shell("run", "--raw", tiny_gguf, "The mill", *flags.split(), *EXACT)
    wanted = BeamSearchParams(
        beam_width=4, n=2, max_tokens=6, groups=2, diversity_penalty=0.5, length_penalty=0.5, early_stopping="never"
    )
    (expected,) = tiny_llm.generate("The mill", wanted)
    found = json.loads(out)["outputs"]
    assert code == 0
    assert [one["text"] for one in found] == [one.text for one in expected.outputs]
    assert [one["score"] for one in found] == [one.score for one in expected.outputs]
    code, _, err = shell("run", "--raw", tiny_gguf, "The mill", "--beams", "4", "-t", "0.5", *EXACT)
    assert (code, "temperature does not go with beam search" in err) == (2, True)
    code, _, err = shell("run", "--raw", tiny_gguf, "The mill", "--length-penalty", "0.5", *EXACT)
    assert (code, "--length-penalty goes with --beam-width" in err) == (2, True)


def test_a_dry_breaker_is_the_last_token_of_a_text(
    shell: Shell, tiny_gguf: Path, tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[SamplingParams] = []
    monkeypatch.setattr(run_module, "_answer", lambda llm, prompt, params, *_: used.append(params) or 0)
    assert shell("run", "--raw", tiny_gguf, "hi", "--dry-multiplier", "1", "--dry-breaker", "river")[0] == 0
    assert tiny_llm.tokenizer.encode("a river", add_special=False)[-1] in used[0].dry_breakers


def test_a_bad_word_is_never_generated(shell: Shell, tiny_gguf: Path) -> None:
    before = shell("run", tiny_gguf, "hi", "-t", "0", "-m", "12", "-q", *EXACT)[1]
    word = next(word for word in before.split()[1:] if word.isalpha())
    after = shell("run", tiny_gguf, "hi", "-t", "0", "-m", "12", "-q", "--bad-word", word, *EXACT)[1]
    assert f" {word}" in before
    assert f" {word}" not in after


def test_json(shell: Shell, tiny_gguf: Path, tiny_llm: LLM) -> None:
    code, out, _ = shell("run", tiny_gguf, "你好", "--json", "--logprobs", "1", "-n", "2", "-m", "5", "--seed", "1", *EXACT)
    found = json.loads(out)
    prompt = tiny_llm.render([{"role": "user", "content": "你好"}])
    (expected,) = tiny_llm.generate(prompt, tiny_llm.default_params(n=2, max_tokens=5, seed=1))
    assert code == 0
    assert [one["text"] for one in found["outputs"]] == [one.text for one in expected.outputs]
    assert found["usage"] == {
        "prompt_tokens": len(prompt),
        "cached_tokens": 0,
        "completion_tokens": 10,
        "total_tokens": len(prompt) + 10,
    }
    assert (found["finish_reason"], found["error"]) == ("length", None)
    assert found["speed"]["ttft_s"] > 0
    entries = found["outputs"][1]["logprobs"]
    assert [entry["token"] for entry in entries] == expected.outputs[1].token_ids
    assert "".join(entry["text"] for entry in entries) == expected.outputs[1].text
    assert all(entry["logprob"] <= entry["top"][0]["logprob"] <= 0 for entry in entries)


def test_several_answers_and_a_stop_string(shell: Shell, tiny_gguf: Path) -> None:
    code, out, _ = shell("run", tiny_gguf, "hi", "-n", "2", "-m", "5", "--seed", "1", "-q", *EXACT)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("[")] == ["[1/2]", "[2/2]"]
    whole = shell("run", tiny_gguf, "hi", "-t", "0", "-m", "30", "-q", *EXACT)[1]
    stop = whole[10:13]
    cut = shell("run", tiny_gguf, "hi", "-t", "0", "-m", "30", "-q", "--stop", stop, *EXACT)[1]
    assert cut == whole[: whole.index(stop)] + "\n"


CATALOG = """
[[model]]
name = "tiny"
licence = "MIT"
file = "tiny.gguf"
sha256 = "{sha}"
size = {size}
sampling = {{ temperature = 0.0, max_tokens = 6 }}
chat = {{ system = "Be brief." }}
[[model.source]]
hub = "maker/tiny"
"""


def test_a_missing_model_is_pulled_and_the_catalog_sets_the_sampling(
    shell: Shell, tiny_gguf: Path, tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = tiny_gguf.read_bytes()
    folder = shell.folder / "config" / "headrace"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text(CATALOG.format(sha=sha256(body), size=len(body)))
    roles = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    expected = greedy(tiny_llm, tiny_llm.render(roles), 6)
    with HubServer({"maker/tiny": {"tiny.gguf": body}}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        for name in ("HUB_PATIENCE", "STALL"):  # a hub that was held up is not one that does not answer
            monkeypatch.setattr(fetch, name, 600)
        code, out, err = shell("run", "tiny", "hi", *EXACT)
        assert (code, out) == (0, expected + "\n")
        assert "licence MIT" in err.splitlines()[0]
        assert "tiny.gguf: 100 %" in err
        asked = len(server.log)
        code, out, err = shell("run", "tiny", "hi", "--temperature", "1.5", "--seed", "2", *EXACT)
        assert (code, len(server.log)) == (0, asked), "what is here is not asked for again"
        assert out != expected + "\n"


# What goes with what is known before a model is opened.
AT_ONCE: list[tuple[str, str]] = [
    ("--contrastive-beta 0.5", "--contrastive-beta needs a smaller model of the same vocabulary: --amateur MODEL"),
    ("--best-of 2 -n 3", "--best-of must be between n (3) and 64, not 2"),
    ("--beams 2 -n 3", "n must be between 1 and --beam-width (2), not 3"),
    ("--beams 4 -t 0.5", "temperature does not go with beam search"),
    ("--beams 4 --bad-word mill", "--bad-word does not go with beam search"),
    ("--beams 4 --json --logprobs 1", "logprobs does not go with beam search"),
    ("--beams 4 --preset creative", "--preset sets how tokens are sampled, and beam search does not sample"),
    ("--penalty-alpha 0.6 --top-k 4 -n 2", "contrastive search has one answer"),
]


@pytest.mark.parametrize(("flags", "clue"), AT_ONCE)
def test_conflicting_options_are_refused_before_a_model_is_opened(shell: Shell, flags: str, clue: str) -> None:
    """There is no such model, and nobody looks."""
    code, out, err = shell("run", "no-such-model", "hi", *flags.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert clue in err


def test_all_generating_commands_refuse_conflicting_options(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi"}\n')
    commands = (
        ("generate", "none", "-i", tmp_path / "in.jsonl", "-o", tmp_path / "o"),
        ("chat", "none"),
        ("ask", "none", tmp_path, "why?"),
    )
    for command in commands:
        code, _, err = shell(*command, "--contrastive-beta", "0.5")
        assert (code, "--contrastive-beta needs" in err) == (2, True)


MISTAKES: list[tuple[str, int, str]] = [
    ("", 1, "the prompt is empty"),
    ("hi --temperature nan", 2, "temperature must be between 0 and 100, not nan"),
    ("hi --temperature -1", 2, "temperature must be"),
    ("hi --temperature warm", 2, "temperature"),
    ("hi --top-p 1.5", 2, "--top-p must be between 0 and 1"),
    ("hi --top-k -1", 2, "--top-k must be 0 (off) or more"),
    ("hi --min-p inf", 2, "--min-p must be between 0 and 1, not inf"),
    ("hi --repetition-penalty 1e309", 2, "--repetition-penalty must be"),
    ("hi --max-tokens 0", 2, "--max-tokens must be 1 or more"),
    ("hi --seed -1", 2, "seed must be"),
    ("hi --min-tokens 9 --max-tokens 5", 2, "--min-tokens (9) must not exceed --max-tokens (5)"),
    ("hi --logit-bias five", 2, "--logit-bias takes ID=BIAS"),
    ("hi --logit-bias 5=900", 2, "must be between -100 and 100"),
    ("hi --logit-bias 99999=1", 1, "--logit-bias names token 99999"),
    ("hi --stop-token-id 99999", 1, "--stop-token-id names token 99999"),
    ("hi --stop-token-id -4", 2, "token ids in --stop-token-id must be"),
    ("hi --preset wild", 2, "'--preset': 'wild' is not one of 'precise'"),
    ("hi --raw --system x", 2, "--raw uses no chat template"),
    ("hi --logprobs 1", 2, "--logprobs goes with --json"),
    ("hi --json --logprobs 1000", 2, "logprobs must be between"),
    ("hi --file /none.txt", 2, "'/none.txt' does not exist"),
    ("hi --file /tmp", 2, "is a directory"),
    ("hi --threads 0", 2, "--threads must be 1 or more"),
    ("hi --max-model-len -5", 2, "--max-model-len must be 1 or more"),
    ("hi --max-model-len 100000", 1, "--max-model-len 100000 is larger than the model's context of 512 tokens"),
    ("hi --kv-cache-memory 1KiB", 1, "use --max-model-len 16 or --kv-cache-memory "),
    ("hi --kv-cache-memory lots", 1, "'lots' is not a size"),
    ("hi --kv-cache-memory 900TiB", 1, "is not a size"),
    ("hi --dtype int3", 1, "unknown dtype 'int3'"),
    ("hi --kv-dtype int3", 1, "unknown --kv-dtype 'int3'"),
    ("hi --device abacus", 1, "unknown device 'abacus'"),
    ("hi --backend abacus", 1, "unknown backend 'abacus'"),
]


@pytest.mark.parametrize(("arguments", "code", "clue"), MISTAKES)
def test_invalid_arguments_are_a_one_line_error(shell: Shell, tiny_gguf: Path, arguments: str, code: int, clue: str) -> None:
    found, out, err = shell("run", "-q", tiny_gguf, *arguments.split())
    assert (found, out) == (code, "")
    assert len(err.splitlines()) == 1, err
    assert err.startswith("headrace: ")
    assert clue in err
    assert "a bug in Headrace" not in err


def test_prompts_that_cannot_be_answered(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    code, out, err = shell("run", "-q", tiny_gguf, stdin="水" * 600)
    assert (code, out) == (1, "")
    assert "the context holds 512, the answer included; shorten the prompt" in err
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    code, out, err = shell("run", "-q", tiny_gguf, "--file", tmp_path / "bad.txt")
    assert (code, out) == (1, "")
    assert err.startswith(f"headrace: {tmp_path / 'bad.txt'} is not UTF-8 text (byte 3); convert it, for example: iconv ")
    assert "not UTF-8" in shell("run", "-q", tiny_gguf, "a\udcff")[2]
    assert "there is no file or folder" in shell("run", "none.gguf", "hi")[2]
    plain = write_tiny_gguf(tmp_path / "plain.gguf", template=None)
    code, out, err = shell("run", "-q", plain, "hi")
    assert (code, out) == (1, "")
    assert "has no chat template; use --raw" in err
    assert shell("run", "-q", "--raw", plain, "hi", "-m", "3")[0] == 0


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"template": "{{ messages.__class__.__mro__ }}"}, "auto", "chat template: "),
    ({"template": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}, "auto", "may loop"),
    ({"template": "{% if %}"}, "auto", "chat template: "),
]
for backend_name in ("auto", "torch"):
    BROKEN += [
        ({"edit": lambda tensors: tensors.pop("blk.1.ffn_up.weight")}, backend_name, "blk.1.ffn_up.weight"),
        ({"edit": lambda tensors: tensors.update(extra=tensors["output_norm.weight"])}, backend_name, "extra"),
        ({"edit": lambda tensors: tensors["output_norm.weight"].fill(float("nan"))}, backend_name, "NaN"),
    ]


@pytest.mark.parametrize(("changes", "backend", "clue"), BROKEN)
def test_models_that_are_broken(shell: Shell, tmp_path: Path, changes: dict[str, Any], backend: str, clue: str) -> None:
    model = write_tiny_gguf(tmp_path / "broken.gguf", **changes)
    code, out, err = shell("run", "-q", model, "hi", "-m", "3", "--backend", backend)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1, err
    assert clue in err
    assert "a bug in Headrace" not in err


def test_invalid_model_files_are_refused(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    for name, body in {"cut": whole[: len(whole) // 2], "head": whole[:20], "text": b"not a model", "empty": b""}.items():
        (tmp_path / f"{name}.gguf").write_bytes(body)
        code, out, err = shell("run", "-q", tmp_path / f"{name}.gguf", "hi")
        assert (code, out) == (1, "")
        assert len(err.splitlines()) == 1, err
        assert f"{name}.gguf" in err
        assert "a bug in Headrace" not in err


@pytest.mark.parametrize("flag", ["--top-k", "--no-repeat-ngram", "--max-tokens", "--min-tokens", "--seed"])
def test_absurd_numbers_are_refused(shell: Shell, tiny_gguf: Path, flag: str) -> None:
    code, out, err = shell("run", "-q", "--raw", tiny_gguf, "hi", flag, "9" * 25)
    assert (code, out) == (2, "")
    assert flag[2:] in err


def test_ctrl_c_keeps_the_printed_text(shell: Shell, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "long.gguf", context=100_000)
    process = shell.start("run", "-q", model, "hi")
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert len(first) == 20
    assert (first + out).endswith("\n")
    assert err == "headrace: interrupted\n"


@pytest.mark.parametrize("name", ["typer", "headrace.server.serving"])
def test_ctrl_c_while_modules_are_imported_is_one_line(shell: Shell, tiny_gguf: Path, name: str) -> None:
    """Of the command line, and of what the command needs."""
    finder = f"class Press:\n  def find_spec(name, *_): name == {name!r} and signal.raise_signal(signal.SIGINT)"
    process = shell.start("serve", tiny_gguf, before=f"{finder}\nsys.meta_path.insert(0, Press)")
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (130, "", "headrace: interrupted\n")


def test_output_that_cannot_be_written(shell: Shell, tiny_gguf: Path) -> None:
    with Path("/dev/full").open("w") as full:
        process = shell.start("run", "-q", tiny_gguf, "hi", "-m", "3", stdout=full)
        assert process.communicate(timeout=SECONDS)[1] == "headrace: the output: No space left on device\n"
    assert process.returncode == 1
    process = shell.start("run", "-q", tiny_gguf, "hi", "-m", "50", stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=SECONDS)[1] == "", "a reader that goes away is no error to talk about"
    assert process.returncode == 1


@pytest.mark.weights
def test_a_real_model(shell: Shell) -> None:
    path = model_file("SmolLM2-135M-Instruct.Q4_1.gguf")
    code, out, _ = shell("run", path, "What is the capital of France? Answer with one word.", "-t", "0", "-m", "6", "-q")
    assert code == 0
    assert "Paris" in out
    code, out, err = shell("run", path, "Answer:", "-t", "0", "-m", "2", stdin="中国的首都是哪里？")
    assert code == 0
    assert out.strip()
    assert "2 tokens" in err
