"""Command serve: an OpenAI-compatible server."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import complete_model, short_help
from headrace.cli.interrupt import INTERRUPTED
from headrace.cli.opening import look_at
from headrace.cli.options import ModelOptions, with_groups
from headrace.cli.output import say
from headrace.cli.serve_options import (
    CASCADES,
    CLASSIFIER,
    MODELS,
    LimitOptions,
    ModelEntry,
    QueueOptions,
    ServerOptions,
    as_limits,
)
from headrace.data.settings import ModelSettings
from headrace.weights.store import expand, find_home

ServedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that `headrace list` shows, a .gguf file, a folder with safetensors, or a repository of the model hub. "
        "--config may name it instead.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
PACKAGES = tuple("starlette uvicorn h11 prometheus_client python_multipart yaml markdown_it latex2mathml pygments nh3".split())


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "host port api_key_file config served_model_name max_num_seqs max_model_len draft quantize threads",
        ("headrace serve smollm2-135m", "Page and API on http://127.0.0.1:8000."),
        ("headrace serve MODEL --port 8080 --draft SMALLER", "Another port, with a draft model."),
        ("headrace serve --config serve.toml", "Several models, limits and keys from a file."),
    )
    app.command(cls=short)(with_groups(serve))


def serve(
    context: typer.Context,
    server: ServerOptions,
    options: ModelOptions,
    queue: QueueOptions,
    limits: LimitOptions,
    classifier: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help=CLASSIFIER.field.help)] = None,
    model: ServedModel = "",
) -> int:
    """Serve models to OpenAI clients, with a page for the browser. A missing model is downloaded.

    On 127.0.0.1 no key is needed; every other address needs one (HEADRACE_API_KEY, --api-key-file, --keys). SIGTERM and Ctrl-C
    finish running requests; a second signal ends at once. --config may name one or several models instead of MODEL.
    """
    _check(model, options)
    from headrace.cli.cascade_files import read_cascade
    from headrace.server.http.proxies import Proxies
    from headrace.server.logs import use_json
    from headrace.server.settings import ServerSettings

    if server.log_json:
        use_json()
    listed: list[ModelEntry] = context.meta.get(MODELS, [])
    if not listed or listed[0].model != model:
        listed = [ModelEntry(model, preload=True), *listed]
    entries = [
        (served_name(entry.model) if entry.name is None else entry.name, entry, {**asdict(options), **entry.options})
        for entry in listed
    ]
    if classifier is not None:
        entries[0][2]["classifier"] = classifier
    for _, _, arguments in entries:
        if arguments.get("classifier") is not None:
            # The engine process receives plain data.
            arguments["classifier"] = str(arguments["classifier"])
    if server.served_model_name is not None:
        entries[0] = (server.served_model_name, *entries[0][1:])
    names = [name for name, _, _ in entries]
    if len(set(names)) < len(names):
        raise ValueError(f"two models have one name ({', '.join(names)}); give each its own")
    settings = ServerSettings(
        model_name=names[0],
        host=server.host,
        port=server.port,
        key=server.key(),
        keys=server.keys,
        tls_cert=str(server.tls_cert) if server.tls_cert else None,
        tls_key=str(server.tls_key) if server.tls_key else None,
        grace=server.grace,
        sampling_defaults=server.sampling_defaults,
        state=server.state or _state(server.port),
        limits=as_limits(limits),
        open_objects=server.open_objects,
        proxies=Proxies.parse(server.trusted_proxy),
    )
    _look(entries, server.model_memory is not None)
    cascades = [read_cascade(table) for table in context.meta.get(CASCADES, [])]
    return _run(settings, entries, asdict(queue), server.model_memory, cascades)


def _check(model: str, options: ModelOptions) -> None:
    """Check the arguments that need no file. Raises typer.BadParameter, ValueError."""
    if not model:
        raise typer.BadParameter("there is no model; give MODEL, or --config with a model")
    options.check()
    check_installed()


def _look(entries: list[tuple[str, ModelEntry, dict[str, Any]]], on_demand: bool) -> None:
    """Open the files of all models, and check that the models loaded at the start fit together. Raises ValueError."""
    from headrace.startup.backend import check_arguments
    from headrace.startup.loading import pick_device
    from headrace.startup.supported import check_room

    together = []
    for _, entry, given in entries:
        settings = ModelSettings(**given)
        names = dict.fromkeys([entry.model, *map(str, settings.companions)])
        opened = [one for name in names if (one := look_at(name)) is not None]
        check_arguments(settings, opened[0] if opened else None)
        packed = (
            settings.backend != "torch" and settings.dtype in ("auto", "bfloat16") and pick_device(settings.device) == "cpu"
        )
        if packed and (entry.preload or not on_demand):
            together += [(one, settings.quantize or "") for one in opened]
    check_room(together)


def _run(
    settings: Any,
    entries: list[tuple[str, ModelEntry, dict[str, Any]]],
    queue: dict[str, Any],
    memory: str | None,
    cascades: list[Any],
) -> int:
    import asyncio
    import signal

    from headrace.server.serving import ModelSpec, open_models
    from headrace.server.serving import serve as run

    chosen = [ModelSpec(name, entry.model, {**queue, **arguments}, entry.preload) for name, entry, arguments in entries]
    ended_by = asyncio.run(run(open_models(chosen, settings, memory, cascades), settings, say))
    return INTERRUPTED if ended_by == signal.SIGINT else 0


def _state(port: int) -> Path | None:
    """Return the folder of a server without --state; None: files and batches end with the server."""
    folder = find_home()
    if folder is None:
        say("headrace: this user has no home directory, so files and batches end with the server; --state FOLDER keeps them")
    return folder / "serve" / str(port) if folder is not None and port else None


def check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}; install it with: pip install '.[serve]' in Headrace's folder")


def served_name(model: str) -> str:
    """Return the default name of a model for clients: the last part of a path, or the name itself."""
    path = expand(model)
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model
