"""The front's end of an engine on another host (`server.engine_port`)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace import __version__
from headrace.parallel.hosts.address import Address, read_key
from headrace.parallel.hosts.link import Link, LinkError, WrongKeyError
from headrace.server.engines.engine_client import EngineGoneError
from headrace.server.engines.messages import Ended, FrameError, FromEngine, Join, Load, ToEngine, encode, read_from_engine
from headrace.server.engines.replica import LoadError
from headrace.server.engines.supervision import Event


class RemoteEngine:
    """A link to an engine. Its first message is Loaded or NotLoaded. Nothing here ends the engine's process."""

    pid = None

    def __init__(self, link: Link, address: Address) -> None:
        self._link, self._address = link, address

    def send(self, message: ToEngine) -> None:
        """Queue a message. It is lost if the engine is gone; `receive` then raises."""
        self._link.send(encode(message))

    async def receive(self) -> FromEngine:
        """Return the next message. Raises EngineGoneError."""
        try:
            message = read_from_engine(await self._link.receive())
        except LinkError as error:
            raise EngineGoneError(f"engine {self._address} {error}", Event.CUT) from None
        except FrameError as error:
            raise EngineGoneError(f"engine {self._address} sent an invalid message ({error})") from None
        if isinstance(message, Ended):
            raise EngineGoneError(f"engine {self._address} {message.reason}", Event(message.event))
        return message

    async def stop(self) -> None:
        """Close the link."""
        self._link.close()
        await asyncio.sleep(0)

    kill = stop


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """Where an engine listens, and the key of links to it."""

    address: Address
    key: bytes

    async def start(self, load: Load) -> RemoteEngine:
        """Connect to the engine, which must have the same version and the same files (`load.files`).

        Raises EngineGoneError if it cannot be reached, LoadError if it has another key.
        """
        try:
            link = await Link.connect(self.address, self.key)
        except WrongKeyError as error:
            raise LoadError(f"engine {self.address} {error}") from None
        except LinkError as error:
            raise EngineGoneError(f"engine {self.address} {error}", Event.CUT) from None
        link.send(encode(Join(__version__, load.files)))
        return RemoteEngine(link, self.address)


def remote_addresses(engines: Sequence[str], key_file: str | Path | None, staged: bool = False) -> tuple[RemoteAddress, ...]:
    """The engines at these addresses (HOST:PORT). staged: the key is for stages of a pipeline. Raises ValueError, one line."""
    if not engines:
        if key_file is not None and not staged:
            raise ValueError("key_file is the key of links to engines; name them with engines, or leave it out")
        return ()
    if key_file is None:
        raise ValueError("engines needs key_file, the file with the key of the links to them")
    addresses = [Address.parse(one) for one in engines]
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"engines {','.join(map(str, engines))}: an address is given twice")
    key = read_key(Path(key_file))
    return tuple(RemoteAddress(one, key) for one in addresses)
