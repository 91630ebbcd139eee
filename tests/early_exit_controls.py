"""Negative controls for tests of early exits and cascades by token: each breaks one rule of `runner.early_exit`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headrace.data.plan import Feed
from headrace.kv.blocks import BlockManager
from headrace.runner.early_exit import EarlyExit, Verdict


def no_catching_up(patch: pytest.MonkeyPatch) -> None:
    """The layers above, or the larger model, never read the tokens that they have not seen."""
    entering = EarlyExit._entering

    def holes(self: EarlyExit, exit: int, feed: Feed, asks: bool) -> Feed:
        return entering(self, exit, msgspec.structs.replace(feed, lags=()), asks)

    patch.setattr(EarlyExit, "_entering", holes)


def deciding(who: Callable[[Feed], bool], kind: type[EarlyExit] = EarlyExit) -> Callable[[pytest.MonkeyPatch], None]:
    """Whoever is asked first is sure only where a rule about the feed allows it, too."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        judge = kind._judge

        def judged(self: EarlyExit, exit: int, feeds: list[Feed], *more: Any) -> dict[int, Verdict]:
            verdicts = judge(self, exit, feeds, *more)
            return {at: replace(one, passed=one.passed and who(feeds[at])) for at, one in verdicts.items()}

        patch.setattr(kind, "_judge", judged)

    return patched


def published_too_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks that not all layers have seen are found all the same."""
    publish = BlockManager.publish

    def rashly(self: BlockManager, seq: Any) -> None:
        publish(self, seq)
        for block in seq.kv.tables[0][: seq.kv.published]:
            self.pool.filled[block] |= seq.kv.groups

    patch.setattr(BlockManager, "publish", rashly)
