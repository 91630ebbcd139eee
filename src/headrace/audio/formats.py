"""Sound files of other formats than plain WAV, by PyAV (extra `audio`). Runs in a confined process.

The demuxer is chosen by the first bytes of a file, and only decoders of sound may run. Nothing else is opened: playlists and
addresses inside a file have no demuxer, no protocol and no descriptor.
"""

import importlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.audio.mel import RATE
from headrace.audio.wav import LEAST_RATE, MOST_CHANNELS, MOST_RATE, AudioError

try:
    av: Any = importlib.import_module("av")
    FFmpegError: type[Exception] = av.FFmpegError
except ImportError:
    av, FFmpegError = None, OSError

# First bytes of a file -> demuxer of FFmpeg, and name for errors.
BEGINNINGS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"fLaC", "flac", "FLAC"),
    (0, b"OggS", "ogg", "Ogg"),
    (0, b"ID3", "mp3", "MP3"),
    (0, b"\x1a\x45\xdf\xa3", "matroska", "Matroska or WebM"),
    (0, b"FORM", "aiff", "AIFF"),
    (0, b"caff", "caf", "CAF"),
    (0, b"#!AMR", "amr", "AMR"),
    (0, b"RIFF", "wav", "WAV"),
    (4, b"ftyp", "mov", "MP4"),
    (4, b"moov", "mov", "MP4"),
    (4, b"mdat", "mov", "MP4"),
)
DECODERS = frozenset(
    "aac aac_latm mp3 mp3float mp2 mp2float mp1 mp1float opus libopus vorbis libvorbis flac alac amrnb amrwb libopencore_amrnb "
    "libopencore_amrwb pcm_s8 pcm_u8 pcm_s16le pcm_s16be pcm_s24le pcm_s24be pcm_s32le pcm_s32be pcm_f32le pcm_f32be pcm_f64le "
    "pcm_f64be pcm_alaw pcm_mulaw adpcm_ima_wav adpcm_ms adpcm_ima_qt gsm gsm_ms".split()
)
JOINED = 16_000  # samples
MOST_STREAMS = 16
# Demuxers whose announced length is exact. A file that is shorter by more than TOLERANCE and SHARE of it is cut.
EXACT_LENGTHS = frozenset({"flac", "mov", "matroska", "aiff", "caf"})
TOLERANCE, SHARE = 0.5, 0.02
MISSING = "install headrace[audio] to read it, or convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.wav"
READ = "wav, flac, mp3, ogg, opus, mp4, m4a, webm, mkv, aac, aiff, amr, caf"


def format_of(head: bytes) -> tuple[str, str] | None:
    """The demuxer of a file by its first bytes, and the name of its format; None if unknown."""
    for at, magic, demuxer, name in BEGINNINGS:
        if head[at : at + len(magic)] == magic:
            return demuxer, name
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        # Layer 0 is AAC, the others are MPEG audio.
        return ("aac", "AAC") if head[1] & 0x06 == 0 else ("mp3", "MP3")
    return None


