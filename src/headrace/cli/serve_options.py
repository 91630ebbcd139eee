"""Options of `serve`, and the configuration file that can set them."""

import os
import re
import stat
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.options import setting_fields
from headrace.cli.output import say
from headrace.data.settings import Limits, RoutePolicy, SettingGroup, option_settings
from headrace.data.spelling import did_you_mean
from headrace.weights.defaults import SamplingDefaults

SERVER, QUEUE, LIMITS = "Server", "Engine and queue", "Limits of one request"
FILE: dict[str, Any] = {"exists": True, "dir_okay": False, "readable": True}
# Keys of typer's context: the models and cascades of a configuration file.
MODELS, CASCADES = "headrace.models", "headrace.cascades"
MODEL_OPTIONS = tuple(one.name for one in option_settings())
*BATCHING, CLASSIFIER = option_settings(SettingGroup.SERVING)


MODES = ("pinned", "on demand", "off")  # as headrace.server.settings.Mode, whose import would load the server
NO_SETTINGS = ("config", "help_all", "help")  # options of the command line alone


@dataclass(slots=True)
class ModelEntry:
    """A model of a configuration file: its names for clients, when it is in memory, and its own options.

    model: "" for one of --models-dir, which `name` chooses.
    """

    model: str
    name: str | None = None
    preload: bool = False
    mode: str | None = None
    aliases: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the settings of a configuration file the defaults of the command line. Raises typer.BadParameter."""
    if path is None:
        return None
    data = _read(path)
    known = {param.name: param for param in context.command.params}
    entries, cascades = data.pop("models", []), data.pop("cascades", [])
    if not _are_tables(cascades):
        raise typer.BadParameter(f"{path.name}: cascades must be a list of tables, each with a name and tiers")
    context.meta[CASCADES] = cascades
    limits = data.pop("limits", None) or {}
    if not isinstance(limits, dict):
        raise typer.BadParameter(f"{path.name}: limits must be a table, as in [limits] and below it n = 4")
    data |= {f"limit_{name}": value for name, value in limits.items()}
    for name, value in data.items():
        if name not in known or name == "config" or isinstance(value, dict | list):
            raise typer.BadParameter(f"{path.name}: there is no setting {name!r}; {_hint(name, known)}")
        _check_value(path, name, value)
    context.default_map = {**(context.default_map or {}), **data}
    context.meta[MODELS] = [_entry(path, entry, known, context) for entry in _tables(path, entries)]
    if "model" not in data and (first := next((one.model for one in context.meta[MODELS] if one.model), "")):
        context.default_map["model"] = first
    return path


def _hint(name: str, known: Iterable[str]) -> str:
    """Name the most similar settings, or the command that lists all."""
    settings = [one for one in known if one not in NO_SETTINGS]
    return did_you_mean(name, settings, "`headrace serve --help-all` lists them")


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    # The parsers also raise errors of Python's conversions, and RecursionError.
    except Exception as error:
        raise typer.BadParameter(f"{path.name} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise typer.BadParameter(f"{path.name} must hold settings by name, as TOML (.toml) or YAML")
    return {name.replace("-", "_"): value for name, value in data.items()}


def _are_tables(entries: Any) -> bool:
    """Return whether `entries` is a list of tables."""
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        return False
    return all(isinstance(name, str) for one in entries for name in one)


def _tables(path: Path, entries: Any) -> list[dict[str, Any]]:
    if not _are_tables(entries) or not all(isinstance(entry.get("model", entry.get("name")), str) for entry in entries):
        raise typer.BadParameter(f"{path.name}: models must be a list of tables, each with a model (or a name in models_dir)")
    return entries


def _check_value(path: Path, name: str, value: Any) -> None:
    """Raises typer.BadParameter for a value that no option has: a date, a list, a number that no float holds."""
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        raise typer.BadParameter(f"{path.name}: {name} must be a finite number")
    if not isinstance(value, str | int | float | None):
        raise typer.BadParameter(f"{path.name}: {name} must be a text, a number, true or false")


def _entry(path: Path, entry: dict[str, Any], known: dict[Any, Any], context: typer.Context) -> ModelEntry:
    given = {name.replace("-", "_"): value for name, value in entry.items()}
    model_entry = ModelEntry(
        given.pop("model", ""),
        given.pop("name", None),
        given.pop("preload", False),
        given.pop("mode", None),
        given.pop("aliases", []),
    )
    where = f"{path.name}: {model_entry.model or model_entry.name}"
    if not isinstance(model_entry.preload, bool) or not isinstance(model_entry.name, str | None):
        raise typer.BadParameter(f"{where}: name is text and preload true or false")
    if model_entry.mode not in (None, *MODES):
        raise typer.BadParameter(f"{where}: mode must be one of {', '.join(MODES)}")
    aliases = model_entry.aliases
    if not isinstance(aliases, list) or not all(isinstance(one, str) and one for one in aliases):
        raise typer.BadParameter(f"{where}: aliases must be a list of names")
    for name, value in given.items():
        if name not in MODEL_OPTIONS:
            raise typer.BadParameter(
                f"{path.name}: {model_entry.model}: there is no setting {name!r} of a model; {_hint(name, MODEL_OPTIONS)}"
            )
        _check_value(path, name, value)
        model_entry.options[name] = known[name].process_value(context, value)
    return model_entry


def _server(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=SERVER, **more)


@dataclass
class ServerOptions:
    """Options of the server: address, keys, state."""

    config: Annotated[
        Path | None,
        _server(
            "TOML or YAML file with any of these options, and several models.", is_eager=True, callback=read_config, **FILE
        ),
    ] = None
    host: Annotated[str, _server("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _server("Port to listen on; 0: any free port.", min=0, max=65535)] = 8000
    served_model_name: Annotated[str | None, _server("Name of the model for clients (default: its own name).")] = None
    api_key_file: Annotated[Path | None, _server("File with the key that clients send.", **FILE)] = None
    api_key_env: Annotated[str, _server("Environment variable with the key, used without a key file.")] = "HEADRACE_API_KEY"
    keys: Annotated[
        Path | None,
        _server("TOML file of several keys with names, salts and quotas; it is read again when it changes.", **FILE),
    ] = None
    tls_cert: Annotated[Path | None, _server("TLS certificate, PEM.", **FILE)] = None
    tls_key: Annotated[Path | None, _server("TLS private key, PEM.", **FILE)] = None
    open_objects: Annotated[
        bool,
        _server("Allow JSON objects to have properties that their schema does not list, and integers of any length."),
    ] = False
    trusted_proxy: Annotated[
        str, _server("Trusted proxies, whose X-Forwarded-For and -Proto are used: addresses or networks, separated by commas.")
    ] = ""
    sampling_defaults: Annotated[
        SamplingDefaults, _server("Settings of requests that give none: the model's own, or neutral ones (for evaluations).")
    ] = "model"
    log_json: Annotated[bool, _server("Write the log as JSON lines; with HEADRACE_LOG=info one line per request.")] = False
    grace: Annotated[float, _server("Seconds for running requests to finish after SIGTERM.", min=0)] = 30.0
    state: Annotated[
        Path | None,
        _server("Folder of stored files, batches and responses (default: in HEADRACE_HOME, one per port).", file_okay=False),
    ] = None
    model_memory: Annotated[
        str | None,
        _server("Memory for models, such as 8GiB: they are loaded at their first request, and idle ones are unloaded."),
    ] = None
    models_dir: Annotated[
        Path | None,
        _server(
            "Folder of models, GGUF files or folders, which are loaded at their first request.", exists=True, file_okay=False
        ),
    ] = None
    preload: Annotated[
        str | None, _server("Names of models that are loaded at the start, separated by commas; others make room for them.")
    ] = None
    idle_unload: Annotated[
        str | None, _server("Unload models that had no request for this long, such as 10m (s, m, h or d); pinned ones stay.")
    ] = None
    adapters_from: Annotated[
        Path | None,
        _server("Folder of adapters that POST /v1/load_lora_adapter may load (default: none).", exists=True, file_okay=False),
    ] = None

    def key(self) -> str | None:
        """Return the key from its file, or from the environment, where it is removed so that child processes do not get it."""
        if self.api_key_file is None:
            return os.environ.pop(self.api_key_env, None) or None
        key = self.api_key_file.read_text("utf-8").strip()
        if not key:
            raise ValueError(f"{self.api_key_file} is empty; write the key into it")
        if self.api_key_file.stat().st_mode & stat.S_IROTH:
            say(f"{self.api_key_file} can be read by all users of this machine; run chmod o-r {self.api_key_file}")
        return key


def parse_seconds(text: str) -> float:
    """Seconds from text such as "90", "90s", "10m", "1.5h", "2d". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([smhd]?)\s*", text.lower())
    if match is None or not float(match[1]):
        raise ValueError(f"--idle-unload {text}: must be a time above 0, such as 90s, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _queue(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=QUEUE, **more)


Batching: Any = make_dataclass("Batching", setting_fields(BATCHING, QUEUE, min=1))


@dataclass
class QueueOptions(Batching):
    """Options of the engine's batches and of the queue in front of them."""

    replicas: Annotated[int, _queue("Engine processes of each model, which share its weights and divide the cores.", min=1)] = 1
    route: Annotated[
        RoutePolicy,
        _queue(
            "Replica of a request: affinity (least predicted time with cached prefixes), least (without), round (in turns)."
        ),
    ] = "affinity"
    engines: Annotated[
        str | None,
        _queue("Addresses of engines on other hosts (headrace engine), HOST:PORT separated by commas; none is started here."),
    ] = None
    kv_peers: Annotated[
        bool,
        _queue("Fetch the K/V of a prefix from the replica that has them, if another one answers (--replicas, --engines)."),
    ] = False
    max_queued_requests: Annotated[int, _queue("Waiting requests; more get a 429.", min=1)] = 256
    max_queued_tokens: Annotated[int, _queue("Waiting prompt tokens; more get a 429.", min=1)] = 262_144
    stuck_after: Annotated[float, _queue("Seconds without a message after which the engine is restarted.", min=1)] = 60.0
    load_timeout: Annotated[float, _queue("Seconds for loading a model.", min=1)] = 600.0


LimitOptions: Any = make_dataclass(
    "LimitOptions",
    [
        (f"limit_{one.name}", Annotated[one.type, typer.Option(rich_help_panel=LIMITS, **one.metadata)], one.default)
        for one in fields(Limits)
        if one.metadata
    ],
)


def as_limits(options: Any) -> Limits:
    """Return the limits of the given LimitOptions."""
    return Limits(**{name.removeprefix("limit_"): value for name, value in asdict(options).items()})
