"""Limits of a server's requests, connections and stored objects. Those with a help text are options of `serve`."""

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, help: str, least: float | None = None) -> Any:
    """A limit that is an option of `serve`; `least`: its smallest value."""
    return field(default=default, metadata={"help": help, "min": least})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server. A request above a limit is refused with what to change."""

    body: int = _option(4 << 20, "Bytes of a body.", 1)
    file: int = _option(100 << 20, "Bytes of an upload.", 1)
    n: int = _option(16, "Answers to a prompt.", 1)
    prompts: int = _option(128, "Prompts of a completion request.", 1)
    max_tokens: int | None = _option(None, "Tokens of an answer (default: the context).", 1)
    logprobs: int = _option(20, "Alternatives per token.", 0)
    stop: int = _option(16, "Stop strings.", 0)
    deadline: float | None = _option(None, "Deadline in seconds of requests that set none.", 0.001)
    priority: int = _option(0, "Lowest priority number that a request may set; lower numbers run first.")
    connections: int = _option(1024, "Open requests with a valid key.", 1)
    anonymous: int = _option(256, "Connections of one address without a valid key.", 1)
    bodies: int = _option(256 << 20, "Bytes of all arriving bodies together.", 1)
    body_seconds: float = 30.0  # until a whole body has arrived
    header: int = 64 << 10  # bytes of a request's head
    header_seconds: float = 10.0  # until a whole head has arrived
    send_seconds: float = 60.0  # a client may leave sent bytes unread for so long
    choices: int = 128  # prompts times n
    inputs: int = 2048  # texts of one /v1/embeddings request
    stop_chars: int = 256  # characters of a stop string
    files: int = 10_000  # stored uploads
    stored: int = 2 << 30  # bytes of all stored uploads
    batch_lines: int = 50_000
    batches: int = 1_000  # stored batches; those that have ended and have no files any more make room
    batch_bytes: int = 2 << 30  # of all stored batches, requests and answers
    responses: int = 1_000  # stored responses; the oldest make room
    response_bytes: int = 1 << 30  # of all stored responses