class OtherSamples:
    """The first stream of sound of a file, decoded piece by piece, int16 at 16 kHz.

    split: each channel alone; otherwise they are mixed. Raises AudioError, as its methods do.
    """

    def __init__(self, data: bytes, most_seconds: int, split: bool = False, partial: bool = False) -> None:
        known = format_of(data[:16])
        if known is None:
            raise AudioError(f"the sound has an unknown format; send {READ}")
        self._demuxer, self._name = known
        if av is None:
            raise AudioError(f"the sound is a file of format {self._name}; {MISSING}")
        self._data, self._partial = data, partial
        options = {"protocol_whitelist": "", "codec_whitelist": ",".join(sorted(DECODERS)), "enable_drefs": "0"}
        try:
            self._container = av.open(io.BytesIO(data), format=self._demuxer, options=options, metadata_errors="ignore")
        except (FFmpegError, ValueError, OSError) as error:
            raise self._damaged(error) from None
        self._stream = self._first_stream()
        self.channels = self._stream.codec_context.layout.nb_channels if split else 1
        self._most, self._count = most_seconds * RATE, 0
        self._split = split

    def pieces(self) -> Iterator[np.ndarray]:
        """Samples [channels, n] int16, one piece after the other."""
        resampler = None
        layout = None
        try:
            for frame in self._joined():
                if resampler is None:
                    layout = frame.layout.nb_channels, frame.rate
                    wanted = frame.layout.name if self._split else "mono"
                    resampler = av.AudioResampler(format="s16p", layout=wanted, rate=RATE)
                if layout != (frame.layout.nb_channels, frame.rate):
                    raise AudioError("the sound changes its rate or channels in the middle; convert it to WAV")
                frame.pts = None
                yield from self._counted(resampler.resample(frame))
            if resampler is not None:
                yield from self._counted(resampler.resample(None))
        except (FFmpegError, ValueError, OSError) as error:
            if isinstance(error, AudioError):
                raise
            if not self._partial or not self._count:
                raise self._damaged(error) from None
        self._check_end()

    def _joined(self) -> Iterator[Any]:
        """Checked frames of about `JOINED` samples: codecs have frames of 20 to 40 ms, and each call costs time."""
        fifo, kind = av.AudioFifo(), None
        try:
            for packet in self._container.demux(self._stream):
                for frame in packet.decode():
                    self._check_frame(frame)
                    if kind not in (None, key := (frame.format.name, frame.layout.name, frame.rate)):
                        yield from self._rest(fifo)
                        fifo = av.AudioFifo()
                    kind, frame.pts = key, None
                    fifo.write(frame)
                    if fifo.samples >= JOINED:
                        yield from self._rest(fifo)
        except Exception:
            yield from self._rest(fifo)  # a damaged file may count up to there
            raise
        yield from self._rest(fifo)

    def _rest(self, fifo: Any) -> Iterator[Any]:
        if not fifo.samples:
            return
        frame = fifo.read()
        if frame.format.name.startswith(("flt", "dbl")) and not np.isfinite(frame.to_ndarray()).all():
            raise AudioError("the sound has samples that are NaN or infinite; the file is damaged")
        yield frame

    def _first_stream(self) -> Any:
        streams = list(self._container.streams)
        if len(streams) > MOST_STREAMS:
            raise AudioError(f"the sound has {len(streams)} streams; at most {MOST_STREAMS} are supported")
        stream = next((one for one in streams if one.type == "audio"), None)
        if stream is None:
            kinds = ", ".join(sorted({one.type for one in streams})) or "none"
            raise AudioError(f"the sound has no sound: the {self._name} file has {kinds} alone; send one with sound")
        context = stream.codec_context
        if context is None or context.codec.name not in DECODERS:
            name = "unknown or encrypted" if context is None else context.codec.name
            raise AudioError(f"the sound has the codec {name}, which is not supported; convert it to WAV")
        context.thread_count, context.thread_type = 1, "NONE"
        return stream

    def _check_frame(self, frame: Any) -> None:
        """Raise AudioError for a frame with an unsupported rate or too many channels."""
        if not LEAST_RATE <= frame.rate <= MOST_RATE:
            raise AudioError(f"the sound has {frame.rate} samples a second; {LEAST_RATE} to {MOST_RATE} are supported")
        if not 1 <= frame.layout.nb_channels <= MOST_CHANNELS:
            raise AudioError(f"the sound has {frame.layout.nb_channels} channels; 1 to {MOST_CHANNELS} are supported")

    def _counted(self, frames: list[Any]) -> Iterator[np.ndarray]:
        for frame in frames:
            values = frame.to_ndarray()
            self._count += values.shape[1]
            if self._count > self._most:
                seconds = self._most // RATE
                raise AudioError(f"the sound has more than {seconds:,} s of sound; at most {seconds:,} s are read, cut it")
            yield values

    def _check_end(self) -> None:
        """Raise AudioError for a file without sound, or one that ends before its announced length."""
        if not self._count:
            raise AudioError(f"the sound has no samples: the {self._name} file is empty or damaged")
        announced, seconds = self._announced(), self._count / RATE
        if self._demuxer == "ogg" and not self._partial and not _ogg_ends(self._data):
            raise AudioError("the sound is cut: the last page of the Ogg file is missing")
        short = announced is not None and announced - seconds > max(TOLERANCE, SHARE * announced)
        if short and not self._partial:
            raise AudioError(
                f"the sound is cut: its header announces {announced:,.1f} s of sound, and {seconds:,.1f} s are there"
            )

    def _announced(self) -> float | None:
        """Length in the header, in seconds; None if it is unknown or an estimate."""
        if self._demuxer == "mp3":
            return _xing_seconds(self._data)
        if self._demuxer not in EXACT_LENGTHS:
            return None
        if self._stream.duration is not None and self._stream.time_base is not None:
            return float(self._stream.duration * self._stream.time_base)
        video = any(one.type == "video" for one in self._container.streams)
        return None if self._container.duration is None or video else self._container.duration / av.time_base

    def _damaged(self, error: Exception) -> AudioError:
        after = f" after {self._count / RATE:,.1f} s" if getattr(self, "_count", 0) else ""
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:80]
        return AudioError(f"the sound cannot be decoded as {self._name}{after} ({reason}); it is cut or damaged")


def _xing_seconds(data: bytes) -> float | None:
    """Length that the Xing header of an MP3 file announces, in seconds; None without one."""
    start = 0
    if data[:3] == b"ID3" and len(data) > 10:
        start = 10 + sum((data[6 + at] & 0x7F) << (21 - 7 * at) for at in range(4))
    head = data[start : start + 200]
    at = max(head.find(b"Xing"), head.find(b"Info"))
    if at < 0 or len(head) < at + 12 or not head[at + 7] & 1:
        return None
    version, rate = head[1] >> 3 & 3, head[2] >> 2 & 3
    if head[0] != 0xFF or version == 1 or rate == 3:
        return None
    frames = int.from_bytes(head[at + 8 : at + 12], "big")
    hertz = (44_100, 48_000, 32_000)[rate] >> {3: 0, 2: 1, 0: 2}[version]
    return frames * (1152 if version == 3 else 576) / hertz


def _ogg_ends(data: bytes) -> bool:
    """Whether the last page of an Ogg file is marked as the end of its stream."""
    at = data.rfind(b"OggS")
    return len(data) > at + 5 and bool(data[at + 5] & 4)
