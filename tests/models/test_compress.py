"""A model written as GGUF is the same model in fewer bits: to our loader, to the `gguf` package, to llama.cpp; and what cannot
be written is refused in one line."""

import contextlib
import importlib
import json
import re
import subprocess
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers

from headrace.compress import plan
from headrace.compress.format_cost import format_costs
from headrace.compress.mixes import mix_named
from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress, predict
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.models.registry import read_config
from headrace.text.gguf_keys import split_name
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocabulary import TokenizerError
from headrace.weights import imatrix
from headrace.weights.gguf import TYPE_CODES, GGUFFile
from headrace.weights.loader import load_model, read_tensor
from headrace.weights.mixes import MIXES, tensor_kind
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import WeightError
from tests.models.feeding import feed
from tests.models.gguf_writer import write_gguf
from tests.models.test_gguf_models import llama_cpp_tolerance
from tests.models.zoo import CONFIGS, largest_gap
from tests.places import model_file, peer_python
from tests.tiny_bert import write_tiny_bert
from tests.tiny_files import TEMPLATE, write_tiny_gguf
from tests.unit.vocabularies import TEXTS, trained_byte_level

FOLDERS = ["llama-mha-tied", "llama-rope-llama3", "llama-rope-linear", "llama-wide-heads", "llama-biases", "mistral-no-window"]
FOLDERS += ["qwen2-tied", "qwen3", "gpt2"]
BATCH = [[5, 6, 7, 8, 9, 300, 11, 4], [3, 399]]
SPECIALS = ("<|endoftext|>", "<|im_end|>")


@cache
def model_of(name: str) -> Any:
    config = CONFIGS[name]()
    config.eos_token_id = config.bos_token_id = None  # the tokenizer's
    config.vocab_size = 420  # more rows than the tokenizer has tokens, as published models have
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * (0.3 if value.dim() == 1 else value.shape[-1] ** -0.5))
    return model


def write_folder(path: Path, name: str, change: Callable[[Any], object] = lambda backend: None) -> Path:
    """A published folder: config, weights, tokenizer with a chat template."""
    model_of(name).save_pretrained(path)
    backend = tokenizers.Tokenizer.from_str(trained_byte_level().to_str())  # what is made of it changes its settings
    change(backend)
    backend.save(str(path / "tokenizer.json"))
    settings = {"eos_token": SPECIALS[1], "bos_token": SPECIALS[0], "add_bos_token": False, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_becomes_a_file_of_the_same_model(name: str, tmp_path: Path) -> None:
    """In F32: logits to the last bit (Llama 3's divisors are rounded to float32), tensors those of the `gguf` package."""
    folder = write_folder(tmp_path / "folder", name)
    report = compress(folder, tmp_path / "out.gguf", Pipeline(format="F32"))
    assert report.bytes == (tmp_path / "out.gguf").stat().st_size
    written = GGUFFile(tmp_path / "out.gguf")
    ours, back = (feed(load_model(source), BATCH, "whole") for source in (SafetensorsFolder(folder), written))
    gap = largest_gap(ours, back)
    assert gap < 1e-4 if name == "llama-rope-llama3" else gap == 0
    theirs = GGUFFile(write_gguf(model_of(name), tmp_path / "theirs.gguf"))
    made = read_config(written)
    assert replace(made, layers=read_config(theirs).layers) == read_config(theirs)
    assert sorted(theirs.names()) == sorted(written.names())
    for key in theirs.names():
        torch.testing.assert_close(read_tensor(theirs, key), read_tensor(written, key), rtol=1e-6, atol=0)


def test_the_vocabulary_is_that_of_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "qwen2-tied")
    compress(folder, tmp_path / "out.gguf", Pipeline(format="Q8_0"))
    written = GGUFFile(tmp_path / "out.gguf")
    ours, theirs = Tokenizer.from_gguf(written.metadata), Tokenizer.from_folder(folder)
    for text in (*TEXTS, f"a{SPECIALS[1]}b"):
        assert ours.encode(text) == theirs.encode(text)
    assert (ours.eos_ids, ours.bos_id) == (theirs.eos_ids, theirs.bos_id)
    assert written.metadata["tokenizer.chat_template"] == TEMPLATE
    assert written.metadata["tokenizer.ggml.tokens"][-1] == "[PAD419]"


