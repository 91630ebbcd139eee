"""A model on a Ray cluster (`headrace deploy`): Ray Serve places engines and scales them; requests do not pass through Ray.

Two deployments: `Engine`, of which Serve runs from A to B replicas, and `Front`, one server with its own port. Engines write
their addresses into a named actor, from which the front reads them. Messages between them use authenticated links.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.parallel.hosts.address import Address, read_key
from headrace.server.engine_port import EnginePort
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.supervision import State
from headrace.server.serving import Server, listen, run, single_model
from headrace.server.settings import ServerSettings

log = logging.getLogger("headrace.server")

BEAT = 1.0  # seconds between two messages of an engine to the directory, and between two looks of the front
GONE_AFTER = 10.0  # seconds without a message after which an engine leaves the directory
NAMESPACE = "headrace"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What to run: plain data. key_file: path on each node. replicas: least and most engines. settings: of ModelSettings.
    api_key_file: of the front, which needs one if `host` is not loopback. target: open requests of an engine above which Serve
    starts another one."""

    model: str
    key_file: str
    name: str = "headrace"
    replicas: tuple[int, int] = (1, 1)
    settings: Mapping[str, Any] | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    grace: float = 30.0
    cpus: float = 1.0
    target: int = 32


class Directory:
    """Named actor: the addresses of the engines that have reported within GONE_AFTER seconds."""

    def __init__(self) -> None:
        self._engines: dict[str, float] = {}

    def put(self, address: str) -> None:
        self._engines[address] = time.monotonic()

    def drop(self, address: str) -> None:
        self._engines.pop(address, None)

    def addresses(self) -> list[str]:
        now = time.monotonic()
        self._engines = {name: seen for name, seen in self._engines.items() if now - seen < GONE_AFTER}
        return sorted(self._engines)


def directory(deployment: Deployment) -> Any:
    """The directory of a deployment, created if missing."""
    import ray

    actor = ray.remote(num_cpus=0)(Directory)
    return actor.options(name=deployment.name, namespace=NAMESPACE, get_if_exists=True, lifetime="detached").remote()


class Engine:
    """One engine, as a replica of Ray Serve."""

    async def __init__(self, deployment: Deployment) -> None:  # type: ignore[misc]
        import ray

        self._directory = directory(deployment)
        settings = dict(deployment.settings or {})
        key = read_key(Path(deployment.key_file))
        self._port = EnginePort(deployment.model, settings, key, grace=deployment.grace)
        self._stopped = asyncio.Event()
        listening = Address(ray.util.get_node_ip_address(), 0)
        self._running = asyncio.create_task(self._port.run(listening, log.info, self._stopped))
        self._beating = asyncio.create_task(self._beat())
        loaded = asyncio.create_task(self._port.loaded.wait())
        await asyncio.wait({self._running, loaded}, return_when=asyncio.FIRST_COMPLETED)
        loaded.cancel()
        if self._running.done():
            await self._running  # raises LoadError

    async def _beat(self) -> None:
        await self._port.loaded.wait()
        while True:
            await self._directory.put.remote(str(self._port.address))
            await asyncio.sleep(BEAT)

    def check_health(self) -> None:
        """Serve calls it, and replaces the replica if it raises."""
        if self._running.done() or self._port.replica.state is State.CLOSED:
            raise RuntimeError(f"the engine ended: {self._port.replica.supervision.detail}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve calls it for `Scaling`."""
        return {"requests": float(self._port.open_requests)}

    async def __call__(self) -> str:
        return str(self._port.address)

    async def __del__(self) -> None:
        """Serve calls it before it ends the replica: open requests may end within the grace period."""
        self._beating.cancel()
        await self._directory.drop.remote(str(self._port.address))
        self._stopped.set()
        await asyncio.wait({self._running})


class Scaling:
    """Policy of Serve: as many engines as the open requests need. target: open requests of an engine."""

    def __init__(self, target: int) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        by_replica = (context.aggregated_metrics or {}).get("requests", {})
        wanted = math.ceil(sum(by_replica.values()) / self._target)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, least, 1), most), {}


class Front:
    """The server, as a single replica of Ray Serve. engines: handle of the deployment, so that Serve runs it."""

    async def __init__(self, deployment: Deployment, engines: Any) -> None:  # type: ignore[misc]
        self._directory = directory(deployment)
        while not (addresses := await self._directory.addresses.remote()):
            await asyncio.sleep(BEAT)
        key = None if deployment.api_key_file is None else Path(deployment.api_key_file).read_text("utf-8").strip()
        settings = ServerSettings(
            Path(deployment.model).name.removesuffix(".gguf"),
            host=deployment.host,
            port=deployment.port,
            key=key,
            grace=deployment.grace,
        )
        self._llm = AsyncLLM(deployment.model, engines=addresses, key_file=deployment.key_file)
        self._server = Server(single_model(self._llm, settings))
        self._running = asyncio.create_task(run(self._server, listen(settings), log.info))
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            with contextlib.suppress(Exception):  # the directory's node is lost: the engines of before stay
                self._llm.use_engines(await self._directory.addresses.remote())

    def check_health(self) -> None:
        """Serve calls it, and replaces the front if it raises."""
        if self._running.done():
            raise RuntimeError("the server ended")

    async def __call__(self) -> dict[str, str]:
        return self._llm.replicas.states()

    async def __del__(self) -> None:
        self._watching.cancel()
        self._server.stop()
        await asyncio.wait({self._running})


def app(arguments: Mapping[str, Any]) -> Any:
    """The application for Ray Serve, from the fields of `Deployment`; `import_path` of examples/ray_serve.yaml."""
    from ray import serve

    fields = dict(arguments)
    fields["replicas"] = tuple(fields.get("replicas", (1, 1)))
    deployment = Deployment(**fields)
    least, most = deployment.replicas
    engines = serve.deployment(
        Engine,
        name="Engine",
        ray_actor_options={"num_cpus": deployment.cpus},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=deployment.grace + 10,
        autoscaling_config={
            "min_replicas": least,
            "max_replicas": most,
            "initial_replicas": least,
            "policy": {"policy_function": "headrace.server.ray_serve:Scaling", "policy_kwargs": {"target": deployment.target}},
            "upscale_delay_s": 2,
            "downscale_delay_s": 10,
            "metrics_interval_s": 1,
            "look_back_period_s": 5,
        },
    )
    front = serve.deployment(
        Front, name="Front", ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=deployment.grace + 10
    )
    return front.bind(deployment, engines.bind(deployment))
