"""The process of a rank other than the first: it loads its share of a model and carries out the first rank's commands.

The first rank starts `python -m headrace.parallel.ranks.follower FD REGION` with one end of a socket pair and the memory that
all ranks share. The process ends with the first rank: the socket closes, or the core notices that the first rank is gone.
"""

import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec

from headrace import core
from headrace.backends.native.offer import TargetSettings, load_target
from headrace.backends.protocol import RankGroup
from headrace.data.plan import RankLostError
from headrace.models.configs import read_config
from headrace.parallel.ranks.share import Share
from headrace.weights.schemes.folder import open_weights

LONGEST = 1 << 16  # bytes of a message


class LoadShare(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a follower. model: path of the files. layers: first and end of those that the group runs, None for all.
    processors: to run on, empty for any. patience: seconds without progress of another rank after which it is lost."""

    model: str
    world: int
    settings: TargetSettings
    patience: float
    layers: tuple[int, int] | None = None
    rank: int = 0
    processors: list[int] = []


class ShareLoaded(msgspec.Struct, frozen=True):
    """Answer of a follower that is ready, or has a problem (one line)."""

    problem: str = ""


class Membership:
    """A follower's view of its group: it has no other process to end."""

    def __init__(self, share: Share, ranks: object) -> None:
        self.share = share
        self.core = ranks

    def ready(self) -> None:
        pass

    def lost(self, error: Exception) -> RankLostError:
        return RankLostError(str(error))

    def close(self) -> None:
        pass


def main(fd: int, region: int) -> int:
    """Serve one first rank over a socket, with the memory of all ranks (descriptors of both); returns the exit code."""
    # A Ctrl-C reaches the first rank, which decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    leader = socket.socket(fileno=fd)
    received = leader.recv(LONGEST)
    if not received:
        return 0
    message = msgspec.msgpack.decode(received, type=LoadShare)
    if message.processors and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, message.processors)
    threading.Thread(target=end_with, args=(leader,), daemon=True).start()
    try:
        source = open_weights(Path(message.model))
        config = read_config(source, message.settings.rope)
        ranks = core.module().Ranks(core.module().Region.open(region), message.rank, message.patience)
        group: RankGroup = Membership(Share(message.rank, message.world, config), ranks)
        layers = None if message.layers is None else range(*message.layers)
        program = load_target(config, source, message.settings, group, layers=layers)
        program.weights.pack()
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        leader.send(msgspec.msgpack.encode(ShareLoaded(" ".join(str(error).split()) or type(error).__name__)))
        return 1
    leader.send(msgspec.msgpack.encode(ShareLoaded()))
    try:
        core.module().follow(ranks, [program.core])
    except core.module().RankLost:
        return 1  # the first rank reports it
    return 0


def end_with(leader: socket.socket) -> None:
    """End this process when the first rank closes its socket."""
    while leader.recv(LONGEST):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
