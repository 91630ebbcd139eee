"""Replay: a request whose engine process was lost goes on in the next process, after the tokens that the client has.

A plain output is resumed: the engine feeds prompt and known tokens, as after a preemption, and samples the next token. Noise
is a function of seed, output, position and token, so that is the token of an undisturbed run. Any other request runs again
from its start, and the part that the client has is removed.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from headrace.data.params import SamplingParams
from headrace.data.types import Delta
from headrace.server.engines.messages import Submit


class DivergedError(Exception):
    """A request that ran again gave other tokens than the client has."""


@dataclass(slots=True)
class Delivered:
    """The part of one output that was delivered. characters: of its text."""

    tokens: list[int] = field(default_factory=list)
    characters: int = 0
    finished: bool = False

    def add(self, delta: Delta) -> None:
        self.tokens += delta.token_ids
        self.characters += len(delta.text)
        self.finished = self.finished or delta.finish_reason is not None


def request_seed(params: SamplingParams) -> int:
    """Return the seed of a request. It is drawn here if the client gave none, so that it outlives an engine process."""
    return secrets.randbits(64) if params.seed is None else params.seed


def resumes(message: Submit) -> bool:
    """Return whether a request is one plain output, which an engine can resume after any token."""
    params = message.params
    one = params.n == 1 and params.best_of is None and params.beam is None and params.refine is None
    stateless = not params.mirostat_tau and not params.penalty_alpha and not params.leaves
    writes = not message.pool and message.rule is None and message.align is None
    return one and stateless and params.prompt_logprobs is None and writes


class Rerun:
    """Removes the delivered part from the deltas of a request that runs again from its start."""

    def __init__(self, delivered: Mapping[int, Delivered]) -> None:
        self._delivered = {
            index: Delivered(list(output.tokens), output.characters, output.finished) for index, output in delivered.items()
        }
        self._passed = {index: Delivered() for index in delivered}

    def undelivered(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that the client lacks; None if there is none. Raises DivergedError."""
        delivered = self._delivered.get(delta.index)
        if delivered is None or delta.error is not None:
            return delta
        passed = self._passed[delta.index]
        tokens, characters = len(passed.tokens), passed.characters
        passed.add(delta)
        known = delivered.tokens[tokens : len(passed.tokens)]
        short = passed.finished and len(passed.tokens) < len(delivered.tokens)
        long = delivered.finished and len(passed.tokens) > len(delivered.tokens)
        if known != delta.token_ids[: len(known)] or short or long:
            raise DivergedError
        if delivered.finished:
            return None
        count = len(known)
        rest = msgspec.structs.replace(
            delta,
            token_ids=delta.token_ids[count:],
            text=delta.text[max(0, delivered.characters - characters) :],
            logprobs=delta.logprobs[count:],
            exits=delta.exits[count:],
        )
        return rest if rest.token_ids or rest.text or rest.finish_reason is not None else None
