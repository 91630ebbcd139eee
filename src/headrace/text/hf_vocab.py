"""The vocabulary of a Hugging Face folder: tokenizer.json, or source.spm and vocab.json of a Marian model (`text.marian`).

Also reads tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json, chat_template.jinja and
additional_chat_templates/*.jinja, if they exist. Executes nothing from the folder.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from headrace.text.content_marks import MARK, is_structure
from headrace.text.marian import is_marian, read_marian
from headrace.text.sentencepiece import without_names
from headrace.text.vocabulary import END_OF_TURN, TokenizerError, Vocabulary, clear_errors, drop_marks

MAX_BYTES = 256 << 20
PROBE = "a"
# Folder of named chat templates.
TEMPLATES = "additional_chat_templates"


def read_folder(folder: Path) -> Vocabulary:
    """Read the vocabulary of a folder. Raises TokenizerError."""
    path = folder / "tokenizer.json"
    if not path.is_file() and is_marian(folder):
        return read_marian(folder)
    if not path.is_file():
        raise TokenizerError(
            f"{folder} has no tokenizer.json; save the tokenizer in that form (save_pretrained) next to the model"
        )
    if path.stat().st_size > MAX_BYTES:
        raise TokenizerError(f"{path} is larger than {MAX_BYTES >> 20} MiB; the file is damaged")
    with clear_errors(f"{path} cannot be read"):
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_padding()
        backend.no_truncation()
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    names = {**_object(folder / "special_tokens_map.json"), **_object(folder / "tokenizer_config.json")}
    added = backend.get_added_tokens_decoder()
    bos = _named_id(backend, names, "bos_token")
    eos = _named_id(backend, names, "eos_token")
    prefix, suffix = _around(backend, path)
    special = frozenset(token for token, text in added.items() if text.special)
    ends = {eos, *_generation_ends(folder), *(token for token, text in added.items() if text.content in END_OF_TURN)}
    return Vocabulary(
        backend=backend,
        plain=lambda: _without_special(backend),
        unmarking=lambda: _unmarking(backend),
        size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        spelling=_spelling(decoder, path),
        literal_ids=frozenset(added),
        special_ids=special,
        silent_ids=frozenset(),
        prefix=_flagged(names, "add_bos_token", prefix, bos),
        suffix=_flagged(names, "add_eos_token", suffix, eos),
        strip_space=_strips_space(decoder),
        bos_id=bos,
        eos_id=eos,
        eos_ids=frozenset(token for token in ends if token is not None),
        templates=_templates(folder, names),
        between=_between(backend, prefix, suffix),
    )


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with clear_errors(f"{path} cannot be read"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


def _named_id(backend: tokenizers.Tokenizer, names: dict[str, Any], key: str) -> int | None:
    """Return the id of the token that a key such as `bos_token` names, as text or as {"content": text}."""
    value = names.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    if not isinstance(text, str):
        raise TokenizerError(f"{key} in the tokenizer's configuration must be text, not {text!r:.40}")
    token = backend.token_to_id(text)
    if token is None:
        raise TokenizerError(f"{key} {text!r:.40} is not in the vocabulary")
    return int(token)


def _generation_ends(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        settings = _object(folder / name)
        text = settings.get("text_config")  # of a model that also reads images
        value = settings.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(token, int) and token >= 0 for token in ids):
                raise TokenizerError(f"eos_token_id in {folder / name} must be token ids, not {value!r:.40}")
            return ids
    return []


def _around(backend: tokenizers.Tokenizer, path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token ids that the tokenizer's post-processor adds before and after a text."""
    with clear_errors(f"{path} cannot be used"):
        inner = backend.encode(PROBE, add_special_tokens=False).ids
        whole = backend.encode(PROBE, add_special_tokens=True).ids
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return tuple(whole[:start]), tuple(whole[start + len(inner) :])
    raise TokenizerError(f"{path}: its post_processor changes the text's own tokens, which is not supported")


