"""Opening of a model's files by name: weights, tokenizer, chat template, default settings. Needs no torch."""

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.data.config import ModelConfig
from headrace.data.progress import Progress
from headrace.data.settings import ModelSettings
from headrace.models.configs import read_config
from headrace.models.rope_scaling import scaling_note
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.weights import catalog, hub, names
from headrace.weights.defaults import Defaults, defaults_of, family_of, from_name, gguf_settings, own_settings
from headrace.weights.ggml import GGMLFile
from headrace.weights.gguf import GGUFFile
from headrace.weights.ranking import Ranker, is_ranker, read_ranker, with_separator
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.folder import QuantizedFolder, open_weights
from headrace.weights.sentence import Sentence, read_sentence, unread_outputs
from headrace.weights.source import HEADS_INFO, LFS_POINTER, WeightError, is_lfs_pointer, trained
from headrace.weights.store import catalog_entry


@dataclass(frozen=True, slots=True)
class TextProcessing:
    """Tokenizer, chat template and end tokens of a model."""

    tokenizer: Tokenizer
    template: ChatTemplate
    eos_ids: frozenset[int]


@dataclass(slots=True)
class Opened:
    """A model's open files, before its weights are read.

    `tokenizer`, `template` and `eos_ids` load the vocabulary at the first access, and raise its errors; `load_tokenizer`
    starts that in a thread.
    generation: generation_config.json. defaults: sampling settings for requests without any. system: default system prompt.
    own_template: replaces the file's. sentence: how hidden rows become an embedding. parse_special: control tokens inside
    messages are parsed.
    """

    name: str
    path: Path
    source: GGUFFile | SafetensorsFolder | QuantizedFolder
    config: ModelConfig
    generation: Mapping[str, Any] = field(default_factory=dict)
    defaults: Defaults = field(default_factory=dict)
    system: str | None = None
    own_template: str | None = None
    sentence: Sentence = field(default_factory=lambda: Sentence("last"))
    parse_special: bool = False
    _words: Future[TextProcessing] | None = None
    _ranker: tuple[Ranker | None] | None = None

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with the model's system prompt in front if they have none."""
        if not self.system or (messages and messages[0].get("role") in ("system", "developer")):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    @property
    def activations(self) -> str:
        """Rounding of the inputs of integer weights that the model's folder requires; "auto" if it does not."""
        return self.source.activations if isinstance(self.source, QuantizedFolder) else "auto"

    def settings_summary(self, settings: ModelSettings) -> str:
        """Text for the user about settings that change the model's numbers, and about parts of its files that are not read."""
        return self.rounding_summary(settings.activations) + scaling_note(self.config, settings.rope) + self._unread_summary()

    def _unread_summary(self) -> str:
        if isinstance(self.source, (SafetensorsFolder, QuantizedFolder)) and self.source.text_only:
            return ", text only (images are not read)"
        if unread := unread_outputs(self.path):
            return f", dense embeddings only ({' and '.join(unread)} not read)"
        return ""

    def rounding_summary(self, given: str) -> str:
        """Text about that rounding for the user; empty if the caller chose another one."""
        if given != "auto" or self.activations == "auto":
            return ""
        return f", activations by {self.activations} as the folder asks (--activations group: by 32)"

    @property
    def pooling(self) -> str:
        """Pooling of embeddings: first, last or mean."""
        return self.sentence.pooling

    @property
    def ranker(self) -> Ranker | None:
        """Head and template of a reranker, None of another model. Raises WeightError if the head is missing or broken."""
        if self._ranker is None:
            ranks = is_ranker(self.path, self.source, self.config)  # of other models the vocabulary may still be loading
            self._ranker = (read_ranker(self.source, self.config, self.tokenizer) if ranks else None,)
        return self._ranker[0]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.load_tokenizer().result().tokenizer

    @property
    def template(self) -> ChatTemplate:
        return self.load_tokenizer().result().template

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.load_tokenizer().result().eos_ids

    def load_tokenizer(self) -> Future[TextProcessing]:
        """Start loading the vocabulary in a thread, once. Returns its future."""
        if self._words is None:
            reader = ThreadPoolExecutor(1, "vocabulary")
            self._words = reader.submit(_load_text_processing, self)
            reader.shutdown(wait=False)
        return self._words


def open_model(
    model: str | Path, progress: Progress | None = None, *, download: bool = True, parse_special: bool = False
) -> Opened:
    """Find (or pull) a model and open it: a catalog name, a .gguf path, a folder, a hub id.

    Raises HubError, WeightError, TokenizerError, TemplateError: one clear line each.
    """
    opened = open_files(model, progress, download=download, parse_special=parse_special)
    opened.load_tokenizer().result()
    return opened


