"""serve: the model behind an OpenAI-compatible server."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.opening import fetch
from headrace.cli.options import ModelName, ModelOptions, with_groups
from headrace.cli.output import say
from headrace.weights.store import home

INTERRUPTED = 130
SERVER, QUEUE, LIMITS = "Server", "Engine and queue", "Limits of one request"
PACKAGES = tuple(
    "fastapi pydantic starlette uvicorn h11 prometheus_client python_multipart yaml markdown_it pygments nh3".split()
)

File = {"exists": True, "dir_okay": False, "readable": True}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Generate")(with_groups(serve))


def serve(
    model: ModelName,
    options: ModelOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.", rich_help_panel=SERVER)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model (default: its name).", rich_help_panel=SERVER)
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(**File, help="The key clients send (or HEADRACE_API_KEY).", rich_help_panel=SERVER)
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(**File, help="Certificate, PEM.", rich_help_panel=SERVER)] = None,
    tls_key: Annotated[Path | None, typer.Option(**File, help="Its private key, PEM.", rich_help_panel=SERVER)] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds to finish what runs after SIGTERM.", rich_help_panel=SERVER)
    ] = 30.0,
    state: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder of files, batches and responses (default: in HEADRACE_HOME, one for each port).",
            rich_help_panel=SERVER,
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in a batch.", rich_help_panel=QUEUE)] = 32,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a step.", rich_help_panel=QUEUE)] = None,
    max_queued_requests: Annotated[int, typer.Option(min=1, help="More get a 429.", rich_help_panel=QUEUE)] = 256,
    max_queued_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens that may wait; more get a 429.", rich_help_panel=QUEUE)
    ] = 262_144,
    stuck_after: Annotated[
        float, typer.Option(min=1, help="Seconds of silence after which the engine is started again.", rich_help_panel=QUEUE)
    ] = 60.0,
    limit_body: Annotated[int, typer.Option(min=1, help="Bytes.", rich_help_panel=LIMITS)] = 4 << 20,
    limit_n: Annotated[int, typer.Option(min=1, help="Answers to a prompt.", rich_help_panel=LIMITS)] = 16,
    limit_max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer (default: the context).", rich_help_panel=LIMITS)
    ] = None,
    limit_logprobs: Annotated[int, typer.Option(min=0, help="Alternatives a token.", rich_help_panel=LIMITS)] = 20,
    limit_stop: Annotated[int, typer.Option(min=0, help="Stop strings.", rich_help_panel=LIMITS)] = 16,
) -> int:
    """Serve a model to OpenAI clients; it is downloaded where it is missing.

    On 127.0.0.1 no key is needed; any other address insists on one (HEADRACE_API_KEY or --api-key-file). SIGTERM and Ctrl-C
    finish what runs, a second one ends at once.
    """
    options.check()
    _check_installed()
    from headrace.server.settings import Limits, ServerSettings

    settings = ServerSettings(
        model_name=served_model_name or served_name(model),
        host=host,
        port=port,
        key=_key(api_key_file),
        tls_cert=str(tls_cert) if tls_cert else None,
        tls_key=str(tls_key) if tls_key else None,
        grace=grace,
        state=state or (home() / "serve" / str(port) if port else None),
        limits=Limits(body=limit_body, n=limit_n, max_tokens=limit_max_tokens, logprobs=limit_logprobs, stop=limit_stop),
    )
    for each in (model, options.draft, options.amateur):
        if each is not None:
            fetch(each)
    more = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    bounds = {"max_queued_requests": max_queued_requests, "max_queued_tokens": max_queued_tokens, "stuck_after": stuck_after}
    return _run(model, settings, {**asdict(options), **more, **bounds})


def _run(model: str, settings: Any, arguments: dict[str, Any]) -> int:
    import asyncio
    import signal

    from headrace.server.async_llm import AsyncLLM
    from headrace.server.serving import serve as run
    from headrace.server.serving import single

    ended_by = asyncio.run(run(single(AsyncLLM(model, **arguments), settings), settings, say))
    return INTERRUPTED if ended_by == signal.SIGINT else 0


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"the server needs {', '.join(missing)}; install them with: pip install 'headrace[serve]'")


def served_name(model: str) -> str:
    """What clients call a model: of a path its last part only."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model


def _key(file: Path | None) -> str | None:
    """The key, from a file's only line or the environment."""
    if file is None:
        return os.environ.get("HEADRACE_API_KEY") or None
    key = file.read_text("utf-8").strip()
    if not key:
        raise ValueError(f"{file} is empty; write the key into it")
    return key
