"""Memory of `headrace transcribe` on long compressed files: decoded sound is on disk, so it does not grow with the file."""

import json
import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_whisper import RATE, noise, write_folder

av: Any = pytest.importorskip("av", reason="PyAV is not installed (extra `audio`)")
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

# A control: the decoded samples are held in memory.
HOLDS_SAMPLES = """
import sys
import numpy as np
from headrace.audio.decode import LocalDecoder
from headrace.cli.app import main

def decode(self, question):
    return [np.concatenate(parts) for parts in zip(*self._pieces(question))]

LocalDecoder._decode = decode
sys.exit(main(sys.argv[1:]))
"""
MEBIBYTE = 1 << 20


def write_mp3(path: Path, seconds: int) -> Path:
    """Noise of changing loudness, one channel, 32 kbit/s."""
    minute = np.round(noise(60.0) * 8000).astype(np.int16)
    with av.open(str(path), "w", format="mp3") as out:
        stream = out.add_stream("libmp3lame", rate=RATE, layout="mono")
        stream.bit_rate = 32_000
        resampler = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=RATE, frame_size=576)
        for start in range(0, seconds, 60):
            part = np.roll(minute, 977 * start)[: (seconds - start) * RATE]
            frame = av.AudioFrame.from_ndarray(part[None], format="s16", layout="mono")
            frame.rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), start * RATE
            for packed in resampler.resample(frame):
                out.mux(stream.encode(packed))
        for packed in [*resampler.resample(None), None]:
            out.mux(stream.encode(packed))
    return path


def anonymous(pid: int) -> int:
    """Bytes of anonymous resident memory of a process and its descendants."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                total = 1024 * int(line.split()[1])
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    except OSError:  # it has ended
        return total
    return total + sum(map(anonymous, children))


def measured(folder: Path, sound: Path, out: Path, program: tuple[str, ...] = ("-m", "headrace")) -> np.ndarray:
    """Anonymous memory of the command while it runs, in MiB, by time."""
    command = ["transcribe", str(folder), str(sound), "--language", "en", "--temperature", "0", "--no-vad", "--no-condition"]
    command += ["--format", "json", "-o", str(out), "--kv-cache-memory", "8MiB", "--threads", "1"]
    points = []
    with subprocess.Popen([sys.executable, *program, *command], env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        while process.poll() is None:
            points.append(anonymous(process.pid) / MEBIBYTE)
            time.sleep(0.05)
    assert process.returncode == 0
    (result,) = out.glob("*.json")
    assert json.loads(result.read_text())["segments"]
    return np.array(points)


def largest(points: np.ndarray) -> float:
    """The most memory in the second half of a run."""
    return float(points[len(points) // 2 :].max())


def usual(points: np.ndarray) -> float:
    """The third quartile of the second half of a run, when the windows are decoded: neither short peaks (a model is read) move
    it, nor a slow start and end of a short run on a busy machine."""
    return float(np.percentile(points[len(points) // 2 :], 75))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    short, long = (write_mp3(tmp_path / f"{seconds}.mp3", seconds) for seconds in (60, 600))
    decoded = 2 * RATE * 540 / MEBIBYTE
    first, second = (measured(folder, sound, tmp_path / sound.stem) for sound in (short, long))
    held = measured(folder, long, tmp_path / "held", ("-c", HOLDS_SAMPLES))
    print([round(usual(one), 1) for one in (first, second, held)], len(first), len(second))
    assert usual(second) - usual(first) < 0.75 * decoded
    assert usual(held) - usual(second) > 0.75 * decoded


@pytest.mark.slow
def test_memory_is_flat_over_three_hours(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    sound = write_mp3(tmp_path / "long.mp3", 3 * 3600)
    points = measured(folder, sound, tmp_path / "out")
    begun = largest(measured(folder, write_mp3(tmp_path / "short.mp3", 60), tmp_path / "short"))
    eighths = [float(part.max()) for part in np.array_split(points, 8)]
    print([round(one, 1) for one in eighths], round(begun, 1))
    # First the file is decoded, at last the transcript is written; between them only the transcript of 10,800 windows grows.
    between = eighths[2:-1]
    assert max(between) - min(between) < 15
    assert max(eighths) - begun < 0.5 * (2 * RATE * 3 * 3600 / MEBIBYTE)
