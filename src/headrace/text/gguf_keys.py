"""The vocabulary of a Hugging Face folder as metadata of a GGUF file: the inverse of text.gguf_vocab, for byte-level BPE.

The result is read back and must split and end texts as the folder does; otherwise TokenizerError.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from headrace.text.gguf_vocab import CONTROL, KEY, NORMAL, TEMPLATE, UNUSED, USER_DEFINED, read_gguf
from headrace.text.hf_vocab import read_folder
from headrace.text.pretokenizers import GPT2, SPLITS
from headrace.text.vocabulary import TokenizerError, Vocabulary

PROBES = (
    "The wheel's turning, isn't it? I'M SURE THEY'LL see 1234567 of 3.14159.",
    "水渠里的水推动水轮。größer naïve café e\u0301 ½ ٣",
    "def f(x):\n\treturn  x ** 2\r\n\n   # ...!!!\n",
    "<|im_start|>user\nhello<|im_end|>\n🚀🦙 \u200b\xa0<s></s>",
)


def tokenizer_keys(folder: Path, rows: int) -> dict[str, Any]:
    """Return the keys `tokenizer.*`. rows: of the embedding table; ids beyond the vocabulary become unused tokens.

    Raises TokenizerError if GGUF cannot hold the vocabulary, or needs data that tokenizer.json lacks.
    """
    vocabulary = read_folder(folder)
    if vocabulary.spelling != "bytes":
        raise TokenizerError(
            f"{folder}: GGUF keeps scores of SentencePiece tokens, which tokenizer.json does not have; begin with the model's "
            "own .gguf file"
        )
    state = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    if vocabulary.size > rows:
        raise TokenizerError(f"{folder}: tokenizer.json has {vocabulary.size} tokens and the model a table of {rows}")
    texts, types = _tokens(state, rows)
    keys: dict[str, Any] = {
        KEY + "model": "gpt2",
        KEY + "pre": split_name(state, folder),
        KEY + "tokens": texts,
        KEY + "token_type": np.array(types, np.int32),
        KEY + "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]],
        **_end_keys(vocabulary, texts),
    }
    keys |= {TEMPLATE if name == "default" else f"{TEMPLATE}.{name}": text for name, text in vocabulary.templates.items()}
    if named := [name for name in vocabulary.templates if name != "default"]:
        keys["tokenizer.chat_templates"] = named
    _check_same(vocabulary, read_gguf(keys), folder)
    return keys


def _tokens(state: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of every id."""
    texts, types = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for text, token in state["model"]["vocab"].items():
        texts[token], types[token] = text, NORMAL
    for added in state.get("added_tokens", []):
        texts[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    return texts, types


def _end_keys(vocabulary: Vocabulary, texts: list[str]) -> dict[str, Any]:
    """Return the keys of the tokens that begin and end texts."""
    keys: dict[str, Any] = {KEY + "add_bos_token": bool(vocabulary.prefix)}
    if vocabulary.suffix:
        keys[KEY + "add_eos_token"] = True
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id}
    others = sorted(vocabulary.eos_ids - {vocabulary.eos_id})
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    return keys | {f"{KEY}{name}_token_id": token for name, token in ids.items() if token is not None}


def split_name(state: dict[str, Any], folder: Path) -> str:
    """Return GGUF's name for the splitting of a tokenizer.json. Raises TokenizerError if GGUF has none."""
    patterns: list[str] = []
    # Patterns applied to the byte alphabet, once the text is spelled in it.
    spelled: list[str] | None = None
    for step in _steps(state.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        if kind == "ByteLevel" and spelled is None and not step.get("add_prefix_space"):
            patterns += [GPT2] if step.get("use_regex", True) else []
            spelled = []
            continue
        into = patterns if spelled is None else spelled
        if kind == "Digits":
            into.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert") and "Regex" in step["pattern"]:
            into.append(step["pattern"]["Regex"])
        else:
            raise _no_name(folder, f"{kind} is not known")
    forms = [str(step.get("type")) for step in _steps(state.get("normalizer"), "normalizers")]
    if forms not in ([], ["NFC"]) or spelled is None:
        raise _no_name(folder, "it is not a byte-level BPE" if spelled is None else f"text is normalised by {', '.join(forms)}")
    wanted = (tuple(patterns), tuple(spelled), forms == ["NFC"], bool(state["model"].get("ignore_merges")))
    for name, split in SPLITS.items():
        if (split.patterns, split.spelled, split.nfc, split.ignore_merges) == wanted:
            return name
    raise _no_name(folder, "its patterns are others")


def _steps(value: Any, inner: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    return list(value[inner]) if value.get("type") == "Sequence" else [value]


def _no_name(folder: Path, why: str) -> TokenizerError:
    return TokenizerError(
        f"{folder}: GGUF has no name for the way in which tokenizer.json splits text ({why}); begin with the model's .gguf file"
    )


def _check_same(folder: Vocabulary, file: Vocabulary, path: Path) -> None:
    """Raise TokenizerError unless both vocabularies encode and end texts alike."""
    same = (folder.prefix, folder.suffix, folder.bos_id, folder.eos_id, folder.eos_ids) == (
        *(file.prefix, file.suffix, file.bos_id, file.eos_id, file.eos_ids),
    )
    backends = folder.backend, file.backend
    ids = [[backend.encode(text, add_special_tokens=False).ids for text in PROBES] for backend in backends]
    if not same or ids[0] != ids[1]:
        what = "texts are split otherwise" if same else "other tokens begin or end texts"
        raise TokenizerError(
            f"{path}: its vocabulary would not be the same in GGUF ({what}); begin with the model's .gguf file"
        )
