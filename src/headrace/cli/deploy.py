"""Command deploy: engines and a server on a Ray cluster."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.generate import parse_range
from headrace.cli.help import short_help
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import say
from headrace.cli.serve import check_installed
from headrace.cli.serve_options import Batching

DEPLOYMENT = "Deployment"


def _deployment(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=DEPLOYMENT, **more)


@dataclass
class DeploymentOptions:
    """Options of the deployment."""

    replicas: Annotated[str, _deployment("Least and most engines.", metavar="A..B")] = "1..1"
    name: Annotated[str, _deployment("Name of the application in Ray Serve.")] = "headrace"
    host: Annotated[str, _deployment("Address of the server on its node.")] = "127.0.0.1"
    port: Annotated[int, _deployment("Port of the server.", min=1, max=65535)] = 8000
    api_key_file: Annotated[Path | None, _deployment("File with the API key, on each node.", dir_okay=False)] = None
    grace: Annotated[float, _deployment("Seconds for running requests of an engine that is stopped.", min=0)] = 30.0
    target: Annotated[int | None, _deployment("Open requests of an engine, above which another starts.", min=1)] = None
    ray_open: Annotated[bool, _deployment("Without RAY_ADDRESS: start a Ray here, whose sockets listen on every network.")] = (
        False
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "replicas host port api_key_file key_file threads max_num_seqs target",
        ("RAY_ADDRESS=auto headrace deploy MODEL --key-file link.key --replicas 1..4", "One to four engines, by load."),
        ("RAY_ADDRESS=auto headrace deploy MODEL --key-file link.key --host 10.0.0.1 --api-key-file api.key", "For clients."),
    )
    app.command(cls=short)(with_groups(deploy))


def deploy(deployment: DeploymentOptions, options: ModelOptions, batching: Batching, model: ModelName) -> int:
    """Run a model's engines and a server on the Ray cluster of RAY_ADDRESS, until Ctrl-C.

    Ray Serve places the engines, replaces lost ones and starts more when requests wait. Requests go from the server to the
    engines over authenticated links, not through Ray. Each node needs Headrace, the files of the model and --key-file at the
    same paths.
    """
    options.check()
    check_installed()
    if options.key_file is None:
        raise ValueError("key_file is missing; give the file with the key of links, which each node has at the same path")
    from headrace.parallel.hosts.address import read_key
    from headrace.workflows.ray_batch import check_address, connect

    replicas = parse_range(deployment.replicas)
    read_key(Path(options.key_file))
    check_address(deployment.ray_open)
    settings = {**asdict(options), **asdict(batching)}
    key_file = str(Path(settings.pop("key_file")).resolve())
    arguments = {
        "model": str(Path(model).resolve()) if Path(model).exists() else model,
        "key_file": key_file,
        "name": deployment.name,
        "replicas": replicas,
        "settings": settings,
        "host": deployment.host,
        "port": deployment.port,
        "api_key_file": None if deployment.api_key_file is None else str(deployment.api_key_file.resolve()),
        "grace": deployment.grace,
        "cpus": float(settings["threads"] or 1),
        "target": deployment.target or batching.max_num_seqs,
    }
    ray = connect("deploy")
    try:
        _run(arguments)
    finally:
        ray.shutdown()
    return 0


def _run(arguments: dict[str, Any]) -> None:
    """Deploy, and remove the deployment at the end."""
    import signal
    import threading

    from headrace.server.ray_serve import app
    from ray import serve

    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    serve.start(proxy_location="Disabled")
    try:
        serve.run(app(arguments), name=arguments["name"], route_prefix=None)
        say(f"ready: {arguments['model']} on http://{arguments['host']}:{arguments['port']}/v1 of the front's node")
        stopped.wait()
    finally:
        serve.delete(arguments["name"])
        serve.shutdown()
