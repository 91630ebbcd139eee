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
from headrace.cli.serve_models import listed_models, loaded_first, loads_on_demand
from headrace.cli.serve_options import (
    BATCHING,
    CASCADES,
    CLASSIFIER,
    MODELS,
    LimitOptions,
    ModelEntry,
    QueueOptions,
    ServerOptions,
    as_limits,
    parse_seconds,
)
from headrace.data.settings import ModelSettings
from headrace.weights.store import find_home

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
# Settings of a model that the front uses itself if engines on other hosts run the model.
FRONT_SETTINGS = ("parse_special", "key_file")
FREE_SHARE = 0.9  # of the free memory, for models that are loaded on demand
PACKAGES = tuple("starlette uvicorn h11 prometheus_client python_multipart yaml markdown_it latex2mathml pygments nh3".split())


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "host port api_key_file config served_model_name max_num_seqs max_model_len draft quantize threads",
        ("headrace serve smollm2-135m", "Page and API on http://127.0.0.1:8000."),
        ("headrace serve MODEL --port 8080 --draft SMALLER", "Another port, with a draft model."),
        ("headrace serve --models-dir ~/models --idle-unload 10m", "Models of a folder, each loaded at its first request."),
        ("headrace serve --config serve.toml", "Several models, limits and keys from a file."),
        ("headrace serve MODEL --engines 10.0.0.2:9100,10.0.0.3:9100 --key-file link.key", "Engines on other hosts."),
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
    finish running requests; a second signal ends at once. A file (--config)
    or a folder (--models-dir) may name models instead of MODEL.
    """
    _check(bool(model or server.models_dir or context.meta.get(MODELS)), options)
    from headrace.cli.cascade_files import read_cascade
    from headrace.server.http.proxies import Proxies
    from headrace.server.logs import use_json
    from headrace.server.settings import ServerSettings

    if server.log_json:
        use_json()
    listed = listed_models(model, context.meta.get(MODELS, []), server)
    if queue.engines is not None:
        _check_engines(listed, server, {**asdict(options), **{one.name: getattr(queue, one.name) for one in BATCHING}})
    entries = [(entry.name or entry.model, entry, {**asdict(options), **entry.options}) for entry in listed]
    if classifier is not None:
        entries[0][2]["classifier"] = classifier
    for _, _, arguments in entries:
        if arguments.get("classifier") is not None:
            # The engine process receives plain data.
            arguments["classifier"] = str(arguments["classifier"])
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
        adapters_from=server.adapters_from,
        proxies=Proxies.parse(server.trusted_proxy),
    )
    on_demand = loads_on_demand(listed, server)
    _look(entries, on_demand, elsewhere=queue.engines is not None)
    idle = None if server.idle_unload is None else parse_seconds(server.idle_unload)
    cascades = [read_cascade(table) for table in context.meta.get(CASCADES, [])]
    return _run(settings, entries, _arguments(queue), _memory(server.model_memory, on_demand), cascades, idle)


def _check_engines(listed: list[ModelEntry], server: ServerOptions, settings: dict[str, Any]) -> None:
    """Refuse what engines on other hosts decide themselves. settings: of the model, by the options. Raises ValueError."""
    if len(listed) > 1:
        raise ValueError("--engines serves one model; give the model that these engines have")
    if loads_on_demand(listed, server):
        raise ValueError("--engines have loaded the model; leave --model-memory, --models-dir and --idle-unload out")
    defaults = ModelSettings()
    for name, value in {**settings, **listed[0].options}.items():
        if name not in FRONT_SETTINGS and value != getattr(defaults, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: engines on other hosts have settings of their own; give it to headrace engine")


def _arguments(queue: QueueOptions) -> dict[str, Any]:
    """The arguments of `AsyncLLM` from the options of the queue."""
    arguments = asdict(queue)
    arguments["engines"] = () if queue.engines is None else tuple(queue.engines.split(","))
    return arguments


def _memory(given: str | None, on_demand: bool) -> int | str | None:
    """Return the memory for models: --model-memory, or the free memory if models are loaded on demand without it."""
    from headrace.data.config import parse_bytes
    from headrace.host import free_memory

    free = free_memory()
    if given is None:
        return int(free * FREE_SHARE) if on_demand else None
    if parse_bytes(given) > free:
        say(f"--model-memory {given}: only {free / 2**30:.1f} GiB are free; loads may fail, or the system may end the server")
    return given


def _check(has_models: bool, options: ModelOptions) -> None:
    """Check the arguments that need no file. Raises typer.BadParameter, ValueError."""
    if not has_models:
        raise typer.BadParameter("there is no model; give MODEL, --models-dir, or --config with a model")
    options.check()
    check_installed()


def _look(entries: list[tuple[str, ModelEntry, dict[str, Any]]], on_demand: bool, elsewhere: bool = False) -> None:
    """Open the files of all models, and check that the models loaded at the start fit together. elsewhere: engines on other
    hosts have the weights. Raises ValueError."""
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
        if packed and not elsewhere and (loaded_first(entry) if on_demand else entry.mode != "off"):
            together += [(one, settings.quantize or "") for one in opened]
    check_room(together)


def _run(
    settings: Any,
    entries: list[tuple[str, ModelEntry, dict[str, Any]]],
    queue: dict[str, Any],
    memory: int | str | None,
    cascades: list[Any],
    idle_unload: float | None,
) -> int:
    import asyncio
    import signal

    from headrace.server.serving import ModelSpec, open_models
    from headrace.server.serving import serve as run
    from headrace.server.settings import Mode

    chosen = [
        ModelSpec(
            name,
            entry.model,
            {**queue, **arguments},
            entry.preload,
            None if entry.mode is None else Mode(entry.mode),
            tuple(entry.aliases),
        )
        for name, entry, arguments in entries
    ]
    ended_by = asyncio.run(run(open_models(chosen, settings, memory, cascades, idle_unload), settings, say))
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
