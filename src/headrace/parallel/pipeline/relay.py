"""The process on the leader's host that stands for a pipeline's stage on another host.

The engine starts `python -m headrace.parallel.pipeline.relay FD` as it starts a stage. The process ends when the socket closes
or the link ends; its last line says why the link ended.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from headrace import __version__
from headrace.parallel.hosts.address import Address, read_key
from headrace.parallel.hosts.link import Link, LinkError
from headrace.parallel.pipeline.link import Closed, RowSlots, StageLoaded, Start, receive, send
from headrace.parallel.pipeline.remote import Begin, Pipe, RowPipe, encode, exchange

log = logging.getLogger("headrace.engine")


class RelayStart(msgspec.Struct):
    """The first message to a relay. files: digest of the model's files; width: hidden size."""

    address: str
    key_file: str
    files: str
    width: int
    start: Start


async def relay(control: socket.socket, message: RelayStart) -> None:
    """Connect to the stage's host and pass messages on. Raises EOFError, LinkError, ValueError."""
    start, width = message.start, message.width
    link = await Link.connect(Address.parse(message.address), read_key(Path(message.key_file)))
    try:
        local = msgspec.structs.replace(start, source=-1, out=-1, rows_in=-1, rows_out=-1)
        link.send(encode(Begin(__version__, message.files, local, width)))
        rows_from = None
        if start.source >= 0:
            slots = RowSlots(start.rows_in, start.depth, start.slot, width)
            rows_from = RowPipe(await Pipe.open(socket.socket(fileno=start.source)), slots, width)
        slots = RowSlots(start.rows_out, start.depth, start.slot, width)
        rows_to = RowPipe(await Pipe.open(socket.socket(fileno=start.out)), slots, width)
        await exchange(link, await Pipe.open(control.dup()), rows_from, rows_to)
    finally:
        link.close()


def main(fd: int) -> int:
    """Serve the engine's process over a socket; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=fd) as control:
        try:
            message = receive(control, RelayStart)
        except Closed:
            return 0
        try:
            asyncio.run(relay(control, message))
        except EOFError:
            return 0
        except (LinkError, ValueError) as error:
            line = f"host {message.address} {error}" if isinstance(error, LinkError) else str(error)
            log.error("stage %d: %s", message.start.number, line)
            control.setblocking(True)
            # Read only while the stage loads; later the engine sees the end of the process.
            send(control, StageLoaded(error=line))
            os.close(control.detach())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
