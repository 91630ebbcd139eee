"""The first rank of a model: it starts the processes of the others, and ends them."""

import contextlib
import socket
import subprocess
import weakref
from dataclasses import dataclass

import msgspec

from headrace import core, host
from headrace.backends.native.offer import TargetSettings
from headrace.backends.recipe import Recipe
from headrace.data.config import ModelConfig, SchedulerConfig
from headrace.data.plan import MAX_NODES, RankLostError
from headrace.parallel.processes import ending, start_module
from headrace.parallel.ranks.follower import LONGEST, LoadShare, ShareLoaded
from headrace.parallel.ranks.seats import seats
from headrace.parallel.ranks.share import Share

MODULE = "headrace.parallel.ranks.follower"
PATIENCE = 30.0  # seconds without progress of a rank, after which it is lost
ENDING = 5.0  # seconds until a follower that should end is killed


@dataclass(slots=True)
class Follower:
    """The process of another rank, and this end of its socket."""

    rank: int
    process: "subprocess.Popen[bytes]"
    socket: socket.socket

    def receive(self) -> str:
        """Wait until it has loaded. Returns its problem, empty if it has none."""
        with contextlib.suppress(ConnectionError):
            if received := self.socket.recv(LONGEST):
                return msgspec.msgpack.decode(received, type=ShareLoaded).problem
        return f"its process ended ({self.how_it_ended()})"

    def how_it_ended(self) -> str:
        """The exit code or signal of the process."""
        try:
            return ending(self.process.wait(ENDING))
        except subprocess.TimeoutExpired:
            return "its connection closed"

    def end(self) -> None:
        """Kill the process, whatever it does."""
        with contextlib.suppress(OSError):
            self.socket.close()
        self.process.kill()
        self.process.wait()


class Lead:
    """The group of ranks as its first rank sees it (`backends.protocol.RankGroup`)."""

    def __init__(self, load: LoadShare, config: ModelConfig, rows: int, stage: int = 0, stages: int = 1) -> None:
        """Start a process for each other rank. Raises ValueError if one cannot be started.

        load: message to the others, without rank and processors. rows: most rows of a step. stage, stages: number of the
        pipeline's stage that the group runs, and how many stages share the processors.
        """
        self.share = Share(0, load.world, config)
        self._place = "" if stages == 1 else f"stage {stage}, "
        places = seats(stages * load.world, load.settings.threads, host.processors_by_node())[stage * load.world :]
        region = core.module().Region(load.world, rows=rows, width=config.hidden_size, vocab=config.vocab_size)
        self._followers: list[Follower] = []
        # Also ends them when the program goes away without `close`.
        self._end = weakref.finalize(self, end_all, self._followers)
        try:
            self.core = core.module().Ranks(region, 0, load.patience)
            for rank in range(1, load.world):
                message = msgspec.structs.replace(load, rank=rank, processors=places[rank])
                # The processes of a stage are one process group, which the engine can kill with the stage.
                self._followers.append(start(message, region.descriptor, stage == stages - 1))
        except BaseException:
            self._end()
            raise

    def ready(self) -> None:
        for follower in self._followers:
            if problem := follower.receive():
                rank = f"{self._place}rank {follower.rank} of {self.share.world}"
                raise ValueError(f"{rank} did not load its share: {problem}")

    def lost(self, error: Exception) -> RankLostError:
        self._end()
        return RankLostError(f"{self._place}{error}; the model is closed, open it again")

    def close(self) -> None:
        if not self._end.alive:
            return
        with contextlib.suppress(core.module().RankLost):
            self.core.end()
        for follower in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.process.wait(ENDING)
        self._end()


def lead(recipe: Recipe, settings: TargetSettings) -> Lead:
    """Start the other ranks of a recipe's target, or of a pipeline's last stage. Raises ValueError."""
    config, asked = recipe.target.config, recipe.settings
    layers = None if recipe.layers is None else (recipe.layers.start, recipe.layers.stop)
    load = LoadShare(model=str(recipe.target.path), world=asked.tp, settings=settings, patience=PATIENCE, layers=layers)
    return Lead(load, config, most_rows(recipe), asked.pp - 1, asked.pp)


def most_rows(recipe: Recipe) -> int:
    """Most rows of a step: the tokens of a step, and a full draft for each sequence."""
    settings = recipe.settings
    budget = SchedulerConfig.preset(settings.preset, recipe.longest, budget=settings.max_num_batched_tokens)
    return budget.max_num_batched_tokens + settings.max_num_seqs * (MAX_NODES + 1)


def start(message: LoadShare, region: int, new_session: bool = True) -> Follower:
    """Start a follower, in a session of its own if `new_session`. Raises ValueError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = [theirs.fileno(), region]
    try:
        session = {"start_new_session": new_session}
        process = start_module(MODULE, descriptors, descriptors, stdout=subprocess.DEVNULL, **session)
    except OSError as error:
        ours.close()
        raise ValueError(f"the process of rank {message.rank} cannot be started ({error.strerror or error})") from None
    finally:
        theirs.close()
    follower = Follower(message.rank, process, ours)
    with contextlib.suppress(OSError):  # a process that has ended already is reported by `receive`
        ours.send(msgspec.msgpack.encode(message))
    return follower


def end_all(followers: list[Follower]) -> None:
    """Kill the processes that are left."""
    for follower in followers:
        follower.end()
