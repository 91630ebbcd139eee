"""What the web process and the engine process say to each other: plain data in length-prefixed msgpack, and nothing else.

A frame is four bytes of length (little-endian) and one tagged msgspec struct. Both ends decode into these types alone, so
bytes from the other side can never become code.
"""

import struct
from typing import Any

import msgspec

from headrace.data.params import SamplingParams
from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta, RequestMetrics
from headrace.startup.thresholds import CalibratedThreshold

MAX_FRAME = 256 << 20  # bytes; a prompt's log-probabilities are the largest thing sent
PREFIX = struct.Struct("<I")


class FrameError(ValueError):
    """Bytes that are no message; the connection cannot go on."""


class Load(msgspec.Struct, tag=True):
    """To the engine process, once: open this model. `settings` are the arguments of LLM."""

    model: str
    settings: dict[str, Any]
    log_level: int
    beat: float  # seconds between signs of life while there is nothing to do


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """A constraint that was compiled once in a confined process, and can be compiled by the engine at the same cost."""

    text: str
    bytes: int  # memory of the compiled grammar
    seconds: float = 0.0  # CPU time of the compilation


class Submit(msgspec.Struct, tag=True):
    """To the engine process: a request."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    salt: bytes = b""  # requests with different salts share no cached prefix
    pool: str = ""  # first, last or mean: an embedding instead of an answer
    rule: tuple[str, float] | None = None  # a class instead of an answer: by which criterion and threshold a text leaves
    grammar: Grammar | None = None  # of the structured outputs; without one they are refused
    turn: int = 0  # of equal priorities the one with the smallest begins first


class Abort(msgspec.Struct, tag=True):
    """To the engine process: end a request; nobody waits for it any more."""

    request_id: str


class Check(msgspec.Struct, tag=True):
    """To the engine process: are the cache's books in order? For tests and troubleshooting."""


class Checked(msgspec.Struct, tag=True):
    """From the engine process: what is wrong with them, one line; empty where nothing is."""

    problem: str


class Loaded(msgspec.Struct, tag=True):
    """From the engine process: the model is ready, and these are its bounds."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_blocks: int
    block_size: int
    note: str  # one line: number format, device, memory
    memory: int = 0  # bytes that weights and KV take; 0: not known
    exit: int = 0  # layers below the exit by which tokens may leave; 0: there is none
    layers: int = 0
    rule: CalibratedThreshold | None = (
        None  # the threshold that was calibrated for tokens that leave, or that a smaller model writes
    )


class NotLoaded(msgspec.Struct, tag=True):
    """From the engine process, its last word: the model cannot be opened."""

    reason: str


class Refused(msgspec.Struct, tag=True):
    """From the engine process: a request that could never run, what to change, and the field that is wrong."""

    request_id: str
    reason: str
    field: str = ""


class Ended(msgspec.Struct, array_like=True):
    """A request that ended in a step."""

    request_id: str
    metrics: RequestMetrics


class Scores(msgspec.Struct, array_like=True):
    """The prompt log-probabilities of a request; they come with its first delta."""

    request_id: str
    logprobs: list[TokenLogprob | None]


class Pooled(msgspec.Struct, array_like=True):
    """What an embedding is made of; it comes when its request ends."""

    request_id: str
    values: list[float]


class Classified(msgspec.Struct, array_like=True):
    """What the exits that a text came by said of it, as logits; it comes when its request ends."""

    request_id: str
    logits: list[tuple[float, ...]]


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """The engine's state after a step."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    preemptions: int = 0  # since the process began
    fed: int = 0  # tokens of the last step, prompts and answers
    failing: int = 0  # steps that failed in a row


class Deltas(msgspec.Struct, tag=True):
    """From the engine process: one step. Without deltas it is a sign of life."""

    deltas: list[Delta] = []
    ended: list[Ended] = []
    scores: list[Scores] = []
    stats: Stats = Stats()
    pooled: list[Pooled] = []
    classified: list[Classified] = []


ToEngine = Load | Submit | Abort | Check
FromEngine = Loaded | NotLoaded | Refused | Deltas | Checked

_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it is sent."""
    data = _encoder.encode(message)
    return PREFIX.pack(len(data)) + data


def frame_length(prefix: bytes) -> int:
    """Bytes that follow a prefix. Raises FrameError for a length no message has."""
    (length,) = PREFIX.unpack(prefix)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes was announced; {MAX_FRAME} is the most")
    return int(length)


def read_to_engine(data: bytes) -> ToEngine:
    """Raises FrameError unless the bytes are one message to the engine."""
    try:
        return _to_engine.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(str(error)) from None


def read_from_engine(data: bytes) -> FromEngine:
    """Raises FrameError unless the bytes are one message from the engine."""
    try:
        return _from_engine.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(str(error)) from None
