"""The control tokens of a Whisper model, by their names, and the tokens that it does not write."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.params import TimestampParams
from headrace.text.tokenizer import Tokenizer

LANGUAGE = re.compile(r"<\|([a-z]{2,4})\|>")
ENGLISH_VOCABULARY = 51864  # of the models that know English alone
# As in openai-whisper: symbols that only annotations of sounds have.
SYMBOLS = list('"#()*+/:;<=>@[\\]^_`{|}~「」『』')
SYMBOLS += "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split()
NOTES = "♩♪♫♬♭♮♯"


class LanguageError(ValueError):
    """A language or task that the model does not have."""


@dataclass(frozen=True)
class SpeechTokens:
    """Ids of the control tokens. languages: code -> id; empty for a model that knows English alone. first: timestamp 0.00.

    suppressed: never written. blank: not written first. alignment: (layer, head) of the decoder, whose cross-attention follows
    the sound. translates: the model was trained to translate, not only to transcribe.
    """

    start: int
    end: int
    previous: int | None
    no_speech: int | None
    no_timestamps: int
    tasks: Mapping[str, int]
    languages: Mapping[str, int]
    suppressed: Sequence[int]
    blank: Sequence[int]
    alignment: tuple[tuple[int, int], ...] = ()
    translates: bool = True

    @property
    def first(self) -> int:
        return self.no_timestamps + 1

    def rules(self, latest: int) -> TimestampParams:
        """The rules of a window's output. latest: largest first timestamp, in steps of 0.02 s."""
        return TimestampParams(
            first=self.first, end=self.end, suppressed=tuple(self.suppressed), blank=tuple(self.blank), latest=latest
        )

    def prompt(self, language: str, task: str) -> list[int]:
        """Tokens before a transcript with timestamps."""
        return [self.start, self.languages[language], self.tasks[task]] if self.languages else [self.start]

    def aligned_prompt(self, language: str, task: str, text: Sequence[int]) -> list[int]:
        """A transcript without timestamps. Its first text token comes after the second token of the prompt or later."""
        return [*self.prompt(language, task), self.no_timestamps, *text, self.end]

    def check(self, language: str | None, task: str) -> None:
        """Raise LanguageError for a language or task that the model does not have. language: None to detect it."""
        if not self.languages:
            if language not in (None, "en"):
                raise LanguageError(f"language {language!r}: this model knows English alone; open a multilingual one")
            if task != "transcribe":
                raise LanguageError(f"task {task!r}: this model knows English alone; open a multilingual one")
            return
        if language is not None and language not in self.languages:
            raise LanguageError(f"language {language!r}: choose auto, {', '.join(self.languages)}")
        if task == "translate" and not self.translates:
            raise LanguageError(
                f"task {task!r}: this model was not trained to translate, nor are other turbo and distilled ones; open another"
            )
        if task not in self.tasks:
            raise LanguageError(f"task {task!r}: choose {' or '.join(self.tasks)}")


def speech_tokens(tokenizer: Tokenizer, vocab_size: int, lists: Mapping[str, Any]) -> SpeechTokens:
    """The control tokens of a model. lists: suppress_tokens and begin_suppress_tokens of its files, if they have them.

    Raises LanguageError if the vocabulary lacks a control token.
    """

    def known(*names: str) -> int:
        for name in names:
            if (token := tokenizer.control_id(f"<|{name}|>")) is not None:
                return token
        raise LanguageError(f"the vocabulary has no token <|{names[0]}|>, so this is not a Whisper model; check its tokenizer")

    def optional(*names: str) -> int | None:
        return next((token for name in names if (token := tokenizer.control_id(f"<|{name}|>")) is not None), None)

    start, end, no_timestamps = known("startoftranscript"), known("endoftext"), known("notimestamps")
    languages, tasks = {}, {}
    if vocab_size != ENGLISH_VOCABULARY:
        tasks = {name: token for name in ("transcribe", "translate") if (token := optional(name)) is not None}
        for token in sorted(tokenizer.special_ids):
            if (match := LANGUAGE.fullmatch(tokenizer.token_text(token))) is not None:
                languages[match[1]] = token
    controls = {token for token in tokenizer.special_ids if token <= no_timestamps and token != end}
    given = lists.get("suppress_tokens")
    suppressed = {token for token in given if 0 <= token < vocab_size} if given else _unspoken(tokenizer)
    begin = lists.get("begin_suppress_tokens")
    blank = begin or [*tokenizer.encode(" ", add_special=False), end]
    return SpeechTokens(
        start,
        end,
        optional("startofprev"),
        optional("nospeech", "nocaptions"),
        no_timestamps,
        tasks,
        languages,
        sorted(suppressed | controls),
        [token for token in blank if 0 <= token < vocab_size],
    )


def _unspoken(tokenizer: Tokenizer) -> set[int]:
    """Tokens of symbols that are not spoken."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    tokens = {encode(" -")[0], encode(" '")[0]}
    for symbol in [*SYMBOLS, *NOTES]:
        for ids in (encode(symbol), encode(f" {symbol}")):
            if len(ids) == 1 or symbol in NOTES:
                tokens.add(ids[0])
    return tokens
