"""The hash chain of prefix blocks: its definition, equality with the block manager, and what separates two chains."""

from hashlib import sha256

import numpy as np
import pytest

from headrace.data.config import CacheConfig
from headrace.data.types import Holding, Sequence
from headrace.kv.blocks import BlockManager
from headrace.kv.chain import chain, extend

TOKENS = list(range(7, 7 + 53))


def defined(tokens: list[int], root: bytes, size: int) -> list[bytes]:
    """The definition, block by block."""
    hashes = [sha256(b"headrace" + root).digest()]
    for start in range(0, len(tokens) - size + 1, size):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + size])
        hashes.append(sha256(hashes[-1] + block).digest())
    return hashes[1:]


@pytest.mark.parametrize("size", [1, 16, 53, 64])
def test_the_chain_is_its_definition(size: int) -> None:
    hashes = chain(TOKENS, b"tenant", size)
    assert hashes == defined(TOKENS, b"tenant", size)
    assert len(hashes) == len(TOKENS) // size


def test_the_first_hash_never_changes() -> None:
    """Stored blocks are found by it."""
    assert chain([1, 2, 3, 4], b"", 4)[0].hex() == "f47c1bafc72e87ef95ff859f3348d240f681eaaf085eeb105a233f187e6e9199"


def test_a_chain_grows_as_the_block_manager_needs_it() -> None:
    blocks = BlockManager(CacheConfig(num_blocks=8, block_size=16))
    seq = Sequence(0, list(TOKENS), len(TOKENS), Holding(b"root"))
    assert [blocks.hash(seq, index) for index in (0, 2, 1)] == [chain(TOKENS, b"root", 16)[index] for index in (0, 2, 1)]
    grown: list[bytes] = []
    for count in (1, 1, 3):
        extend(grown, TOKENS, b"root", 16, count)
    assert grown == chain(TOKENS, b"root", 16)


def test_root_and_every_token_before_a_block_change_its_hash() -> None:
    whole = chain(TOKENS, b"a", 16)
    assert not set(whole) & set(chain(TOKENS, b"b", 16))
    changed = chain([*TOKENS[:20], 0, *TOKENS[21:]], b"a", 16)
    assert [one == other for one, other in zip(whole, changed, strict=True)] == [True, False, False]


def test_numpy_ids_give_the_same_chain() -> None:
    assert chain(list(np.array(TOKENS, dtype=np.int64)), b"", 16) == chain(TOKENS, b"", 16)
