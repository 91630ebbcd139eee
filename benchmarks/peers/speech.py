"""Transcription compared with faster-whisper and OpenVINO: word error rates and times. `python -m benchmarks.peers.speech`."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.peers import engines
from benchmarks.word_errors import Words, compare, error_rate, rate_difference
from headrace.bench.competitors import SOURCE, start_worker, worker_command
from headrace.bench.machine import Say, machine
from headrace.bench.worker import EngineProcess
from headrace.cli.options import writable
from headrace.cli.output import print_table, say, status
from headrace.host import cores
from headrace.stats.paired_ratio import ratio

OURS, PEER, OPENVINO = "headrace", "faster-whisper", "openvino"
WAYS = ("sequential", "chunked")
KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording. group: clips of one group have one word error rate."""

    path: Path
    language: str
    text: str
    group: str


@dataclass(slots=True)
class Engine:
    """A loaded engine; words and texts of each clip."""

    name: str
    format: str
    way: str
    process: EngineProcess
    texts: list[str]

    @property
    def title(self) -> str:
        return f"{self.name} {self.format} {self.way}"

    def transcribe(self, clips: Sequence[Clip], factor: float = 1.0) -> tuple[float, list[str]]:
        """Seconds for all clips one after the other, and their texts."""
        prompts = [(str(clip.path), clip.language, factor) for clip in clips]
        answer = self.process.ask(prompts=prompts, new_tokens=1)
        return answer["seconds"], answer["first"]


def peer_engine(place: Path | None) -> engines.PeerEngine:
    """faster-whisper in its own environment, or in `place`."""
    return engines.PeerEngine(PEER, "faster_whisper.py", ("faster-whisper==1.2.1",), {}, reads="folder", place=place)


def openvino_engine(place: Path | None) -> engines.PeerEngine:
    """OpenVINO GenAI in the environment of `benchmarks.peers`, or in `place`."""
    known = engines.ENGINES[OPENVINO]
    return replace(known, worker="openvino_speech.py", settings={}, reads="folder", place=place)


def read_clips(file: Path) -> list[Clip]:
    """Clips of a JSON list of {"file", "lang", "text"}, where paths are relative to it.

    A clip with "source" "joined" is a group alone. Raises ValueError for an entry without these fields, or without its file.
    """
    clips = []
    for number, entry in enumerate(json.loads(file.read_text()), 1):
        if missing := {"file", "lang", "text"} - set(entry):
            raise ValueError(f"{file}: entry {number} lacks {', '.join(sorted(missing))}")
        path = file.parent / entry["file"]
        if not path.exists():
            raise ValueError(f"{file}: entry {number}: no file {path}")
        group = path.stem if entry.get("source") == "joined" else entry["lang"]
        clips.append(Clip(path, entry["lang"], entry["text"], group))
    return clips


def words(text: str, language: str) -> list[str]:
    """Words as OpenAI's normalisers leave them (those of transformers)."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    normalizer = EnglishTextNormalizer({}) if language == "en" else BasicTextNormalizer(remove_diacritics=True)
    return str(normalizer(text)).split()


def start(
    stack: ExitStack,
    model: str,
    engine: engines.PeerEngine | None,
    format: str,
    way: str,
    temperature: float | None,
    **more: Any,
) -> Engine:
    """Start an engine's worker (None: ours) and load the model in it. more: settings of this worker. Raises ValueError."""
    name = OURS if engine is None else engine.name
    command = worker_command(engines.WORKERS / "ours_speech.py") if engine is None else engine.command
    worker = start_worker(stack, f"speech-{name}-{format}-{way}", command, SOURCE if name == OURS else {})
    setting = {"quantize": None if format == "bf16" else format, "long": way, "vad": True, "temperature": temperature}
    setting |= more
    about = worker.ask(model=model, setting=setting, threads=cores(), kv_bytes=KV_BYTES)
    say(f"{name} {format} {way}: {about['about']}")
    return Engine(name, format, way, worker, [])


def errors(clips: Sequence[Clip], texts: Sequence[str]) -> dict[str, list[Words]]:
    """Word edits of each clip, by group."""
    groups: dict[str, list[Words]] = {}
    for clip, text in zip(clips, texts, strict=True):
        edits = compare(words(clip.text, clip.language), words(text, clip.language))
        groups.setdefault(clip.group, []).append(edits)
    return groups


def accuracy(clips: Sequence[Clip], ours: Sequence[Engine], peers: Sequence[Engine], say: Say) -> dict[str, Any]:
    """Word error rates of each engine by group, and our difference to the peer that works the same way."""
    record: dict[str, Any] = {}
    for engine in (*peers, *ours):
        _, engine.texts = engine.transcribe(clips)
        say(f"{engine.title}: transcribed")
        record[engine.title] = {group: asdict(error_rate(each)) for group, each in errors(clips, engine.texts).items()}
    for engine in ours:
        for peer in peers:
            if peer.way != engine.way:
                continue
            mine, other = errors(clips, engine.texts), errors(clips, peer.texts)
            record[f"{engine.title} - {peer.title}"] = {
                "all": asdict(rate_difference([*chain(*mine.values())], [*chain(*other.values())])),
                **{group: asdict(rate_difference(mine[group], other[group])) for group in mine},
            }
    return record


