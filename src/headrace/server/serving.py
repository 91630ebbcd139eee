"""Running the server: socket, uvicorn, signals and shutdown."""

import asyncio
import functools
import logging
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn

from headrace import host
from headrace.data.config import parse_bytes
from headrace.data.settings import ModelSettings
from headrace.server.access.keys import KeyRing
from headrace.server.app import make_app
from headrace.server.engines.async_llm import AsyncLLM, LoadError
from headrace.server.engines.metrics import ServerMetrics
from headrace.server.engines.models import Models, ServedModel, make_service
from headrace.server.http.connection import ConnectionTable, make_protocol
from headrace.server.logs import without_cancelled
from headrace.server.page.markdown import start_renderer
from headrace.server.settings import CascadeSettings, Mode, ServerSettings, SettingsError
from headrace.server.storage.store import Store
from headrace.startup.fit.serving import ServedBytes, served_bytes
from headrace.startup.speech import reads_sound
from headrace.weights import catalog, hub
from headrace.weights.defaults import summary
from headrace.weights.model_files import weight_files

log = logging.getLogger("headrace.server")

# Seconds for which an idle connection is kept. Clients close theirs earlier, so none sends a request into a closing one.
IDLE = 30
LAST_BYTES = 5  # seconds for clients to read written data at the end
BACKLOG = 1024  # connections waiting in the system; clients of a larger burst try again after 1 s
SPARE = 64  # connections above the limit of requests
LOADED = 1.1  # estimate: bytes in memory per byte of a file
KV = 512 << 20  # estimate: bytes of the K/V cache
FILES = 256  # open files of a server without its connections


