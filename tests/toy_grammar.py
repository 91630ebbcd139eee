"""A grammar of tests, over token ids: what may come hangs on the last two tokens, so that no place is like another."""

import ctypes
from typing import Any, Self
from zlib import crc32

import numpy as np

from headrace.data.params import SamplingParams, StructuredOutputs
from headrace.decoding.constrained import Constraint
from headrace.engine.engine import Engine
from tests.tiny import VOCAB

WORDS = -(-VOCAB // 32)
HELD = StructuredOutputs(regex="(whatever the toy lets come)")


class ToyMatcher:
    """Two of three tokens may follow any two others. It fails as it computes what may follow a token of `limits`."""

    def __init__(self, limits: frozenset[int] = frozenset(), tokens: tuple[int, ...] = ()) -> None:
        self.limits, self.tokens = limits, tokens
        self.failed = False

    def may(self, token: int) -> bool:
        return crc32(bytes([*self.tokens, token])) % 3 > 0

    def deep_copy(self) -> Self:
        return type(self)(self.limits, self.tokens)

    def consume_token(self, token: int) -> bool:
        may = not self.failed and self.may(token)
        if may:
            self.tokens = (*self.tokens[-1:], token)
        return may

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.failed = bool(self.limits.intersection(self.tokens[-1:]))
        bits = np.ctypeslib.as_array((ctypes.c_uint32 * (size // 4)).from_address(address))
        for token in range(VOCAB):
            if self.may(token):
                bits[token // 32] |= np.uint32(1 << token % 32)

    def is_error(self) -> bool:
        return self.failed

    def get_error(self) -> str:
        return "item limit" if self.failed else ""

    def is_stopped(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return True


class _Grammars:
    def __init__(self, limits: frozenset[int]) -> None:
        self.limits = limits

    def constraint(self, spec: Any) -> Constraint:
        return Constraint(ToyMatcher(self.limits), WORDS)


def held(engine: Engine, limits: frozenset[int] = frozenset()) -> Engine:
    """The engine, whose requests with `structured_outputs` are held to the toy."""
    engine.grammars = _Grammars(limits)  # type: ignore[assignment]
    return engine


def fits(tokens: list[int]) -> bool:
    matcher = ToyMatcher()
    return all(matcher.consume_token(token) for token in tokens)


def held_params(**settings: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=HELD, **settings)
