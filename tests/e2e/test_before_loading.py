"""Invalid settings are refused in one line before torch or weights are loaded."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.cli.options import writable_folder
from headrace.llm import LLM
from headrace.startup.supported import missing_requirement
from headrace.workflows.batch_output import BatchOutput
from tests.cli_shell import Shell
from tests.tiny_bert import write_tiny_bert
from tests.tiny_files import write_tiny_gguf

TORCH = "import atexit, sys; atexit.register(lambda: print('TORCH' if 'torch' in sys.modules else 'light'))"
LLAMA = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
LLAMA |= {"intermediate_size": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}


def folder(path: Path, name: str = "config.json", **settings: Any) -> Path:
    path.mkdir()
    (path / name).write_text(json.dumps(settings))
    save_file({"model.norm.weight": np.ones(8, np.float32)}, path / "model.safetensors")
    return path


def gguf_adapter(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_string("general.base_model.0.name", "Llama 3.2 1B")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((1, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "architecture": (lambda at: folder(at / "m", model_type="nameless"), "unknown architecture 'nameless'; known are arcee"),
    "missing": (
        lambda at: folder(at / "m", model_type="jamba"),
        "jamba is not supported, Headrace lacks layers with a state",
    ),
    "hqq": (
        lambda at: folder(at / "m", **LLAMA, quantization_config={"quant_method": "hqq", "bits": 4}),
        "has weights quantised by 'hqq', which is not supported; take the model's own safetensors",
    ),
    "scaling": (
        lambda at: folder(at / "m", **LLAMA, rope_scaling={"rope_type": "ntk", "factor": 4.0}),
        "asks for the rotary scaling 'ntk'; known are default, linear, llama3, yarn, longrope, proportional, dynamic",
    ),
    "lora": (
        lambda at: folder(at / "m", "adapter_config.json", peft_type="LORA", base_model_name_or_path="Qwen/Qwen3-0.6B"),
        "is a LoRA adapter for Qwen/Qwen3-0.6B, which is not read by itself; merge it",
    ),
    "lora in GGUF": (lambda at: gguf_adapter(at / "lora.gguf"), "is a LoRA adapter for Llama 3.2 1B"),
}


def refused(shell: Shell, *arguments: object) -> str:
    """What a command says that ends with an error, and without torch."""
    done = shell.forked(*arguments, before=TORCH)
    assert done.returncode in (1, 2), done
    assert done.stdout == "light\n", "nothing heavy was loaded"
    assert done.stderr.startswith("headrace: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return str(done.stderr)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_run_here(shell: Shell, tmp_path: Path, name: str) -> None:
    make, expected = REFUSED[name]
    path = make(tmp_path)
    assert expected in refused(shell, "run", path, "hi")
    for command in ("show", "inspect"):
        code, out, err = shell(command, path)
        assert expected in out + err
        assert code == 1 or "runs here:       no: " in out
    if name != "lora":
        assert expected in json.loads(shell("inspect", "--json", path)[1])["missing"]
    assert expected in missing_requirement(path)


def test_a_model_that_runs_here(shell: Shell, tiny_gguf: Path) -> None:
    assert missing_requirement(tiny_gguf) == ""
    assert "runs here:       yes" in shell("inspect", tiny_gguf)[1]
    code, out, _ = shell("show", tiny_gguf)
    assert code == 0
    assert "runs here:       yes" in out
    assert "settings:        temperature 0.8, top_k 40, top_p 0.95, min_p 0.05 (default)" in out


def test_an_encoder_is_described_without_kv_and_sampling(shell: Shell, tmp_path: Path) -> None:
    """It reads a text as a whole: no K and V stay, and nothing is drawn."""
    bert = write_tiny_bert(tmp_path / "bert")
    code, _, err = shell("embed", bert, "the mill", "--threads", "1")
    assert code == 0
    assert err.splitlines()[-2].endswith("bitwise), texts of at most 64 tokens")
    inspected, shown = shell("inspect", bert)[1], shell("show", bert)[1]
    assert "KV per token:    none: an encoder reads each text as a whole" in inspected
    assert json.loads(shell("inspect", "--json", bert)[1])["kv_bytes_per_token"] is None
    assert "kind:            an encoder: headrace embed" in shown
    assert "settings" not in shown
    for said in (err, shown):
        assert "KV" not in said
    refusal = "is an encoder and cannot generate text; use headrace embed"
    assert refusal in refused(shell, "run", bert, "hi")
    for command in (("chat", bert), ("generate", bert, "-i", __file__, "-o", tmp_path / "out")):
        assert refusal in shell(*command)[2]


FORMS = [
    ("--json-schema", '{"type": "objec"}', "objec"),
    ("--json-schema", "no JSON", "JSON"),
    ("--grammar", "root ::= (", "grammar"),
]


@pytest.mark.parametrize(("option", "text", "expected"), FORMS)
def test_a_form_that_nothing_can_be_held_to(
    shell: Shell, tiny_gguf: Path, tmp_path: Path, option: str, text: str, expected: str
) -> None:
    (tmp_path / "form").write_text(text)
    assert expected in refused(shell, "run", tiny_gguf, "hi", option, tmp_path / "form")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--method", "gptq,awq"), "gptq,awq cannot be: "),
        (("--method", "heads"), "heads needs --keep-heads"),
        (("--method", "magnitude", "--sparsity", "3"), "'3' is not a sparsity"),
        (("--heal-steps", "5"), "the method heal and its steps go together"),
        (("--format", "Q9"), "unknown format 'Q9'"),
    ],
)
def test_compress_settings_that_cannot_be(
    shell: Shell, tiny_gguf: Path, tmp_path: Path, options: tuple[str], expected: str
) -> None:
    assert expected in refused(shell, "compress", tiny_gguf, "-o", tmp_path / "out.gguf", *options)


def test_a_wrong_regex(shell: Shell, tiny_gguf: Path) -> None:
    assert "regex" in refused(shell, "run", tiny_gguf, "hi", "--regex", "(")


def test_an_output_that_cannot_be_written(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    assert "cannot be written" in refused(shell, "generate", tiny_gguf, "-i", source, "-o", "/proc/out.jsonl")
    assert "cannot be written" in refused(shell, "compare", tiny_gguf, "-i", source, "-o", "/proc/out.csv")
    assert "does not exist; create it first" in refused(
        shell, "bench", "local", tiny_gguf, "--json", tmp_path / "no" / "x.json"
    )
    nowhere, url = source / "x", "http://127.0.0.1:1/v1"
    for command in (
        ("compress", tiny_gguf, "-o", "/proc/out.gguf"),
        ("train-heads", tiny_gguf, "-o", nowhere),
        ("distil", tiny_gguf, "-o", nowhere, "--student", "depth=1"),
        ("train-classifier", tiny_gguf, "-d", source, "-o", nowhere),
        ("bench", "serve", url, "--plots", nowhere),
        ("bench", "serve", url, "--report", "/proc/x.html"),
        ("bench", "serve", url, "--json", "/proc/x.json"),
        ("bench", "latency", url, "--json", "/proc/x.json"),
    ):
        assert "cannot be written" in shell(*command)[2], command
    assert writable_folder(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    assert not (tmp_path / "new").exists(), "it was only looked at"


def test_an_output_of_another_model_is_refused(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "max_tokens": 2}\n{"prompt": "b", "max_tokens": 2}\n')
    assert shell("generate", tiny_gguf, "-i", source, "-o", target)[0] == 0
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    before = target.read_bytes()
    assert "was started with different model" in refused(shell, "generate", other, "-i", source, "-o", target)
    assert target.read_bytes() == before


def test_a_model_that_fails_to_load_costs_no_answers(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "max_tokens": 2}\n')
    failing = ("generate", tiny_gguf, "-i", source, "-o", target, "--kv-cache-memory", "1")
    assert shell(*failing)[0] == 1
    assert sorted(one.name for one in tmp_path.glob("out*")) == [], "nothing is left behind"
    assert shell("generate", tiny_gguf, "-i", source, "-o", target)[0] == 0
    before = target.read_bytes()
    assert shell(*failing, "--overwrite")[0] == 1
    assert target.read_bytes() == before, "what is there goes when the model is ready"


def test_only_one_process_writes_a_file(tmp_path: Path) -> None:
    first, second = (BatchOutput(tmp_path / "out.jsonl", {}) for _ in range(2))
    first.read_existing()
    second.read_existing()
    first.lock()
    with pytest.raises(ValueError, match="another process is writing"):
        second.lock()
    second.remove_if_empty()
    assert first.path.exists(), "it is not the second one's to take away"
    first.remove_if_empty()
    first.close()
    assert not first.path.exists()


def test_more_threads_than_cores_are_warned_of(shell: Shell, tiny_gguf: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    err = shell.forked("run", tiny_gguf.with_name("none.gguf"), "hi", "--threads", 999).stderr
    assert f"999 threads on {cores} cores wait for each other; --threads {cores} is faster" in err
    assert "threads on" not in shell("run", "none.gguf", "hi", "--threads", cores)[2]


def test_an_error_names_the_limit_that_can_be_raised(tiny_llm: LLM, tiny_gguf: Path) -> None:
    text = "mill " * 2000
    with pytest.raises(ValueError, match="shorten the prompt$"):
        tiny_llm.generate(text)
    small = LLM(tiny_gguf, dtype="float64", max_model_len=64, threads=1)
    with pytest.raises(ValueError, match="shorten the prompt, or raise max_model_len$"):
        small.generate(text)
    # two layers with 4 KV heads' K and V of 8 float64 in blocks of 16 tokens
    tight = LLM(tiny_gguf, dtype="float64", kv_cache_memory=512 * 16 * 16, threads=1)
    assert tight.memory_plan.max_model_len < 512
    with pytest.raises(ValueError, match="shorten the prompt, or raise kv_cache_memory$"):
        tight.generate(text)


def test_near_names(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    assert "did you mean smollm2-135m" in shell("run", "smollm-135m", "hi")[2]
    assert "did you mean qwen3-0.6b" in shell("run", "qwen3", "hi")[2]
    assert "headrace list shows the catalog: gemma-3-1b, llama-3.2-1b" in shell("run", "xyz", "hi")[2]
    (tmp_path / "mills.gguf").symlink_to(tiny_gguf)
    (tmp_path / "mills.txt").write_text("")
    wrong = shell("run", tmp_path / "mill.gguf", "hi")[2]
    assert wrong == f"headrace: there is no file or folder {tmp_path}/mill.gguf; did you mean {tmp_path}/mills.gguf?\n"
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "max_token": 2}\n{"prompt": "a", "zzz": 2}\n')
    assert shell("generate", tiny_gguf, "-i", source, "-o", target)[0] == 1
    errors = [json.loads(line)["error"] for line in target.read_text().splitlines()]
    assert "unknown field 'max_token'; did you mean max_tokens" in errors[0]
    assert "unknown field 'zzz'; a line has id, prompt" in errors[1]
    said = shell("chat", tiny_gguf, "-m", "1", stdin="/set temprature 0.5\n")[2]
    assert "unknown setting temprature; did you mean temperature?" in said