def test_a_writer_without_rotary_order_changes_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    folder = write_folder(tmp_path / "folder", "llama-gqa")
    right = plan.write_parts
    monkeypatch.setattr(plan, "write_parts", lambda parts, values: right([replace(p, row_order=None) for p in parts], values))
    compress(folder, tmp_path / "out.gguf", Pipeline(format="F32"))
    models = (load_model(source) for source in (SafetensorsFolder(folder), GGUFFile(tmp_path / "out.gguf")))
    assert largest_gap(*(feed(model, BATCH, "whole") for model in models)) > 0.01


def test_the_gguf_package_reads_the_same_numbers_and_keys(tmp_path: Path) -> None:
    """Every tensor of a mix, and the metadata of the file that was read, byte for byte but for number formats."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    compress(model, tmp_path / "out.gguf", Pipeline(format="Q4_0", head="Q8_0"))
    source, written = GGUFFile(model), GGUFFile(tmp_path / "out.gguf")
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    kinds = set()
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(values, read_tensor(written, tensor.name).numpy().reshape(values.shape))
        kinds.add(tensor.tensor_type.name)
    assert kinds == {"F32", "F16", "Q4_0", "Q8_0"}  # rows of 48 are no whole blocks
    assert {key: written.entry(key) for key in source.metadata} == {key: source.entry(key) for key in source.metadata}
    new = {key: value for key, value in written.metadata.items() if key not in source.metadata}
    assert new == {"general.quantization_version": 2, "general.file_type": 2, "headrace.compress": "rtn Q4_0"}
    assert reader.get_field("general.file_type").contents() == 2
    assert all(TYPE_CODES[kind.name] == kind.value for kind in gguf.GGMLQuantizationType if kind.name in TYPE_CODES)


def test_written_files_generate(tmp_path: Path) -> None:
    """Eight bits write what float32 writes; three write something else, and both are files like any other."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    texts, greedy = {}, SamplingParams(max_tokens=12, temperature=0.0)
    for name in ("F32", "Q8_0", "Q2_K"):
        compress(model, tmp_path / f"{name}.gguf", Pipeline(format=name))
        llm = LLM(str(tmp_path / f"{name}.gguf"), backend="torch", max_model_len=64)
        texts[name] = llm.generate(["the water of"], greedy)[0].outputs[0].token_ids
    original = LLM(str(model), backend="torch", max_model_len=64).generate(["the water of"], greedy)
    assert texts["F32"] == original[0].outputs[0].token_ids
    assert len(texts["Q2_K"]) == len(texts["Q8_0"]) == 12