def open_files(
    model: str | Path,
    progress: Progress | None = None,
    *,
    download: bool = True,
    parse_special: bool = False,
    rope: str | None = None,
) -> Opened:
    """Like `open_model`, but the vocabulary is loaded later. parse_special: control tokens inside messages are parsed.

    rope: as in `read_config`.
    """
    entries, named = catalog.load(), names.find(str(model))
    target = str(model) if named is None else named.model
    path = hub.resolve(target, entries=entries, progress=progress, download=download)
    entry = entries.get(target) or catalog_entry(path, entries)
    source = open_weights(path)
    config = read_config(source, rope)
    generation = {} if isinstance(source, (GGUFFile, GGMLFile)) else _read_json(path / "generation_config.json")
    opened = Opened(
        name=str(model),
        path=path,
        source=source,
        config=config,
        generation=generation,
        defaults={} if config.encoder else _defaults(str(model), path, source, config, generation, entry, named),
        own_template=named.template if named is not None else None,
        system=named.system if named and named.system is not None else entry.chat.system if entry is not None else None,
        sentence=read_sentence(path, source, config),
        parse_special=parse_special,
    )
    if config.token_types > 1 and is_ranker(path, source, config):
        opened.config = with_separator(config, opened.tokenizer)
    return opened


def _defaults(
    model: str,
    path: Path,
    source: GGUFFile | SafetensorsFolder | QuantizedFolder,
    config: ModelConfig,
    generation: Mapping[str, Any],
    entry: catalog.Entry | None,
    named: names.Name | None,
) -> Defaults:
    if isinstance(source, GGUFFile):
        own, titles = gguf_settings(source.metadata), [source.metadata.get(f"general.{key}") for key in ("basename", "name")]
    else:
        own, titles = own_settings(generation), [source.config.get("_name_or_path")]
        # Without sampling settings an encoder-decoder is greedy.
        if config.source is not None:
            own = {"temperature": 0.0, **own}
    called = [path.name, *(name for name in titles if isinstance(name, str))]
    defaults = defaults_of(entry, model, own, family_of(catalog.families(), config.architecture, called))
    return defaults if named is None else {**defaults, **from_name(named.sampling)}


def _load_text_processing(opened: Opened) -> TextProcessing:
    source = opened.source
    if isinstance(source, GGUFFile):
        tokenizer = Tokenizer.from_gguf(source.metadata)
    elif isinstance(source, GGMLFile):
        tokenizer = Tokenizer.from_words(source.words, source.controls, source.controls[0])
    else:
        _refuse_pointers(source.path)
        tokenizer = Tokenizer.from_folder(source.path)
    template = ChatTemplate.of(tokenizer, opened.own_template)
    eos_ids = frozenset(tokenizer.eos_ids) | _ids(opened.generation.get("eos_token_id"))
    return TextProcessing(tokenizer, template.trusting() if opened.parse_special else template, eos_ids)


def _refuse_pointers(folder: Path) -> None:
    """Raise WeightError for a file of the tokenizer that is a Git LFS pointer; a template would be used as its text."""
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("*.spm")]):
        if is_lfs_pointer(path):
            raise WeightError(f"{path}: {LFS_POINTER}")


def open_companion(
    model: str | Path, target: Opened, role: str, progress: Progress | None = None, rope: str | None = None
) -> Opened:
    """Open another model for the target. rope: as in `read_config`.

    Raises ValueError if their vocabularies or their windows of sound differ, and the errors of `open_model`.
    """
    opened = open_files(model, progress, rope=rope)
    if difference := _sound_differs(opened.config, target.config):
        raise ValueError(
            f"{model} cannot be the {role} of {target.name}: {difference}; choose a smaller model of the same family"
        )
    if opened.path != target.path and (difference := opened.tokenizer.differs(target.tokenizer)):
        raise ValueError(
            f"{model} cannot be the {role} of {target.name}: their vocabularies differ ({difference}); "
            "choose a smaller model of the same family"
        )
    return opened


def _sound_differs(config: ModelConfig, target: ModelConfig) -> str:
    """Describe how the sound that a model reads differs from that of the target; empty if both read the same, or none."""
    mine, theirs = (None if each.source is None else each.source.audio for each in (config, target))
    if mine is None or theirs is None:
        return "" if mine == theirs else f"{_input_of(config)}, and the target {_input_of(target)}"
    if mine.bins != theirs.bins:
        return f"it reads {mine.bins} mel bins, and the target {theirs.bins}"
    if mine != theirs:
        return f"its windows have {mine.rows:,} log-mel rows, and those of the target {theirs.rows:,}"
    # Timestamps need not be in the tokenizer.
    sizes = config.vocab_size, target.vocab_size
    return "" if sizes[0] == sizes[1] else f"its vocabulary has {sizes[0]:,} tokens, and that of the target {sizes[1]:,}"


def _input_of(config: ModelConfig) -> str:
    if config.source is None:
        return "has no encoder"
    return "reads text" if config.source.audio is None else "reads sound"


def is_heads(folder: str | Path | None) -> bool:
    """Whether this is a folder of trained heads."""
    return folder is not None and (Path(folder) / HEADS_INFO).is_file()


def missing_heads_error(folder: str | Path, what: str, info: str) -> str:
    """Error text for a folder without the file `info` of the expected kind (`what`)."""
    place = Path(folder)
    if not place.is_dir():
        return f"{place}: there is no such folder"
    other = trained(place)
    return f"{place} {other}, and no {what}" if other else f"{place} has no {what} ({info} is missing)"


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read ({error}); repair or remove it") from None
    return data if isinstance(data, dict) else {}


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool))
