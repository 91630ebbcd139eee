"""Pre-tokenizers of byte-level BPE vocabularies, by their name in `tokenizer.ggml.pre`.

The patterns are data of the models (the `pre_tokenizer` of their tokenizer.json). Another split gives other tokens than in
training, so an unknown name is refused.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from headrace.text.vocabulary import TokenizerError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TITLE = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
SEED_CODER = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
TEKKEN = rf"{_TITLE}|{_CAPS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
GPT4O = rf"{_TITLE}{_CONTRACTIONS}?|{_CAPS}{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
FALCON = (r"[\p{P}$+<=>^~|`]+", GPT2)
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9]{3}")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_NOT_DEEPSEEK = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D8F}\x{16E40}-\x{1DFFF}"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    # Letters with case of an older Unicode version.
    rf"\s?(?:(?![{_NOT_DEEPSEEK}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)


@dataclass(frozen=True, slots=True)
class Split:
    """One way to split text.

    patterns: applied one after the other to the pieces. spelled: the same after the pieces are spelled in the byte alphabet.
    nfc: text is normalized to NFC first. ignore_merges: a word of the vocabulary is one token, whatever its merges.
    add_bos: whether BOS is added if the file has no flag.
    """

    patterns: tuple[str, ...]
    spelled: tuple[str, ...] = ()
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


def _named(split: Split, names: str) -> dict[str, Split]:
    return dict.fromkeys(names.split(), split)


SPLITS = {
    **_named(Split((GPT2,)), "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4 jais trillion"),
    **_named(Split((GPT2,), nfc=True), "mpt olmo"),
    **_named(Split((r"\p{N}", GPT2)), "smollm starcoder refact codeshell exaone minerva-7b"),
    **_named(Split((r"\p{N}", GPT2), nfc=True), "command-r"),
    **_named(
        Split((LLAMA3,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    **_named(Split((LLAMA3,)), "dbrx smaug-bpe chatglm-bpe glm4"),
    **_named(Split((QWEN2,), nfc=True), "qwen2 deepseek-r1-qwen kormo megrez"),
    **_named(Split((QWEN2,)), "stablelm2"),
    **_named(Split((QWEN35,), nfc=True), "qwen35"),
    **_named(Split((SEED_CODER,)), "seed-coder"),
    **_named(Split((TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    **_named(Split((GPT4O,)), "gpt-4o llama4"),
    **_named(Split(DEEPSEEK_V3), "deepseek-v3 hunyuan-dense"),
    **_named(Split(DEEPSEEK_CODER), "deepseek-coder"),
    **_named(Split(FALCON, spelled=(r"\p{N}+", r"[0-9]{3}")), "falcon"),
    **_named(Split(DEEPSEEK_LLM), "deepseek-llm"),
    **_named(Split((BLOOM,)), "bloom poro-chat gpt3-finnish"),
    **_named(Split((BLOOM, r"\p{N}")), "viking"),
    **_named(Split(DEFAULT), "default"),
}


def split_named(name: str) -> Split:
    """Return the split of that name. Raises TokenizerError for an unknown name."""
    if name not in SPLITS:
        raise TokenizerError(f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known: {', '.join(sorted(SPLITS))}")
    return SPLITS[name]


def pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    """Build the pre-tokenizer: patterns, byte alphabet (which has GPT-2's split built in), patterns of the spelled text."""
    last = split.patterns[-1] == GPT2
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=last)
    return pre_tokenizers.Sequence([*_isolate(split.patterns[: -1 if last else None]), spelling, *_isolate(split.spelled)])


def _isolate(patterns: tuple[str, ...]) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]


def normalizer(split: Split) -> normalizers.Normalizer | None:
    """Return the normalizer of a split, None if there is none."""
    return normalizers.NFC() if split.nfc else None
