"""Command transcribe: the text of sound files, with times."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headrace.cli.help import short_help
from headrace.cli.opening import look_at, open_llm
from headrace.cli.options import HelperOptions, ModelName, with_groups
from headrace.cli.output import printable, say, status
from headrace.data.progress import Moving, Progress

STDIN = "-"
# Of the files of a folder that are read.
SUFFIXES = set(
    ".wav .wave .flac .mp3 .ogg .oga .opus .mp4 .m4a .mov .webm .mkv .mka .aac .aif .aiff .amr .caf .mpga .mpeg".split()
)


@dataclass
class SubtitleOptions:
    """Layout of subtitles by the times of words."""

    max_line: Annotated[int, typer.Option(min=0, help="Characters of a line of srt and vtt; 0: whole segments.")] = 0
    max_lines: Annotated[int, typer.Option(min=0, help="Lines of a subtitle, with --max-line; 0: no limit.")] = 0
    max_words: Annotated[int, typer.Option(min=0, help="Words of a subtitle, without --max-line; 0: no limit.")] = 0
    highlight: Annotated[bool, typer.Option("--highlight", help="Underline each word while it is spoken.")] = False

    def layout(self, output_format: str, words: bool) -> Any:
        """The layout of subtitles. Raises typer.BadParameter for options that have no effect."""
        from headrace.audio.text_formats import PLAIN, SUBTITLES, Layout

        layout = Layout(**asdict(self))
        if layout == PLAIN:
            if words and output_format == "txt":
                raise typer.BadParameter("--word-times: txt shows no times; add --format json, srt, vtt or tsv")
            return layout
        if output_format not in SUBTITLES or not words:
            raise typer.BadParameter(
                "--max-line, --max-lines, --max-words and --highlight lay out subtitles by words; add --word-times and "
                "--format srt or vtt"
            )
        if self.max_lines and not self.max_line:
            raise typer.BadParameter("--max-lines counts lines of --max-line; add it")
        if self.max_words and self.max_line:
            raise typer.BadParameter("--max-words and --max-line exclude each other; give one")
        return layout


@dataclass
class SpeechOptions:
    """How speech is found and cut into windows, and its languages."""

    hotwords: Annotated[str, typer.Option(help="Text before every window: names and terms that occur.")] = ""
    languages: Annotated[
        str, typer.Option(metavar="LIST", help="Languages to choose from, as en,fr (default: all of the model).")
    ] = ""
    multilingual: Annotated[bool, typer.Option("--multilingual", help="Detect the language of each window.")] = False
    long: Annotated[
        Literal["sequential", "chunked"],
        typer.Option(help="sequential: windows one after the other. chunked: cut in silences, decoded together; faster."),
    ] = "sequential"
    vad: Annotated[bool, typer.Option("--vad/--no-vad", help="Skip silence, in which models invent text.")] = True
    audio_context: Annotated[
        Literal["full", "auto"],
        typer.Option(help="auto: encode a file of less than 30 s by its length; faster, and the text may differ (lossy)."),
    ] = "full"
    beams: Annotated[
        int, typer.Option(min=1, max=16, help="Beams at temperature 0; 1: greedy. 5: openai-whisper's choice.")
    ] = 1
    words: Annotated[bool, typer.Option("--word-times", help="Find the times of words (json; subtitles by words).")] = False

    def settings(self) -> dict[str, Any]:
        """By the names of SpeechSettings."""
        codes = tuple(code.strip() for code in self.languages.split(",") if code.strip())
        settings = {**asdict(self), "languages": codes}
        return settings | {"short_context": settings.pop("audio_context") == "auto"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "language task output_format output prompt quantize threads",
        ("headrace transcribe whisper-base talk.wav --quantize int8", "The text, as its windows end."),
        ("headrace transcribe whisper-base recordings -o texts --format srt", "After a stop the same command continues."),
    )
    app.command(cls=short)(with_groups(transcribe))


def transcribe(
    model: ModelName,
    options: HelperOptions,
    speech: SpeechOptions,
    subtitles: SubtitleOptions,
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Sound files, folders of them, or - for stdin.")],
    language: Annotated[str, typer.Option(help="Spoken language (en, fr, …), or auto to detect it for each file.")] = "auto",
    task: Annotated[
        Literal["transcribe", "translate"], typer.Option(help="translate: into English, with a multilingual model.")
    ] = "transcribe",
    output_format: Annotated[
        Literal["txt", "json", "srt", "vtt", "tsv"], typer.Option("--format", help="txt, json (all details), srt, vtt or tsv.")
    ] = "txt",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", file_okay=False, help="Write FOLDER/NAME.FORMAT.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text before the first window: names, spelling, style.")] = "",
    temperature: Annotated[
        str, typer.Option(metavar="LIST", help="Temperatures, tried until the text passes the checks.")
    ] = "0,0.2,0.4,0.6,0.8,1",
    condition: Annotated[
        bool, typer.Option("--condition/--no-condition", help="Give the text of each window to the next one.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of temperatures above 0.")] = 0,
    channels: Annotated[
        Literal["mix", "split"], typer.Option(help="split: each channel alone, as in recorded calls; segments name it.")
    ] = "mix",
    partial: Annotated[bool, typer.Option("--partial", help="Use a cut or damaged file up to there.")] = False,
    together: Annotated[int, typer.Option(min=1, max=64, help="Files, or windows of chunked files, side by side.")] = 8,
) -> int:
    """Transcribe sound files with a speech model (Whisper), or translate them into English.

    One file without -o is printed as its windows end, several ones after each other. With -o files that have a result are
    skipped, so the same command goes on after a stop. A file that cannot be read is reported, the others are transcribed, and
    the exit code is 1. WAV needs nothing else; FLAC, MP3, Ogg, MP4, WebM and others need the extra headrace[audio].

    JSON has segments with their times, log-probabilities and temperatures, and each window that was skipped or decoded again.
    """
    options.check()
    settings: dict[str, Any] = {**speech.settings(), "task": task, "prompt": prompt, "condition": condition, "seed": seed}
    settings |= {"language": None if language == "auto" else language, "temperatures": _temperatures(temperature)}
    reading: dict[str, Any] = {"channels": channels, "partial": partial, "together": together}
    layout = subtitles.layout(output_format, speech.words)
    todo = list(_pending(files, output, output_format))
    if not todo:
        say(f"all files are done: {output}")
        return 0
    _check_model(model, settings)
    llm = open_llm(model, options, speech=True)
    status().finish()
    writer = Writer(todo, output, output_format, layout)
    with contextlib.closing(llm.transcribe_all((_sound(one) for one, _ in todo), **reading, **settings)) as events:
        for number, event in events:
            writer.take(number, event)
    writer.progress.finish()
    return 1 if writer.failed else 0


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--temperature takes numbers, as in 0,0.4,0.8, not {text!r}") from None
    if not all(0 <= value <= 2 for value in values):
        raise typer.BadParameter(f"--temperature takes numbers from 0 to 2, not {text!r}")
    return values


def _check_model(model: str, settings: dict[str, Any]) -> None:
    """Raise ValueError if the model reads no sound, or lacks the language or task."""
    from headrace.audio.transcription import SpeechSettings
    from headrace.startup.speech import speech_model

    opened = look_at(model)
    if opened is None:
        raise ValueError(f"{model} is a folder of trained heads, so it cannot transcribe; open a speech model")
    SpeechSettings(**settings)
    for language in settings["languages"] or [settings["language"]]:
        speech_model(opened)[1].check(language, settings["task"])


def _pending(files: list[str], output: Path | None, suffix: str) -> Iterator[tuple[str, Path | None]]:
    """The files without a result, each with the path of its result. Raises ValueError, typer.BadParameter."""
    named: dict[Path, str] = {}
    for file in _expanded(files):
        if output is None:
            yield file, None
            continue
        target = output / f"{'stdin' if file == STDIN else Path(file).stem}.{suffix}"
        if target in named:
            raise typer.BadParameter(f"{named[target]} and {file} would both be written to {target}; rename one")
        named[target] = file
        if not target.exists():
            yield file, target


def _expanded(files: list[str]) -> Iterator[str]:
    for file in files:
        if not Path(file).is_dir():
            yield file
            continue
        inside = sorted(str(path) for path in Path(file).iterdir() if path.suffix.lower() in SUFFIXES)
        if not inside:
            raise ValueError(f"{file}: has no sound files")
        yield from inside


def _sound(file: str) -> Any:
    return sys.stdin.buffer.read() if file == STDIN else file


class Writer:
    """Prints or writes the transcripts, in the order of the files, and shows the progress."""

    def __init__(self, todo: list[tuple[str, Path | None]], folder: Path | None, output_format: str, layout: Any) -> None:
        from headrace.audio.text_formats import FORMATS

        self.failed = 0
        self._todo = todo
        self._write = partial(FORMATS[output_format], layout=layout)
        # Text of one file is printed as its windows end.
        self._streams = output_format == "txt" and len(todo) == 1 and folder is None
        self._ended: dict[int, Any] = {}
        self._next = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        shown = folder is not None or not sys.stdout.isatty()
        self.progress = status() if shown else Progress()
        self.progress.start("transcribing", len(todo), unit="files")

    def take(self, number: int, event: Any) -> None:
        """Handle an event of file `number`."""
        file, target = self._todo[number]
        if hasattr(event, "start"):  # a segment
            if self._streams:
                from headrace.audio.text_formats import line

                print(printable(line(event)), flush=True)
            elif isinstance(self.progress, Moving):
                self.progress.advance(0, f"{Path(file).name} {event.end:.0f} s")
            return
        if isinstance(event, Exception):
            self._report(file, event)
        elif target is not None:
            from headrace.weights.atomic_file import atomic_write

            with atomic_write(target) as part:
                part.write_text(self._write(event), encoding="utf-8")
        self.progress.advance(1)
        self._ended[number] = None if target is not None else event
        self._print_ended()

    def _report(self, file: str, error: Exception) -> None:
        if not isinstance(error, ValueError | OSError):
            raise error
        self.failed += 1
        text = f"{file}: {os.strerror(error.errno)}" if isinstance(error, OSError) and error.errno else str(error)
        say(f"headrace: {text}")

    def _print_ended(self) -> None:
        """Print the transcripts that are next in order."""
        while self._next in self._ended:
            event, (file, _) = self._ended.pop(self._next), self._todo[self._next]
            self._next += 1
            if event is None or isinstance(event, Exception) or self._streams:
                continue
            if len(self._todo) > 1:
                print(f"==> {printable(file)} <==")
            print(self._write(event), end="", flush=True)
