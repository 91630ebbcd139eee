"""Messages between the web process and the engine process: plain data in length-prefixed msgpack.

A frame is four bytes of length (little-endian) and one tagged msgspec struct. Both ends decode only these types, so bytes from
the other side can never become code.
"""

import struct
from typing import Any, Literal

import msgspec

from headrace.data.params import SamplingParams
from headrace.data.plan import Align, Threshold, TokenLogprob
from headrace.data.sources import Frames
from headrace.data.types import Delta, RequestMetrics
from headrace.startup.thresholds import CalibratedThreshold

MAX_FRAME = 256 << 20  # bytes; the log-probabilities of a prompt are the largest message
# How an engine on another host is lost: values of `supervision.Event`.
LossEvent = Literal["cut", "gone", "silent", "failed"]
PREFIX = struct.Struct("<I")


class FrameError(ValueError):
    """Bytes that are not a message; the connection must close."""


class PeerLink(msgspec.Struct, frozen=True):
    """Where an engine listens for replicas that fetch K/V from it, and the key of links between them. port: 0: a free one."""

    host: str
    port: int
    key: bytes


class Load(msgspec.Struct, tag=True):
    """To the engine process, its first message: open a model. `settings`: of `headrace.data.settings.ModelSettings`."""

    model: str
    settings: dict[str, Any]
    log_level: int
    beat: float  # seconds between messages of an idle engine
    replica: str = ""  # its name in the log; empty for a single engine
    processors: list[int] = []  # it may run on; empty: all
    weights: int | None = None  # descriptor of the file in memory that all replicas map
    files: str = ""  # digest of the model's files, if engines of other hosts must have the same bits
    peers: PeerLink | None = None  # None: no K/V go to or come from other replicas


class Join(msgspec.Struct, tag=True):
    """To an engine on another host, the first message of a front: what both must have in common."""

    version: str
    files: str  # digest of the model's files


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """A grammar that a confined process has compiled, with the cost that the engine will have too."""

    text: str
    bytes: int  # memory of the compiled grammar
    seconds: float = 0.0  # CPU time of the compilation


class Submit(msgspec.Struct, tag=True):
    """To the engine process: a request."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    salt: bytes = b""  # requests with different salts share no cached prefix
    pool: str = ""  # first, last or mean: compute an embedding
    rule: tuple[str, Threshold] | None = None  # classify; early exit by this criterion and threshold
    align: Align | None = None  # align the prompt with its source; its last token ends a text
    grammar: Grammar | None = None  # needed for structured outputs
    turn: int = 0  # among equal priorities the smallest begins first
    seed: int | None = None  # None: params.seed, or drawn by the engine
    given: list[int] = []  # output tokens that the client has; the engine goes on after them
    source: Frames | None = None  # a window of sound, for a speech model
    peer: str = ""  # address of the replica that should have the K/V of the first `peer_tokens` tokens; empty: none
    peer_tokens: int = 0


class Abort(msgspec.Struct, tag=True):
    """To the engine process: end a request."""

    request_id: str


class Check(msgspec.Struct, tag=True):
    """To the engine process: check the accounts of the K/V cache. For tests and troubleshooting."""


class Checked(msgspec.Struct, tag=True):
    """From the engine process: the result of Check, one line; empty if the accounts are right."""

    problem: str


class Loaded(msgspec.Struct, tag=True):
    """From the engine process: the model is ready."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_blocks: int
    block_size: int
    note: str  # one line: number format, device, memory
    memory: int = 0  # bytes of weights and K/V; 0: unknown
    exit: int = 0  # layers below the exit; 0: no early exit
    layers: int = 0
    rule: CalibratedThreshold | None = None  # calibrated for early exit, or for tokens of a smaller model
    bits: str = ""  # engines with the same digest give the same outputs bit for bit; "": outputs are near-tie-exact
    peer_port: int = 0  # where it listens for replicas that fetch K/V; 0: it does not


class NotLoaded(msgspec.Struct, tag=True):
    """From the engine process, its last message: the model cannot be opened."""

    reason: str


class Draining(msgspec.Struct, tag=True):
    """From an engine on another host: its operator stops it, and open requests may end. New ones should go elsewhere."""


class Ended(msgspec.Struct, tag=True):
    """From an engine on another host, its last message on a link: why the front has lost it, as an event of `supervision`."""

    reason: str
    event: LossEvent = "cut"


class Refused(msgspec.Struct, tag=True):
    """From the engine process: a request that could never run, what to change, and the field that is wrong."""

    request_id: str
    reason: str
    field: str = ""


class StoreStats(msgspec.Struct, array_like=True, frozen=True):
    """Counts of the K/V store since the engine process began, in segments and bytes; `bytes`: of all segments on disk."""

    loaded: int = 0
    saved: int = 0
    evicted: int = 0
    damaged: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes: int = 0


class PeerStats(msgspec.Struct, array_like=True, frozen=True):
    """Counts of the K/V that came from other replicas and went to them since the engine process began, in segments and bytes.
    failed: fetches that a fault ended."""

    fetched: int = 0
    failed: int = 0
    lent: int = 0
    bytes_fetched: int = 0
    bytes_lent: int = 0


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's state after a step."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    preemptions: int = 0  # since the process began
    fed: int = 0  # input tokens of the last step, prompts and answers
    failing: int = 0  # consecutive steps that failed
    store: StoreStats | None = None  # None: the model has no K/V store
    peers: PeerStats | None = None  # None: no K/V come from other replicas


class Deltas(msgspec.Struct, tag=True):
    """From the engine process: the results of one step; without deltas a sign of life.

    By request id: ended: metrics of the requests that ended in this step. scores: prompt log-probabilities, sent with the first
    delta. pooled, classified: the pooled hidden state of an embedding request or the numbers of an alignment, and the logits of
    each exit that a classified text has passed, sent when the request ends.
    """

    deltas: list[Delta] = []
    ended: dict[str, RequestMetrics] = {}
    scores: dict[str, list[TokenLogprob | None]] = {}
    stats: Stats = Stats()
    pooled: dict[str, list[float]] = {}
    classified: dict[str, list[tuple[float, ...]]] = {}


ToEngine = Load | Join | Submit | Abort | Check
FromEngine = Loaded | NotLoaded | Draining | Ended | Refused | Deltas | Checked

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def frame(message: ToEngine | FromEngine) -> bytes:
    """Encode a message as a frame."""
    data = encode(message)
    return PREFIX.pack(len(data)) + data


def frame_length(prefix: bytes) -> int:
    """Return the number of bytes after a prefix. Raises FrameError if no message is as long."""
    (length,) = PREFIX.unpack(prefix)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes was announced; {MAX_FRAME} is the most")
    return int(length)


def read_to_engine(data: bytes) -> ToEngine:
    """Decode one message to the engine. Raises FrameError."""
    try:
        return _to_engine.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(str(error)) from None


def read_from_engine(data: bytes) -> FromEngine:
    """Decode one message from the engine. Raises FrameError."""
    try:
        return _from_engine.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(str(error)) from None
