"""Command engine: an engine without a server, for fronts on other hosts."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.interrupt import INTERRUPTED
from headrace.cli.opening import look_at
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import say
from headrace.cli.serve import check_installed
from headrace.cli.serve_options import CLASSIFIER, Batching

LINK = "Link"


def _link(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=LINK, **more)


@dataclass
class LinkOptions:
    """Options of the listening socket and of the engine behind it."""

    listen: Annotated[
        str, _link("Address for fronts, HOST:PORT or PORT; the host of a private network, as links are not encrypted.")
    ] = "127.0.0.1:9100"
    grace: Annotated[float, _link("Seconds for running requests to finish after SIGTERM.", min=0)] = 30.0
    stuck_after: Annotated[float, _link("Seconds without a message after which the engine is restarted.", min=1)] = 60.0
    load_timeout: Annotated[float, _link("Seconds for loading a model.", min=1)] = 600.0
    kv_peers: Annotated[bool, _link("Exchange K/V of prefixes with the other engines of a front that has --kv-peers, too.")] = (
        False
    )
    kv_peer_port: Annotated[int, _link("Port for that exchange on the host of --listen; 0: a free one.", min=0, max=65535)] = 0


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "listen key_file max_num_seqs max_model_len draft quantize threads grace",
        ("headrace engine smollm2-135m --key-file link.key", "An engine on 127.0.0.1:9100."),
        ("headrace engine MODEL --key-file link.key --listen 10.0.0.2:9100", "An engine for fronts of a private network."),
    )
    app.command(cls=short)(with_groups(engine))


def engine(
    link: LinkOptions,
    options: ModelOptions,
    batching: Batching,
    model: ModelName,
    classifier: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help=CLASSIFIER.field.help)] = None,
) -> int:
    """Run a model's engine for servers on other hosts, which name its address in --engines.

    Both ends prove that they have the key of --key-file. Links are authenticated but not encrypted: listen on the address of a
    private network. SIGTERM and Ctrl-C finish running requests.
    """
    import asyncio

    from headrace.parallel.hosts.address import listening_address, read_key

    options.check()
    check_installed()
    if options.key_file is None:
        raise ValueError("key_file is missing; give the file with the key of links, which fronts have, too")
    address, key = listening_address(link.listen), read_key(Path(options.key_file))
    arguments = {**asdict(options), **asdict(batching), "classifier": None if classifier is None else str(classifier)}
    _look(model, arguments)
    from headrace.server.engine_port import EnginePort

    if link.kv_peer_port and not link.kv_peers:
        raise ValueError(f"--kv-peer-port {link.kv_peer_port}: nothing listens there without --kv-peers; give both")
    peer_port = link.kv_peer_port if link.kv_peers else None
    more = {"stuck_after": link.stuck_after, "load_timeout": link.load_timeout, "grace": link.grace}
    port = EnginePort(model, arguments, key, **more, peer_port=peer_port)
    return INTERRUPTED if asyncio.run(_run(port, address)) else 0


def _look(model: str, arguments: dict[str, Any]) -> None:
    """Open the files of the model and of its companions, and check the settings. Raises ValueError."""
    from headrace.data.settings import ModelSettings
    from headrace.startup.backend import check_arguments

    settings = ModelSettings(**arguments)
    opened = [look_at(str(name)) for name in (model, *settings.companions)]
    check_arguments(settings, opened[0])


async def _run(port: Any, address: Any) -> bool:
    return await until_signal(lambda stopped: port.run(address, say, stopped))


async def until_signal(run: Callable[[Any], Awaitable[None]]) -> bool:
    """Await `run` with an event that SIGTERM and Ctrl-C set; returns whether it was Ctrl-C. A second signal ends the process at
    once."""
    import asyncio
    import signal

    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        stopped.set()
        loop.remove_signal_handler(number)  # the next one ends the process

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    await run(stopped)
    return received[:1] == [signal.SIGINT]
