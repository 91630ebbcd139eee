"""Command rank: a stage of a pipeline for an engine on another host."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.engine import until_signal
from headrace.cli.help import short_help
from headrace.cli.interrupt import INTERRUPTED
from headrace.cli.opening import look_at
from headrace.cli.options import ModelName
from headrace.cli.output import say

LISTEN = "Address for the engine, HOST:PORT or PORT; the host of a private network, as links are not encrypted."


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "",
        ("headrace rank MODEL --key-file link.key --listen 10.0.0.2:9200", "A stage of a pipeline on this host."),
        ("headrace run MODEL --pp 2 --stage-hosts 10.0.0.2:9200 --key-file link.key", "An engine that uses it."),
    )
    app.command(cls=short)(rank)


def rank(
    model: ModelName,
    key_file: Annotated[
        Path, typer.Option(help="File with the key of links, that only you can read.", dir_okay=False, show_default=False)
    ],
    listen: Annotated[str, typer.Option(help=LISTEN)] = "127.0.0.1:9200",
    threads: Annotated[int, typer.Option(help="CPU threads (default: all cores).", min=0, show_default=False)] = 0,
) -> int:
    """Run layers of a model for an engine on another host, which names this address in --stage-hosts.

    Both hosts need the same version and the same files of the model; the engine chooses the layers. Both ends prove that they
    have the key. Links are authenticated but not encrypted: listen on the address of a private network. Documents are ranked
    by headrace rerank.
    """
    import asyncio

    from headrace.parallel.hosts.address import listening_address, read_key
    from headrace.parallel.pipeline.rank import RankPort, stage_needs
    from headrace.weights.digest import files_digest

    address, key = listening_address(listen), read_key(key_file)
    opened = look_at(model)
    if opened is None:
        raise ValueError(f"{model} is a folder of trained heads; name a model")
    port = RankPort(opened.path, files_digest(opened.path), key, threads, stage_needs(opened.config, opened.source))
    return INTERRUPTED if asyncio.run(until_signal(lambda stopped: port.run(address, say, stopped))) else 0