def _between(backend: tokenizers.Tokenizer, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> tuple[int, ...]:
    """Return the token ids that the post-processor adds between two texts; empty if it has no form for pairs."""
    try:
        inner = backend.encode(PROBE, add_special_tokens=False).ids
        whole = backend.encode(PROBE, PROBE, add_special_tokens=True).ids
    except Exception:
        return ()
    start, end = len(prefix) + len(inner), len(whole) - len(suffix) - len(inner)
    fits = tuple(whole[: len(prefix)]) == prefix and tuple(whole[len(whole) - len(suffix) :]) == suffix
    return tuple(whole[start:end]) if fits and whole[end : end + len(inner)] == inner else ()


def _flagged(names: dict[str, Any], flag: str, added: tuple[int, ...], token: int | None) -> tuple[int, ...]:
    """Apply an explicit add_bos_token or add_eos_token, which overrides the post-processor as in transformers."""
    wanted = names.get(flag)
    if wanted is True and token is not None and token not in added:
        return (token,)
    if wanted is False and added == (token,):
        return ()
    return added


def _copy(backend: tokenizers.Tokenizer, added: list[AddedToken], normalizer: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer with the same model and other added tokens, whose ids follow the order of the list."""
    copy = tokenizers.Tokenizer(backend.model)
    if normalizer is not None:
        copy.normalizer = normalizer
    split = backend.pre_tokenizer
    if isinstance(backend.model, models.Unigram):
        split = without_names(split, (text.content for text in backend.get_added_tokens_decoder().values() if text.special))
    if split is not None:
        copy.pre_tokenizer = split
    copy.add_tokens(added)
    return copy


def _without_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer without its control tokens. Other added tokens keep their ids."""
    added = []
    for token, text in sorted(backend.get_added_tokens_decoder().items()):
        if not text.special:
            added.append(text)
        elif backend.model.token_to_id(text.content) is None:
            # A placeholder that keeps the id; no text contains a bare mark.
            added.append(AddedToken(f"{MARK}{token}", normalized=False))
    return _copy(backend, added, backend.normalizer)


def _unmarking(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer for text with marks."""
    tokens = backend.get_added_tokens_decoder()
    added = [_unnormalized(text, backend.normalizer) for _, text in sorted(tokens.items())]
    return _copy(backend, added, drop_marks(backend.normalizer))


def _unnormalized(text: AddedToken, normalizer: Any) -> AddedToken:
    """Return a token that is matched before normalization, which removes the marks."""
    if not text.normalized or (not text.special and not is_structure(text.content)):
        return text
    return AddedToken(text.content, single_word=text.single_word, lstrip=text.lstrip, rstrip=text.rstrip, normalized=False)


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def _spelling(decoder: dict[str, Any], path: Path) -> str:
    kinds = {step.get("type") for step in _steps(decoder)}
    for kind, spelling in (("ByteLevel", "bytes"), ("WordPiece", "wordpiece"), ("ByteFallback", "spm"), ("Metaspace", "spm")):
        if kind in kinds:
            return spelling
    known = "ByteLevel, ByteFallback, Metaspace, WordPiece"
    raise TokenizerError(f"{path}: its decoder {decoder.get('type')!r} is not supported; known: {known}")


def _strips_space(decoder: dict[str, Any]) -> bool:
    return any(
        (step.get("type") == "Strip" and step.get("start", 0) > 0)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        or step.get("type") == "WordPiece"
        for step in _steps(decoder)
    )


def _templates(folder: Path, names: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. As in transformers, template files replace those of tokenizer_config.json."""
    paths = {path.stem: path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        paths.setdefault("default", folder / "chat_template.jinja")
    templates: dict[str, str] = {}
    for name, path in paths.items():
        with clear_errors(f"{path} cannot be read"):
            templates[name] = path.read_text(encoding="utf-8")
    if templates:
        return templates
    value = names.get("chat_template")
    if isinstance(value, list):
        value = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
    elif value is not None:
        value = {"default": value}
    for name, template in (value or {}).items():
        if not isinstance(template, str):
            raise TokenizerError(f"chat_template {name!r:.40} in tokenizer_config.json must be text")
        templates[name] = template
    return templates
