"""Messages between the web process and the engine process: plain data in length-prefixed msgpack.

A frame is four bytes of length (little-endian) and one tagged msgspec struct. Both ends decode only these types, so bytes from
the other side can never become code.
"""

import struct
from typing import Any

import msgspec

from headrace.data.params import SamplingParams
from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta, RequestMetrics
from headrace.startup.thresholds import CalibratedThreshold

MAX_FRAME = 256 << 20  # bytes; the log-probabilities of a prompt are the largest message
PREFIX = struct.Struct("<I")


class FrameError(ValueError):
    """Bytes that are not a message; the connection must close."""


class Load(msgspec.Struct, tag=True):
    """To the engine process, its first message: open a model. `settings`: arguments of LLM."""

    model: str
    settings: dict[str, Any]
    log_level: int
    beat: float  # seconds between messages of an idle engine


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
    rule: tuple[str, float] | None = None  # classify; early exit by this criterion and threshold
    grammar: Grammar | None = None  # needed for structured outputs
    turn: int = 0  # among equal priorities the smallest begins first
    seed: int | None = None  # None: params.seed, or drawn by the engine
    given: list[int] = []  # output tokens that the client has; the engine goes on after them


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


class NotLoaded(msgspec.Struct, tag=True):
    """From the engine process, its last message: the model cannot be opened."""

    reason: str


class Refused(msgspec.Struct, tag=True):
    """From the engine process: a request that could never run, what to change, and the field that is wrong."""

    request_id: str
    reason: str
    field: str = ""


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's state after a step."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    preemptions: int = 0  # since the process began
    fed: int = 0  # input tokens of the last step, prompts and answers
    failing: int = 0  # consecutive steps that failed


class Deltas(msgspec.Struct, tag=True):
    """From the engine process: the results of one step; without deltas a sign of life.

    By request id: ended: metrics of the requests that ended in this step. scores: prompt log-probabilities, sent with the first
    delta. pooled, classified: the pooled hidden state of an embedding request, and the logits of each exit that a classified
    text has passed, sent when the request ends.
    """

    deltas: list[Delta] = []
    ended: dict[str, RequestMetrics] = {}
    scores: dict[str, list[TokenLogprob | None]] = {}
    stats: Stats = Stats()
    pooled: dict[str, list[float]] = {}
    classified: dict[str, list[tuple[float, ...]]] = {}


ToEngine = Load | Submit | Abort | Check
FromEngine = Loaded | NotLoaded | Refused | Deltas | Checked

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """Encode a message as a frame."""
    data = _encoder.encode(message)
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
