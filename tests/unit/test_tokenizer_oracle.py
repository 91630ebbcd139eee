"""Tokenizers against transformers: the splits by name, whole real vocabularies, Hugging Face folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headrace.text.pretokenizers import SPLITS, pre_tokenizer
from headrace.text.tokenizer import Tokenizer, TokenizerError
from headrace.text.vocabulary import TokenizerError as SameError
from headrace.weights.gguf import GGUFFile
from tests.unit.vocabularies import (
    DATA,
    TEXTS,
    backend_model,
    data_file,
    model_file,
    sentence_piece,
    trained_byte_level,
    word_piece,
)

HARD = [
    *TEXTS,
    "I'M sure THEY'LL go; don't DON'T l'été HTTPServer iPhone15 3.14159 2024年12月31日 ＦＵＬＬ　ｗｉｄｔｈ",
    "a  b\n\n  c\r\n\t d   \n   e/f\\g //// ...!!!\n\n\n",
    "ǅ ʔ ª º ა Ა բ ß ﬁ 𝐀 한국어 ひらがなカタカナ ไทย हिन्दी עברית العربية١٢٣",
    "x\u0301y\u200d \u2028 \u3000。！？、“”‘’—…",
    "for(i=0;i<10;++i){print(f'{i:>3}');}\t#comment_with_underscores",
]
# the patterns that models state in their tokenizer.json
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
STATED = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES,
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
    ),
    "seed-coder": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES,
}


def pieces(split: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in split.pre_tokenize_str(text)]


def isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(steps)


@pytest.mark.parametrize("name", sorted(STATED))
def test_split_equals_the_stated_pattern(name: str) -> None:
    for text in HARD:
        assert pieces(pre_tokenizer(SPLITS[name]), text) == pieces(isolated(STATED[name]), text)


def test_splits_equal_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    shared = sorted(theirs.keys() & SPLITS.keys())
    assert {"llama-bpe", "qwen2", "gpt-4o", "tekken", "qwen35"} <= set(shared)
    for name in shared:
        for text in HARD:
            assert pieces(pre_tokenizer(SPLITS[name]), text) == pieces(isolated(theirs[name]), text), name


def test_falcon_splits_numbers_after_it_has_spelled_bytes() -> None:
    steps = [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(False)]
    numbers = [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]
    stated = pre_tokenizers.Sequence([*steps, *numbers])  # of its tokenizer.json
    before = pre_tokenizers.Sequence([steps[0], *numbers, steps[1]])
    texts = [*HARD, "4 ½ months, 1234²5 ¼¾ `a` $5^2", *(f"a{chr(code)}1" for code in range(0x20, 0x3000))]
    ours = [pieces(pre_tokenizer(SPLITS["falcon"]), text) for text in texts]
    assert ours == [pieces(stated, text) for text in texts]
    assert ours != [pieces(before, text) for text in texts]


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_no_split_loses_a_byte(name: str) -> None:
    for text in HARD:
        joined = "".join(pieces(pre_tokenizer(SPLITS[name]), text))
        assert joined == "".join(pieces(pre_tokenizers.ByteLevel(False, use_regex=False), text))


@pytest.mark.parametrize(
    ("name", "text", "want"),
    [
        ("smollm", "a 12²", ["a", "Ġ", "1", "2", "Â²"]),
        ("gpt-2", "a 12", ["a", "Ġ12"]),
        ("falcon", "a 1234!", ["a", "Ġ", "123", "4", "!"]),
        ("default", "a 1234`", ["a", "Ġ", "123", "4", "`"]),
        ("deepseek-v3", "ab12345水。 x", ["ab", "123", "45", "æ°´", "ãĢĤ", "Ġx"]),
        ("deepseek-coder", "ab 12\n水", ["ab", "Ġ", "1", "2", "Ċ", "æ°´"]),
        ("deepseek-llm", "Ab ა12。", ["Ab", "Ġ", "áĥĲ", "1", "2", "ãĢĤ"]),  # Georgian is not among its letters with case
        ("deepseek-llm", "Ab éb", ["Ab", "ĠÃ©", "b"]),
        ("bloom", "ab, cd.", ["ab", ",", "Ġcd", "."]),
        ("viking", "ab 12", ["ab", "Ġ", "1", "2"]),
    ],
)
def test_splits_by_example(name: str, text: str, want: list[str]) -> None:
    assert pieces(pre_tokenizer(SPLITS[name]), text) == want


def test_the_real_qwen_and_gpt2_vocabularies_equal_transformers() -> None:
    prose = (DATA / "wikitext2" / "valid.txt").read_text(encoding="utf-8")[:100_000].splitlines() if DATA.is_dir() else []
    for name, cls in (("qwen2", transformers.Qwen2Tokenizer), ("gpt-2", transformers.GPT2Tokenizer)):
        with GGUFFile(data_file(f"tokenizer_vectors/ggml-vocab-{name}.gguf")) as file:
            tokenizer, metadata = Tokenizer.from_gguf(file.metadata), file.metadata
            tokens = metadata["tokenizer.ggml.tokens"].tolist()
            merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"].tolist()]
        oracle = cls(vocab={text: token for token, text in enumerate(tokens)}, merges=merges)
        for text in [*HARD, *prose]:
            ids = oracle.encode(text, add_special_tokens=False)
            assert tokenizer.encode(text, add_special=False) == ids
            assert tokenizer.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.weights
def test_smollm2_digits_and_ends() -> None:
    with GGUFFile(model_file("SmolLM2-135M-Instruct.Q4_1.gguf")) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    assert [tokenizer.token_text(token) for token in tokenizer.encode("in 2024")] == ["in", "Ġ", "2", "0", "2", "4"]
    assert {tokenizer.token_text(token) for token in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    for text in HARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def spm_backend() -> Backend:
    """Llama-like: ▁ before the text, bytes for what is not in the vocabulary, BOS."""
    metadata = sentence_piece()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [("t", "h"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("水", "轮")]
    vocab = {text: token for token, text in enumerate(tokens)}
    merges = [pair for pair in merges if "".join(pair) in vocab]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return backend


def word_piece_backend() -> Backend:
    words = [
        text[1:] if text[0] == "▁" else text if text[0] == "[" else "##" + text
        for text in word_piece()["tokenizer.ggml.tokens"]
    ]
    backend = Backend(models.WordPiece({text: token for token, text in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    around = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return backend


def byte_level_backend() -> Backend:
    backend = Backend.from_str(trained_byte_level().to_str())
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


BACKENDS = {"bytes": byte_level_backend, "spm": spm_backend, "wordpiece": word_piece_backend}
NAMES = {
    "bytes": {"eos_token": "<|im_end|>", "chat_template": "hi"},
    "spm": {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"},
    "wordpiece": {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
}


def save(folder: Path, kind: str, **changes: Any) -> Path:
    BACKENDS[kind]().save(str(folder / "tokenizer.json"))
    names = {**NAMES[kind], "tokenizer_class": "PreTrainedTokenizerFast", **changes}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_a_folder_equals_transformers(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, kind))
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in [*TEXTS, "the wheels, turning the <think> wheel.", "a</s>b<|im_end|>c"]:
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special=False) == oracle.encode(text, add_special_tokens=False)
        for skip in (True, False):
            want = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special=skip) == want
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.special_ids == set(oracle.all_special_ids) | (set() if kind != "bytes" else {0, 1, 2})


def test_control_tokens_of_a_folder_can_be_read_as_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, "bytes"))
    ids = tokenizer.encode("<|im_end|><think>", parse_special=False)
    assert tokenizer.id_of("<|im_end|>") not in ids
    assert tokenizer.id_of("<think>") in ids
    assert tokenizer.decode(ids) == "<|im_end|><think>"


def test_companion_files_set_special_tokens_and_templates(tmp_path: Path) -> None:
    save(tmp_path, "bytes", add_eos_token=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    end = tokenizer.id_of("<|im_end|>")
    assert tokenizer.eos_ids == {0, 5, end}
    assert tokenizer.encode("a")[-1] == end
    assert tokenizer.chat_template == "hi"
    (tmp_path / "chat_template.jinja").write_text("ho")
    assert Tokenizer.from_folder(tmp_path).chat_template == "ho"
    save(tmp_path, "spm", add_bos_token=False)
    assert Tokenizer.from_folder(tmp_path).encode("the", add_special=True)[0] != 1
    save(tmp_path, "spm", chat_template=[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(tmp_path).chat_template == "d"


def test_a_bad_folder_is_a_one_line_error(tmp_path: Path) -> None:
    assert SameError is TokenizerError
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Martian"}}')
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    for changes, message in (
        ({"bos_token": "<nowhere>"}, "not in the vocabulary"),
        ({"bos_token": 5}, "must be text"),
        ({"chat_template": 5}, "must be text"),
    ):
        save(tmp_path, "spm", **changes)
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.from_folder(tmp_path)
    save(tmp_path, "spm")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(TokenizerError, match="must be token ids"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="JSON object"):
        Tokenizer.from_folder(tmp_path)
    odd = byte_level_backend()
    odd.decoder = decoders.CTC()
    odd.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="decoder 'CTC' is not supported"):
        Tokenizer.from_folder(tmp_path)


def test_the_trained_vocabulary_is_really_merged() -> None:
    assert len(backend_model(trained_byte_level())["merges"]) > 100