class Server(uvicorn.Server):
    """uvicorn's server with an orderly end. The first SIGTERM or SIGINT drains: new requests get a 503, open requests may
    finish within the grace period, and the rest ends with an error. A second signal ends the server at once.

    SIGHUP restarts the engine processes one after the other.
    """

    def __init__(self, models: Models) -> None:
        settings, limits = models.settings, models.settings.limits
        self.keys = KeyRing(settings)  # first: an error in the keys must come before anything is opened
        if unknown := self.keys.unknown_models(models.names):
            log.warning("%s names models that are not served: %s", settings.keys, ", ".join(unknown))
        self.store = Store(settings.state)
        guard, self.worker = make_app(models, self.store, self.keys)
        super().__init__(
            uvicorn.Config(
                guard,
                http=make_protocol(  # type: ignore[arg-type]
                    ConnectionTable(limits.connections + SPARE, limits.anonymous),
                    settings.proxies,
                    guard.refuse_early,
                    guard.pace,
                    head_seconds=limits.header_seconds,
                    body_seconds=limits.body_seconds,
                    send_seconds=limits.send_seconds,
                ),
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=LAST_BYTES,
                h11_max_incomplete_event_size=limits.header,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(without_cancelled)
        self.models = models
        self.stopped_by: int | None = None
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            terminal = host.has_terminal()
            self._loop.add_signal_handler(signal.SIGHUP, self._hung_up, terminal)
        await super().serve(sockets)

    def _hung_up(self, terminal: bool) -> None:
        """SIGHUP: restart the engine processes one after the other; or drain, if the server's terminal was closed."""
        if terminal and not host.has_terminal():
            self.handle_exit(signal.SIGHUP, None)
        else:
            self.renew()

    def renew(self) -> None:
        """Begin to restart the engine processes of all models, one after the other."""
        log.info("restarting the engine processes one after the other")
        for service in self.models.services:
            service.llm.renew(self.models.settings.grace)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, with a limit on the time of a TLS handshake."""
        config, loop = self.config, asyncio.get_running_loop()
        seconds = self.models.settings.limits.header_seconds if config.ssl else None
        protocol: Any = config.http_protocol_class
        make = functools.partial(protocol, config=config, server_state=self.server_state, app_state={})
        self.servers = [
            await loop.create_server(make, sock=sock, ssl=config.ssl, ssl_handshake_timeout=seconds) for sock in sockets or []
        ]
        for sock in sockets or []:
            # asyncio has set 100, which is also the number of connections that it accepts at once.
            sock.listen(BACKLOG)
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            self.should_exit = self.force_exit = True
            return
        self.stopped_by = sig
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to drain."""
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        models, grace = self.models, self.models.settings.grace
        log.info("finishing %d requests, for %g s at most", models.open, grace)
        await self.worker.stop()
        if left := await models.drain(grace):
            log.warning("%d requests were not finished within %g s", left, grace)
        else:
            await self.worker.finish_rows()
        await models.close()
        self.should_exit = True


def listen(settings: ServerSettings) -> socket.socket:
    """Return the bound socket. Raises ValueError with what to change."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror}); use another --port"
        ) from None


def allow_files(settings: ServerSettings) -> None:
    """Raise this process's limit of open files for its connections. Raises SettingsError if the system's limit is lower."""
    needed = settings.limits.connections + SPARE + FILES
    if (hard := host.allow_files(needed)) is not None:
        raise SettingsError(
            f"{settings.limits.connections} requests at once need {needed} open files and this system allows {hard}; "
            "raise that (ulimit -Hn) or lower --limit-connections"
        )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve. name: the one that clients use, next to its aliases. model: catalog name or path. arguments: of its
    AsyncLLM. preload: load it at the start also if others are loaded on demand. mode: without one it is on demand if the server
    has a limit of memory, otherwise pinned.
    """

    name: str
    model: str
    arguments: dict[str, Any]
    preload: bool = True
    mode: Mode | None = None
    aliases: tuple[str, ...] = ()


def open_models(
    chosen: Sequence[ModelSpec],
    settings: ServerSettings,
    memory: str | int | None = None,
    cascades: Sequence[CascadeSettings] = (),
    idle_unload: float | None = None,
) -> Models:
    """Return the models of a server. With `memory` (bytes or "8GiB") those without `preload` are loaded on demand.

    Raises ValueError.
    """
    budget = parse_bytes(memory) if memory is not None else None
    figures = ServerMetrics()
    entries = []
    for one in chosen:
        arguments, size = one.arguments, 0
        if budget is not None:
            planned = plan_bytes(one.model, arguments, budget)
            size = planned.total
            # Free memory differs from load to load, and the context must not.
            arguments = {**arguments, "kv_cache_memory": planned.kv} if planned.kv else arguments
        mode = one.mode or (Mode.PINNED if budget is None else Mode.ON_DEMAND)
        service = make_service(AsyncLLM(one.model, **arguments), one.name, settings, figures)
        speech = budget is not None and is_speech(one.model)
        entries.append(ServedModel(service, mode, one.preload, one.aliases, size, speech))
    return Models(entries, settings, figures, budget, cascades, idle_unload)


def plan_bytes(model: str, arguments: Mapping[str, Any], budget: int) -> ServedBytes:
    """Return the bytes of a model with the arguments of its AsyncLLM, by the numbers of `headrace fit`.

    Each replica has a K/V cache. A model that the planner does not know is estimated by its files. Raises ValueError if there
    are none.
    """
    settings = ModelSettings(**{name: value for name, value in arguments.items() if name in ModelSettings.__struct_fields__})
    try:
        planned = served_bytes(model, settings, budget)
    except (ValueError, RuntimeError) as error:
        log.info("%s is planned by the size of its files: %s", model, error)
        return ServedBytes(expected_size(model, settings.kv_cache_memory), 0)
    rest = planned.rest + (int(arguments.get("replicas", 1)) - 1) * planned.kv  # replicas share the weights
    if settings.kv_cache_memory is None and not settings.companions:
        return ServedBytes(rest, planned.kv)
    return ServedBytes(rest + planned.kv, 0)


def is_speech(model: str) -> bool:
    """Whether a model is a speech model, by its files. A model that is not on this machine counts as another one."""
    try:
        return reads_sound(hub.resolve(model, entries=catalog.load(), download=False))
    except (ValueError, OSError):
        return False


def expected_size(model: str, kv: int | str | None) -> int:
    """Estimate the memory (bytes) of a model on this machine: weights and K/V cache. `kv`: its option for the cache."""
    path = hub.resolve(model, entries=catalog.load(), download=False)
    return int(sum(file.stat().st_size for file in weight_files(path)) * LOADED) + (parse_bytes(kv) if kv is not None else KV)


def single_model(llm: AsyncLLM, settings: ServerSettings) -> Models:
    """Return the models of a server with this model alone; the command uses `open_models` for one model, too."""
    figures = ServerMetrics()
    return Models([ServedModel(make_service(llm, settings.model_name, settings, figures))], settings, figures)


async def serve(models: Models, settings: ServerSettings, say: Callable[[str], None]) -> int | None:
    """Serve until a signal; returns the signal. `say` receives the lines for the user: address, warnings, readiness.

    Raises LoadError if a model cannot be opened, ValueError if the address is not available.
    """
    allow_files(settings)
    sock = listen(settings)
    server = Server(models)
    server.config.load()  # reads the TLS files, so that their errors come before anything starts
    models.loader.report = say
    names = ", ".join(service.name for service in models.services)
    address = settings.address(sock.getsockname()[1])
    everywhere = f", and on this machine's other addresses ({settings.host})" if settings.host in ("", "0.0.0.0", "::") else ""
    say(f"{names} on {address}/v1{everywhere}")
    if settings.unencrypted:
        say("keys travel unencrypted to other machines; give --tls-cert and --tls-key, or a proxy with TLS and --trusted-proxy")
    for cascade in models.cascades.values():
        say(f"{cascade.name}: {', then '.join(cascade.tiers)}{'; ' + cascade.promise if cascade.promise else ''}")
    for line in models.summary():
        say(line)
    if models.loader.budget is None:
        say("loading; requests get a 503 until it is ready")
    await run(server, sock, say, f"{address}/")
    return server.stopped_by


async def run(server: Server, sock: socket.socket, say: Callable[[str], None], page: str = "") -> None:
    """Serve on a bound socket until `server.stop`. `page`: URL of the page, reported when the server is ready. Raises
    LoadError."""
    models = server.models
    models.begin()
    server.worker.begin()
    loading = asyncio.create_task(_load(models, server, say, page))
    watching = [asyncio.create_task(one) for one in (models.figures.watch(), server.keys.watch(), start_renderer())]
    try:
        await server.serve([sock])
    finally:
        await server.worker.close()
        await models.close()
        server.store.close()
        for task in (loading, *watching):
            task.cancel()
        result, *_ = await asyncio.gather(loading, *watching, return_exceptions=True)
    if isinstance(result, LoadError) and server.stopped_by is None:
        raise result


async def _load(models: Models, server: Server, say: Callable[[str], None], page: str) -> None:
    try:
        services = await models.ready()
    except LoadError:
        server.should_exit = True
        raise
    if server.stopped_by is not None:  # it drains already
        return
    for service in services:
        if service.llm.loaded is not None:
            name = f"{service.name}: " if len(models.services) > 1 else ""
            if not service.llm.opened.config.encoder:
                say(f"{service.name}: {summary(service.defaults)}")
            say(f"ready: {name}{service.llm.loaded.note}")
    if page:
        say(f"ready: the page is {page}")