def speed(clips: Sequence[Clip], ours: Sequence[Engine], peers: Sequence[Engine], rounds: int) -> dict[str, Any]:
    """Seconds for the clips, in turns; each round has samples of its own, so that no engine has seen a window."""
    record: dict[str, Any] = {}
    for engine in ours:
        turns = [engine, *(one for one in peers if one.way == engine.way)]
        times: dict[str, list[float]] = {one.name: [] for one in turns}
        for number in range(rounds + 1):
            for one in turns:
                seconds, _ = one.transcribe(clips, 1 - 1e-4 * number)
                times[one.name].append(seconds)
        for peer in turns[1:]:
            seconds_of = {name: sorted(times[name][1:]) for name in (OURS, peer.name)}
            pairs = ratio(times[peer.name][1:], times[OURS][1:])
            record[f"{engine.title}, {peer.name}"] = {"peer": peer.name, "seconds": seconds_of, "ratio": asdict(pairs)}
    return record


def speech(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder of Whisper weights that both engines read.")],
    clips_file: Annotated[Path, typer.Argument(metavar="CLIPS", help="JSON list of file, lang and text of each recording.")],
    formats: Annotated[str, typer.Option(help="Our formats of weights: bf16, int8, int4.")] = "int8",
    ways: Annotated[str, typer.Option(help="Ways of long recordings: sequential, chunked.")] = "sequential,chunked",
    timed: Annotated[str, typer.Option("--time", help="Names of files to measure times of, without suffix.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of times, after one to warm up.")] = 5,
    place: Annotated[Path | None, typer.Option("--peer-env", help="Environment that has faster-whisper.")] = None,
    openvino: Annotated[
        str, typer.Option(metavar="FOLDER", help="The same model as optimum-intel exports it in int8, for OpenVINO GenAI.")
    ] = "",
    openvino_place: Annotated[Path | None, typer.Option("--openvino-env", help="Environment that has OpenVINO GenAI.")] = None,
    install: Annotated[bool, typer.Option("--install", help="Install it, in its own environment.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Word error rates of Headrace and faster-whisper (int8) on recordings with their texts, with bootstrap intervals, or with
    --time the times of some of them, in turns. OpenVINO takes part in sequential windows."""
    clips = read_clips(clips_file)
    if unknown := set(ways.split(",")) - set(WAYS):
        raise ValueError(f"--ways has {', '.join(sorted(unknown))}; choose from {', '.join(WAYS)}")
    if chosen := [name for name in timed.split(",") if name]:
        if missing := set(chosen) - {clip.path.stem for clip in clips}:
            raise ValueError(f"--time has {', '.join(sorted(missing))}, which CLIPS lacks")
        clips = [clip for clip in clips if clip.path.stem in chosen]
    ours_ways, wanted = ways.split(","), [(peer_engine(place), model, way) for way in ways.split(",")]
    if openvino and "sequential" in ours_ways:
        wanted.append((openvino_engine(openvino_place), openvino, "sequential"))
    engines.make_ready([engine for engine, _, _ in wanted if engine.place is None], install, say)
    status().start("transcribing")
    result: dict[str, Any] = {"machine": machine(), "clips": len(clips)}
    temperature = 0.0 if chosen else None
    with ExitStack() as stack:
        peers = [start(stack, folder, engine, "int8", way, temperature) for engine, folder, way in wanted]
        ours = [start(stack, model, None, format, way, temperature) for format in formats.split(",") for way in ours_ways]
        if chosen:
            result["speed"] = speed(clips, ours, peers, rounds)
        else:
            result["errors"] = accuracy(clips, ours, peers, say)
            result["texts"] = {engine.title: engine.texts for engine in (*peers, *ours)}
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if chosen:
        print_table(("engines", OURS, "peer", "ratio", "interval"), [_times(*row) for row in result["speed"].items()])
    else:
        print_table(("engine", "group", "errors", "interval"), list(_rates(result["errors"])))


def _times(title: str, record: dict[str, Any]) -> tuple[str, ...]:
    middle = {name: each[len(each) // 2] for name, each in record["seconds"].items()}
    pairs = record["ratio"]
    return (
        title,
        f"{middle[OURS]:.3f}",
        f"{middle[record['peer']]:.3f}",
        f"{pairs['median']:.2f}",
        f"{pairs['low']:.2f} to {pairs['high']:.2f}",
    )


def _rates(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (title, group, f"{one['rate']:.1%}", f"{one['low']:.1%} to {one['high']:.1%}")
        for title, groups in record.items()
        for group, one in groups.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (
        ("whisper-base clips.json --formats int8,int4", "Word error rates of two formats, both ways."),
        ("whisper-base clips.json --time jfk --ways sequential", "Times of one recording."),
    )
    return run(speech, "peers.speech", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
