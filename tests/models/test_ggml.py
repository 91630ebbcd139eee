"""ggml files of whisper.cpp: tensors, vocabulary and transcripts of the folder with the same weights; damaged files."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers, trainers

from headrace import LLM
from headrace.cli.app import main
from headrace.startup.model_folder import models_in
from headrace.startup.opening import open_model
from headrace.startup.speech import reads_sound, speech_model
from headrace.text.ranked_vocab import merges
from headrace.text.tokenizer import Tokenizer, TokenizerError
from headrace.weights.ctranslate2 import CTranslate2Folder
from headrace.weights.digest import files_digest
from headrace.weights.ggml import LANGUAGES, GGMLFile
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from headrace.weights.schemes.folder import open_weights
from headrace.weights.source import WeightError
from tests.places import model_file
from tests.tiny_whisper import (
    VOCAB,
    ggml_bytes,
    ggml_head,
    ggml_sizes,
    ggml_tensor,
    mel_filters,
    noise,
    oracle,
    renamed,
    words,
    write_ctranslate2,
    write_folder,
    write_ggml,
    write_wav,
)

KINDS = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_that_were_written(kind: str, tmp_path: Path) -> None:
    theirs = oracle()
    source = open_weights(write_ggml(tmp_path / "ggml-tiny.bin", theirs, kind))
    assert isinstance(source, GGMLFile)
    ours = load_model(source, torch.float32)
    state = {name.removeprefix("model."): value.float().numpy() for name, value in theirs.state_dict().items()}
    stored = set()
    for name in source.names():
        info, value = source.info(name), state[name]
        stored.add(info.kind)
        assert info.shape == value.shape, name
        code = getattr(gguf.GGMLQuantizationType, info.kind)
        expected = gguf.quants.dequantize(gguf.quants.quantize(value, code), code)
        found = gguf.quants.dequantize(source.raw(name), code)
        assert np.array_equal(found.reshape(expected.shape), expected), name
    assert kind in stored
    assert set(state) - set(source.names()) == {"proj_out.weight"}
    table = dict(ours.named_parameters())["tokens.weight"]
    code = getattr(gguf.GGMLQuantizationType, kind)
    table_of = gguf.quants.dequantize(gguf.quants.quantize(state["decoder.embed_tokens.weight"], code), code)
    assert np.array_equal(table.numpy(), table_of)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_transcripts_are_those_of_the_folder(quantize: str | None, tmp_path: Path) -> None:
    model = oracle().half().double()  # a ggml file keeps norms in float32, CTranslate2 in float16
    folder = write_ctranslate2(tmp_path / "ct2", model)
    (folder / "config.json").write_text("{}")  # tokens that are not written are computed, as for a ggml file
    found = []
    for path in (folder, write_ggml(tmp_path / "ggml-tiny.bin", model)):
        with LLM(path, quantize=quantize) as llm:
            assert llm.backend == "native"
            settings = {"language": "en", "prompt": "So it said", "vad": False, "words": True, "temperatures": (0.0, 1.0)}
            found.append(llm.transcribe(noise(2.5), **settings))
    assert found[0].segments
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q8_0"])
def test_quantized_files_run_in_the_core_close_to_torch(kind: str, tmp_path: Path) -> None:
    path = write_ggml(tmp_path / "ggml-tiny.bin", oracle(), kind)
    found = []
    for options in ({}, {"backend": "torch", "dtype": "float32"}):
        with LLM(path, **options) as llm:  # type: ignore[arg-type]
            found.append(llm.transcribe(noise(0.9), language="en", vad=False, temperatures=(0.0,)))
    assert found[0].segments
    assert found[0].segments[0].avg_logprob == pytest.approx(found[1].segments[0].avg_logprob, abs=0.2)


def test_the_vocabulary_is_that_of_the_folder(tmp_path: Path) -> None:
    folder = open_model(write_folder(tmp_path / "folder"))
    opened = open_model(write_ggml(tmp_path / "ggml-tiny.bin", oracle()))
    (_, theirs), (audio, ours) = speech_model(folder), speech_model(opened)
    assert audio.bins == 80
    for field in ("start", "end", "previous", "no_speech", "no_timestamps", "tasks"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert list(ours.languages.values()) == list(theirs.languages.values())
    assert list(ours.languages) == LANGUAGES[:3]  # by their number alone
    assert opened.tokenizer.vocab_size == VOCAB
    assert opened.eos_ids == folder.eos_ids
    for text in (" Thé, so it goes.", "<|fr|> 7", "\n \x00"):
        assert opened.tokenizer.encode(text) == folder.tokenizer.encode(text).copy() or "<|" in text
        plain = [one.tokenizer.encode(text, parse_special=False) for one in (opened, folder)]
        assert plain[0] == plain[1]
        assert opened.tokenizer.decode(plain[0]) == text


def trained() -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Words by rank and merges of a byte-level BPE that the library trained."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [Path(__file__).read_text(), Path(gguf.quants.__file__).read_text()]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False))
    state = json.loads(tokenizer.to_str())["model"]
    codes = dict(zip(alphabet, (word[0] for word in words()), strict=True))

    def spelled(text: str) -> bytes:
        return bytes(codes[char] for char in text)

    ranked = [spelled(word) for word, _ in sorted(state["vocab"].items(), key=lambda one: one[1])]
    return ranked, [(spelled(left), spelled(right)) for left, right in state["merges"]]


def test_merges_are_found_from_ranks() -> None:
    ranked, expected = trained()
    assert len(expected) == 1500 - 256
    assert merges(ranked) == expected
    with pytest.raises(TokenizerError, match="no word for byte 104"):
        Tokenizer.from_words([word for word in ranked if word != b"h"], ["<|endoftext|>"], "<|endoftext|>")
    with pytest.raises(TokenizerError, match="twice"):
        Tokenizer.from_words([*ranked, b"h"], ["<|endoftext|>"], "<|endoftext|>")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    model = oracle()
    path = write_ggml(tmp_path / "ggml-tiny.bin", model)
    good, config = path.read_bytes(), model.config
    sizes, filters, ranked = ggml_sizes(config, 1), mel_filters(80), words()
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    head, rest = ggml_head(sizes, filters, ranked), good[len(ggml_head(sizes, filters, ranked)) :]

    def sized(**changes: int) -> bytes:
        names = ("words", "positions", "width", "heads", "layers", "context", "text_width", "text_heads", "text_layers")
        values = dict(zip((*names, "bins", "format"), sizes, strict=True)) | changes
        return ggml_head(list(values.values()), filters, ranked) + rest

    bias = ggml_tensor("encoder.conv1.bias", np.zeros((32, 1), np.float32), "F32")
    odd = {
        "the file is cut": [good[:30], good[:5000], good[: len(head) - 3], good[: len(head) + 7], good[:-1]],
        "sizes that no Whisper": [sized(heads=0), sized(heads=7), sized(text_width=64), sized(layers=-1), sized(bins=5000)],
        r"number format 8 of version 0": [sized(format=8)],
        "mel filters of 80 x 201": [sized(bins=128)],
        r"257 words|languages": [sized(words=VOCAB + 200), sized(words=VOCAB - 4)],
        "8000|-3 bytes": [
            head[: -256 * 5] + struct.pack("<i", 8000) + head[-256 * 5 + 4 :],
            head[: -256 * 5] + struct.pack("<i", -3) + head[-256 * 5 + 4 :],
        ],
        "has the type I32": [head + bias[:8] + struct.pack("<i", 26) + bias[12:]],
        "has the type number 99": [head + bias[:8] + struct.pack("<i", 99) + bias[12:]],
        "dimensions .*cannot have": [head + bias[:12] + struct.pack("<2i", 1, -32) + bias[20:]],
        "ends at byte": [head + bias[:12] + struct.pack("<2i", 1 << 30, 1 << 30) + bias[20:]],
        "5 dimensions": [head + struct.pack("<i", 5) + bias[4:]],
        "which Whisper does not have": [
            head + ggml_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float32), "F16"),
            head + ggml_tensor("decoder.blocks.0.attn.gate.weight", np.zeros((32, 32), np.float32), "F16"),
        ],
        "twice": [head + bias + bias],
    }
    for message, files in odd.items():
        for data in files:
            path.write_bytes(data)
            with pytest.raises(WeightError, match=message) as error:
                open_weights(path)
            assert "\n" not in str(error.value)
    # Whole files with a tensor too few, one of another shape, and other filters.
    path.write_bytes(head + bias)
    with pytest.raises(WeightError, match="missing"):
        load_model(open_weights(path))
    state["model.encoder.layer_norm.weight"] = np.zeros(16)
    path.write_bytes(ggml_bytes(state, config, ranked))
    with pytest.raises(WeightError, match="encoder.layer_norm.weight"):
        load_model(open_weights(path))
    path.write_bytes(ggml_head(sizes, filters * np.float32(1.1), ranked) + rest)
    with pytest.raises(WeightError, match="mel filters differ"):
        speech_model(open_model(path))


def test_random_headers_give_one_line(tmp_path: Path) -> None:
    path = write_ggml(tmp_path / "ggml-tiny.bin", oracle())
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    tensors = len(good) - 200_000
    for _ in range(150):
        broken = bytearray(good)
        for at in (*rng.integers(4, 60, 2), rng.integers(tensors, len(good))):
            broken[at] = rng.integers(256)
        path.write_bytes(broken)
        message = ""
        try:
            open_weights(path).close()
        except WeightError as error:
            message = str(error)
        assert "\n" not in message


def test_commands_take_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_ggml(tmp_path / "ggml-tiny.bin", oracle(), "Q5_1")
    assert reads_sound(path)
    assert files_digest(path) != files_digest(write_ggml(tmp_path / "other.bin", oracle(), "Q8_0"))
    sound = str(write_wav(tmp_path / "a.wav", noise(0.7)))
    assert main(["transcribe", str(path), sound, "--language", "en", "--temperature", "0", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["language"] == "en"
    assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "whisper" in printed
    assert "Q5_1" in printed
    assert "yes" in next(line for line in printed.splitlines() if line.startswith("runs here"))
    assert main(["fit", str(path), "--machine", "h100", "--context", "96"]) == 0
    assert "30 s of sound" in capsys.readouterr().out
    found = models_in(tmp_path)
    assert set(found.models) == {"ggml-tiny", "other"}
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "a"}\n')
    assert main(["generate", str(path), "-i", str(lines), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert "is a speech model and reads no text" in capsys.readouterr().err
    with pytest.raises(WeightError, match="does not start with GGUF"):
        GGUFFile(path)


@pytest.mark.weights
@pytest.mark.parametrize("name", ["whisper-base", "whisper-tiny.en"])
def test_real_weights_as_a_ggml_file(name: str, tmp_path: Path) -> None:
    folder = model_file(name)
    source, opened = CTranslate2Folder(folder), open_model(folder)
    size = 50257 if name == "whisper-base" else 50256
    ranked = [opened.tokenizer.token_bytes(token) for token in range(size)]
    state = {one: source.raw(one).view(np.float16).reshape(source.info(one).shape) for one in source.names()}
    config: Any = type("Config", (), source.config)
    path = tmp_path / "ggml-real.bin"
    path.write_bytes(ggml_bytes(state, config, ranked))
    again = open_model(path)
    (_, theirs), (_, ours) = speech_model(opened), speech_model(again)
    assert ours.languages == theirs.languages
    assert ours.suppressed == theirs.suppressed
    assert ours.blank == theirs.blank
    assert (ours.first, ours.end, ours.start) == (theirs.first, theirs.end, theirs.start)
    sound = model_file("speech.wav")
    found = []
    for place in (folder, path):
        with LLM(place) as llm:
            found.append(llm.transcribe(sound, language="en", temperatures=(0.0,)))
    assert [one.tokens for one in found[0].segments] == [one.tokens for one in found[1].segments]
    assert found[0].segments
    assert renamed("model.encoder.layer_norm.weight") == "encoder.ln_post.weight"
