"""Files transcribed at once: `headrace serve` next to as many threads on one faster-whisper.

`python -m benchmarks.peers.speech_server MODEL CLIPS`
"""

import io
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
import wave
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import typer

from benchmarks.command import run
from benchmarks.peers import engines
from benchmarks.peers.servers import START_SECONDS, launched
from benchmarks.peers.speech import OURS, Clip, Engine, errors, peer_engine, read_clips, start
from benchmarks.word_errors import error_rate, rate_difference
from headrace.bench.machine import machine
from headrace.cli.options import writable
from headrace.cli.output import print_table, say, status
from headrace.host import cores
from headrace.stats.paired_ratio import ratio

SHORTEST, LONGEST = 15.0, 30.0  # seconds: about one window of sound
BOUNDARY = "----headrace-benchmark"


@dataclass(frozen=True, slots=True)
class SpeechServer:
    """A server of ours that is ready. url: of its transcriptions. way: of long files, sequential or chunked."""

    url: str
    way: str = "chunked"

    def transcribe(self, clips: Sequence[Clip], factor: float = 1.0) -> tuple[float, list[str]]:
        """Seconds for all clips, which are sent at once, and their texts. Raises ValueError if one is refused."""
        forms = [form(clip, factor, self.way) for clip in clips]
        with ThreadPoolExecutor(len(clips)) as threads:
            begin = time.perf_counter()
            texts = list(threads.map(self._text, forms))
        return time.perf_counter() - begin, texts

    def _text(self, body: bytes) -> str:
        request = urllib.request.Request(self.url, body, {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
        try:
            with urllib.request.urlopen(request) as answer:
                return str(json.load(answer)["text"])
        except urllib.error.HTTPError as error:
            raise ValueError(f"the server refused a file: {error.read().decode(errors='replace')[:300]}") from None


def form(clip: Clip, factor: float, way: str = "chunked") -> bytes:
    """The form that sends a recording, whose samples are multiplied by a factor: no window is then in the cache."""
    samples, file = np.round(read_samples(clip.path) * factor).astype("<i2"), io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(samples.tobytes())
    head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name="
    values = {"model": OURS, "language": clip.language, "long": way}
    fields = "".join(f'{head}"{name}"\r\n\r\n{value}\r\n' for name, value in values.items())
    start_of_file = f'{fields}{head}"file"; filename="{clip.path.name}"\r\n\r\n'
    return start_of_file.encode() + file.getvalue() + f"\r\n--{BOUNDARY}--\r\n".encode()


def read_samples(path: Path) -> np.ndarray:
    """Samples of a WAV file, int16."""
    with wave.open(str(path)) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), np.int16)


def seconds_of(path: Path) -> float:
    with wave.open(str(path)) as sound:
        return sound.getnframes() / sound.getframerate()


def choose(clips: Sequence[Clip], count: int) -> list[Clip]:
    """Clips of 15 to 30 s, spread over the list. Raises ValueError if there are too few."""
    fitting = [clip for clip in clips if SHORTEST <= seconds_of(clip.path) <= LONGEST]
    if len(fitting) < count:
        raise ValueError(f"CLIPS has {len(fitting)} recordings of {SHORTEST:g} to {LONGEST:g} s, not {count}; lower --files")
    return [fitting[at * len(fitting) // count] for at in range(count)]


def serve(stack: ExitStack, model: str, quantize: str, log: Path, way: str = "chunked") -> SpeechServer:
    """Start our server, which ends with `stack`. Raises ValueError if it ends, or is not ready in time."""
    options = f"--served-model-name {OURS} --threads {cores()} --port {{port}}" + (
        f" --quantize {quantize}" if quantize else ""
    )
    process, port = stack.enter_context(launched(OURS, f"{sys.executable} -m headrace serve {model} {options}", log))
    _wait(process, f"http://127.0.0.1:{port}/health", log)
    return SpeechServer(f"http://127.0.0.1:{port}/v1/audio/transcriptions", way)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ValueError(f"the server ended with code {process.returncode}; {log} says why")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if json.load(answer)["status"] == "ready":
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise ValueError(f"the server was not ready within {START_SECONDS:.0f} s; {log} says why")


def measure(ours: SpeechServer, peer: Engine, clips: Sequence[Clip], rounds: int) -> dict[str, Any]:
    """Seconds in turns, after one round that gives the word errors; each round has samples of its own."""
    times: dict[str, list[float]] = {OURS: [], peer.name: []}
    written: dict[str, list[str]] = {}
    for number in range(rounds + 1):
        turns: list[tuple[str, SpeechServer | Engine]] = [(OURS, ours), (peer.name, peer)]
        for name, engine in turns[:: 1 if number % 2 else -1]:
            seconds, texts = engine.transcribe(clips, 1 - 1e-3 * number)
            if number:
                times[name].append(seconds)
            else:
                written[name] = texts
    words = {name: [*chain(*errors(clips, texts).values())] for name, texts in written.items()}
    return {
        "seconds": times,
        "ratio": asdict(ratio(times[peer.name], times[OURS])),
        "errors": {name: asdict(error_rate(each)) for name, each in words.items()},
        "difference": asdict(rate_difference(words[OURS], words[peer.name])),
        "texts": written,
    }


def speech_server(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder of Whisper weights that both engines read.")],
    clips_file: Annotated[Path, typer.Argument(metavar="CLIPS", help="JSON list of file, lang and text of each recording.")],
    files: Annotated[int, typer.Option(min=1, help="Recordings of 15 to 30 s that are sent at once.")] = 8,
    quantize: Annotated[str, typer.Option(help="Our format of weights: int8, int4; empty for bfloat16.")] = "int8",
    way: Annotated[Literal["chunked", "sequential"], typer.Option("--long", help="Our way of long files.")] = "chunked",
    workers: Annotated[int, typer.Option(min=1, help="Workers of faster-whisper, which divide its threads.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of times, after one to warm up.")] = 5,
    place: Annotated[Path | None, typer.Option("--peer-env", help="Environment that has faster-whisper.")] = None,
    install: Annotated[bool, typer.Option("--install", help="Install it, in its own environment.")] = False,
    logs: Annotated[Path, typer.Option(help="Folder for the server's output.")] = Path("build/servers"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Seconds of files that are sent to our server at once, next to as many threads on one faster-whisper (int8), in turns.

    Both detect speech and decode again at the default temperatures. The word errors of both are of the first round.
    """
    clips, engine = choose(read_clips(clips_file), files), peer_engine(place)
    engines.make_ready([engine] if engine.place is None else [], install, say)
    logs.mkdir(parents=True, exist_ok=True)
    status().start("transcribing")
    result: dict[str, Any] = {"machine": machine(), "files": [clip.path.stem for clip in clips]}
    with ExitStack() as stack:
        peer = start(stack, model, engine, "int8", "sequential", None, at_once=True, workers=workers)
        result |= measure(serve(stack, model, quantize, logs / "speech.log", way), peer, clips, rounds)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    pairs, apart = result["ratio"], result["difference"]
    print_table(
        ("files", *result["seconds"], "ratio", "interval", "word errors, difference"),
        [
            (
                str(files),
                *(f"{median(each):.2f} s" for each in result["seconds"].values()),
                f"{pairs['median']:.2f}",
                f"{pairs['low']:.2f} to {pairs['high']:.2f}",
                f"{apart['rate']:+.1%} ({apart['low']:+.1%} to {apart['high']:+.1%})",
            )
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (
        ("whisper-base clips.json", "Eight files at once."),
        ("whisper-base clips.json --workers 2", "With two workers of faster-whisper."),
    )
    return run(speech_server, "peers.speech_server", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