def test_matrices_already_in_the_format_are_copied(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    first = compress(model, tmp_path / "one.gguf", Pipeline(format="Q8_0"))
    again = compress(tmp_path / "one.gguf", tmp_path / "two.gguf", Pipeline(format="Q8_0"))
    assert (first.warnings, again.warnings) == ([], [])
    assert 0 < first.error < 1e-4 == 1e-4 + again.error
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    third = compress(tmp_path / "two.gguf", tmp_path / "three.gguf", Pipeline(format="Q4_0"))
    assert [line.split(":")[0] for line in third.warnings] == ["two.gguf is quantised already (13 Q8_0)"]


def test_threads_and_chunks_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    compress(model, tmp_path / "one.gguf", Pipeline(format="Q4_1", threads=1))
    monkeypatch.setattr(plan, "CHUNK", 500)
    compress(model, tmp_path / "two.gguf", Pipeline(format="Q4_1", threads=3))
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


@pytest.mark.parametrize("kept", [False, True])
def test_one_matrix_is_in_memory_at_a_time(kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a writer that keeps what it read."""
    folder = write_folder(tmp_path / "folder", "llama-gqa")
    right, alive, most, held = plan.write_parts, [], [0], []

    def watched(parts: Any, values: Any) -> torch.Tensor:
        made = right(parts, values)
        alive.append(weakref.ref(made))
        most[0] = max(most[0], sum(one() is not None for one in alive))
        held.append(made if kept else None)
        return made

    monkeypatch.setattr(plan, "write_parts", watched)
    compress(folder, tmp_path / "out.gguf", Pipeline(format="Q8_0"))
    assert (most[0] == 1) != kept
    assert len(alive) > 20


def test_an_error_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", edit=lambda tensors: tensors["blk.1.ffn_up.weight"].fill(1e30))
    (tmp_path / "out.gguf").write_text("the old one")
    with pytest.raises(WeightError, match=r"tiny.gguf: blk.1.ffn_up.weight has numbers too large for a 16-bit scale"):
        compress(model, tmp_path / "out.gguf", Pipeline(format="Q8_0"), overwrite=True)
    assert (tmp_path / "out.gguf").read_text() == "the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "tiny.gguf"]


@pytest.mark.parametrize(
    ("pipeline", "out", "message"),
    [
        (Pipeline(format="Q4_K_X"), "out.gguf", "unknown format 'Q4_K_X'; did you mean Q4_K_S or Q4_K_M"),
        (Pipeline(format="int4-g128"), "out.gguf", "no kind of GGUF holds int4-g128"),
        (Pipeline(head="Q4_K_M"), "out.gguf", "unknown format 'Q4_K_M'; did you mean Q4_K"),
        (Pipeline(), "out", "give a name that ends in .gguf"),
        (Pipeline(), "no/out.gguf", "no is not a folder; create it first"),
        (Pipeline(), "tiny.gguf", "tiny.gguf exists"),
        (Pipeline(budget=1000), "out.gguf", "1,000 bytes are too few: with the fewest bits all tensors take"),
        (Pipeline(imatrix=Path("none.dat")), "out.gguf", "none.dat: cannot be opened"),
    ],
)
def test_an_invalid_pipeline_is_refused_before_writing(pipeline: Pipeline, out: str, message: str, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=re.escape(message)) as found:
        compress(model, tmp_path / out, pipeline)
    assert "\n" not in str(found.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_models_that_are_not_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"encoders \(bert\) are not written as GGUF"):
        predict(write_tiny_bert(tmp_path / "bert"))
    with pytest.raises(WeightError, match=r"encoders \(bert\) decode no tokens"):
        format_costs(tmp_path / "bert", ["Q8_0"])
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match="is the model that is read"):
        compress(model, model, overwrite=True)
    folder = write_folder(tmp_path / "folder", "mistral-window")
    with pytest.raises(WeightError, match="sliding windows are not written"):
        predict(folder)
    folder = write_folder(tmp_path / "gemma", "gemma3-one-kv-head")
    with pytest.raises(WeightError, match="a folder of gemma3_text is not written as GGUF"):
        predict(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_moe", "num_experts": 128}
    (folder / "config.json").write_text(json.dumps(config))
    for out, number_format in (("out.gguf", "Q8_0"), ("out", "int8")):
        with pytest.raises(WeightError, match="has layers of 128 experts, which are not built") as caught:
            compress(folder, tmp_path / out, Pipeline(format=number_format))
        assert "\n" not in str(caught.value)


def prefixed(backend: Any) -> None:
    backend.pre_tokenizer = type(backend.pre_tokenizer)(add_prefix_space=True)


def lowered(backend: Any) -> None:
    from tokenizers import normalizers

    backend.normalizer = normalizers.Lowercase()


@pytest.mark.parametrize("change", [prefixed, lowered])
def test_a_split_without_a_name_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", "llama-gqa", change)
    with pytest.raises(TokenizerError, match="GGUF has no name for the way in which"):
        predict(folder)


def test_pre_tokenizer_splits_are_recognized_by_their_patterns() -> None:
    digits = {"type": "Digits", "individual_digits": True}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": llama3}, "behavior": "Isolated", "invert": False}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}

    def name(steps: list[Any], **more: Any) -> str:
        state = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": {}, **more}
        return split_name(state, Path("folder"))

    assert name([bytes_]) == "gpt-2"
    assert name([digits, bytes_]) == "smollm"
    assert name([split, plain], model={"ignore_merges": True}) == "llama-bpe"
    assert name([split, plain]) == "dbrx"
    assert name([bytes_], normalizer={"type": "NFC"}) == "mpt"
    with pytest.raises(TokenizerError, match="its patterns are others"):
        name([{**split, "pattern": {"Regex": "a+"}}, plain])


# What llama.cpp makes of a model of 24 layers with two queries to a head of values.
EXPECTED = {
    "Q8_0": {"Q8_0"}, "F16": {"F16"}, "Q4_0": {"Q4_0", "Q6_K"}, "Q4_K_S": {"Q4_K", "Q5_K", "Q6_K"}, "Q6_K": {"Q6_K"},
    "Q5_K_S": {"Q5_K", "Q6_K"}, "Q3_K_S": {"Q3_K", "Q6_K"}, "Q3_K_L": {"Q3_K", "Q5_K", "Q6_K"},
    "Q2_K": {"Q2_K", "Q3_K", "Q6_K"}, "MXFP4": {"MXFP4", "Q6_K"},
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_keep_norms_and_whole_blocks(mix: str) -> None:
    config = read_config(GGUFFileOf(24))
    names = [
        "token_embd",
        "output",
        *(f"blk.{i}.{m}" for i in range(24) for m in ("attn_v", "ffn_down", "attn_output", "attn_q")),
    ]
    kinds = {tensor_kind(mix, f"{name}.weight", 512, config) for name in names}
    assert kinds == EXPECTED.get(mix, kinds)
    for name in ("blk.3.attn_norm.weight", "blk.3.attn_q.bias", "output_norm.weight", "position_embd.weight"):
        assert tensor_kind(mix, name, 512, config) == "F32"
    narrow = {tensor_kind(mix, f"{name}.weight", 96, config) for name in names}
    assert not {kind for kind in narrow if kind.endswith("_K")}
    assert tensor_kind(mix, "output.weight", 512, config, head="Q5_1") == "Q5_1"
    assert mix_named(mix.lower()) == mix


class GGUFFileOf:
    """A source of nothing but a config of so many layers."""

    def __init__(self, layers: int) -> None:
        self.path, self.format = Path("memory"), "safetensors"
        self.config = {**CONFIGS["llama-gqa"]().to_dict(), "num_hidden_layers": layers}


@pytest.mark.weights
@pytest.mark.parametrize("size", ["0.5B", "1.5B"])
def test_the_mix_is_that_of_a_published_file(size: str) -> None:
    """Q4_K_M tensor for tensor; llama.cpp then counted layers in the order of the file (0, 1, 10, …), now by number."""
    path = model_file(f"Qwen2.5-Coder-{size}-Instruct.Q4_K_M.gguf")
    report = predict(path, Pipeline(format="Q4_K_M"))
    with GGUFFile(path) as file:
        order = list(dict.fromkeys(found[1] for name in file.names() if (found := re.match(r"blk\.(\d+)\.", name))))
        assert order[:3] == ["0", "1", "10"]
        for name in file.names():
            counted = re.sub(r"blk\.(\d+)\.", lambda found: f"blk.{order.index(found[1])}.", name)
            assert file.info(name).kind == report.matrices[counted].kind, name


def write_dat(path: Path, entries: dict[str, np.ndarray], calls: int = 7) -> Path:
    raw = np.int32(len(entries)).tobytes()
    for name, values in entries.items():
        raw += np.int32(len(name)).tobytes() + name.encode() + np.array([calls, len(values)], np.int32).tobytes()
        raw += (values * calls).astype(np.float32).tobytes()
    path.write_bytes(raw + np.int32(5).tobytes())
    return path


def write_imatrix(path: Path, entries: dict[str, np.ndarray], calls: int = 7) -> Path:
    writer = gguf.GGUFWriter(str(path), "imatrix")
    for name, values in entries.items():
        writer.add_tensor(f"{name}.in_sum2", (values * calls).astype(np.float32)[None])
        writer.add_tensor(f"{name}.counts", np.full((1, 1), calls, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_importance_is_read_in_both_forms_and_used(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    name = "blk.0.ffn_up.weight"
    entries = {name: np.random.default_rng(0).gamma(0.2, size=32).astype(np.float32)}
    files = [write_dat(tmp_path / "i.dat", entries), write_imatrix(tmp_path / "i.gguf", entries)]
    for file in files:
        np.testing.assert_allclose(imatrix.read_imatrix(file)[name], entries[name], rtol=1e-6)
    errors = {}
    whole = read_tensor(GGUFFile(model), name).numpy()
    for tag, file in (("with", files[0]), ("gguf", files[1]), ("without", None)):
        report = compress(model, tmp_path / f"{tag}.gguf", Pipeline(format="Q4_0", imatrix=file))
        made = read_tensor(GGUFFile(tmp_path / f"{tag}.gguf"), name).numpy()
        errors[tag] = float((np.square(whole - made) * entries[name]).sum())
        assert any("no importance for 13 matrices" in line for line in report.warnings) == (file is not None)
    assert errors["with"] < 0.9 * errors["without"]
    assert errors["gguf"] == pytest.approx(errors["with"], rel=1e-3)
    assert GGUFFile(tmp_path / "gguf.gguf").metadata["quantize.imatrix.file"] == "i.gguf"


def test_foreign_or_damaged_importance_is_a_one_line_error(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    other = write_dat(tmp_path / "other.dat", {"blk.9.attn_q.weight": np.ones(32)})
    with pytest.raises(WeightError, match="has no matrix of this model"):
        predict(model, Pipeline(imatrix=other))
    wide = write_dat(tmp_path / "wide.dat", {"blk.0.attn_q.weight": np.ones(64)})
    for how in ({}, {"method": ("wanda",), "sparsity": "0.5"}):  # said before a number is read
        with pytest.raises(WeightError, match="blk.0.attn_q.weight has 64 columns and the matrix 32"):
            predict(model, Pipeline(format="Q4_0", imatrix=wide, **how))
    none = write_dat(tmp_path / "none.dat", {"blk.0.attn_q.weight": np.ones(0)})
    with pytest.raises(WeightError, match=r"none.dat: ends within the importance of 'blk.0.attn_q.weight'"):
        imatrix.read_imatrix(none)
    whole = other.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        raw = bytearray(whole[: rng.integers(len(whole) + 1)])
        for at in rng.integers(0, max(len(raw), 1), 3):
            raw[at : at + 1] = bytes([int(rng.integers(256))])
        other.write_bytes(raw)
        with contextlib.suppress(WeightError):  # and no other error
            imatrix.read_imatrix(other)


def test_format_costs_predict_size_and_error(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    now, eight, grid = format_costs(model, ["Q8_0", "int4-g16"])
    assert (now.cost.bits, now.error) == (32, None)
    report = predict(model, Pipeline(format="Q8_0"))
    assert eight.cost.file_bytes == sum(one.nbytes for one in report.matrices.values())
    assert eight.error is not None
    assert grid.error is not None
    assert 40 < eight.error.sqnr < 50
    assert grid.error.square > 50 * eight.error.square
    assert grid.error.rounding == pytest.approx(grid.error.noise, rel=0.1)
    table = 420 * 32  # of tokens: a row of it is read, not all
    assert now.cost.weights - now.cost.multiplied in (table, read_config(GGUFFile(model)).vocab_size * 32)
    with pytest.raises(ValueError, match="unknown format 'Q9'"):
        format_costs(model, ["Q9"])
    (_, gemma) = format_costs(write_folder(tmp_path / "gemma", "gemma3-one-kv-head"), ["Q8_0"], errors=False)
    (_, mistral) = format_costs(write_folder(tmp_path / "mistral", "mistral-window"), ["Q8_0"])
    assert gemma.error is None
    assert mistral.error is not None


@pytest.mark.peers
def test_llama_cpp_computes_the_same_logits(tmp_path: Path) -> None:
    """Of folders, in F32. Real weights in other kinds: test_written_in_llama_cpp."""
    try:
        python = peer_python("llama_cpp")
    except PackageNotFoundError:
        pytest.skip("needs llama-cpp-python")
    names = ["llama-rope-llama3", "llama-biases", "qwen2-tied", "qwen3"]
    for name in names:
        compress(write_folder(tmp_path / name, name), tmp_path / f"{name}.gguf", Pipeline(format="F32"))
    (tmp_path / "prompts.json").write_text(json.dumps(BATCH))
    script = Path(__file__).with_name("llama_cpp_logits.py")
    files = [str(tmp_path / f"{name}.gguf") for name in names]
    subprocess.run([python, str(script), str(tmp_path / "prompts.json"), *files], check=True, timeout=600)
    for name in names:
        ours = feed(load_model(GGUFFile(tmp_path / f"{name}.gguf")), BATCH, "whole")
        with np.load(tmp_path / f"{name}.npz") as stored:
            theirs = [torch.from_numpy(stored[str(i)]) for i in range(len(BATCH))]
        assert largest_gap(ours, theirs) < llama_cpp_tolerance(name)


@pytest.mark.parametrize(("name", "function"), [("run", "compress"), ("folder", "compress_folder")])
def test_old_module_names_warn(name: str, function: str) -> None:
    with pytest.warns(DeprecationWarning, match="is now headrace.compress.write"):
        module = importlib.reload(importlib.import_module(f"headrace.compress.{name}"))
    assert getattr(module, function) is compress
