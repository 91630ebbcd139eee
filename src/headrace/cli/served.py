"""models: the models of a running server, and loading, unloading and pinning them by hand."""

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from headrace.cli.output import print_table, say
from headrace.data.progress import human_size

Action = Literal["list", "load", "unload", "pin", "unpin", "off"]
MODES = {"pin": "pinned", "unpin": "on demand", "off": "off"}
PATIENCE = 1800.0  # seconds: loading a large model, or the last requests of one that is unloaded


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("models")(models)


def models(
    action: Annotated[Action, typer.Argument(help="list, load, unload, pin, unpin or off.")] = "list",
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model of the server.", show_default=False)] = "",
    url: Annotated[str, typer.Option(metavar="URL", help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with an operator's key (default: HEADRACE_API_KEY)."),
    ] = None,
) -> None:
    """List the models of a running server, or load, unload and pin one by hand.

    pin loads a model and keeps it; unpin lets it make room; off refuses its requests. The changes last until the server ends.
    A server with a key file wants the key of a name with operator = true.
    """
    if (action == "list") == bool(model):
        raise typer.BadParameter("list takes no MODEL" if model else f"{action} needs a MODEL: headrace models {action} MODEL")
    key = os.environ.get("HEADRACE_API_KEY", "") if api_key_file is None else api_key_file.read_text("utf-8").strip()
    if action == "list":
        _print(_send(f"{url}/models", key, None))
    elif action in MODES:
        _say(_send(f"{url}/models/mode", key, {"model": model, "mode": MODES[action]}))
    else:
        _say(_send(f"{url}/models/{action}", key, {"model": model}))


def _send(address: str, key: str, body: dict[str, str] | None) -> dict[str, Any]:
    """Return the answer of the server. Raises ValueError with its message."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"--url {address}: must begin with http:// or https://")
    request = urllib.request.Request(address, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{error.code} {error.reason}; --url names another server, or an older one"
        raise ValueError(message) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{address}: {getattr(error, 'reason', error)}; start the server, or name it with --url") from None


def _print(answer: dict[str, Any]) -> None:
    rows = []
    for one in answer["data"]:
        state = f"{one['state']} {one['progress']:.0%}" if one["state"] == "loading" else one["state"]
        idle = "" if one["idle_seconds"] is None else f"{one['idle_seconds']:,.0f} s"
        names = ", ".join([one["id"], *one["aliases"]])
        size = human_size(one["bytes"]) if one["bytes"] else ""
        rows.append((names, state, one["mode"], size, str(one["requests"]), str(one["waiting"]), idle))
    print_table(("NAME", "STATE", "MODE", "MEMORY", "REQUESTS", "WAITING", "IDLE"), rows)
    if answer.get("model_memory"):
        say(f"{human_size(answer['model_memory'])} for models")


def _say(one: dict[str, Any]) -> None:
    say(f"{one['id']}: {one['state']}, {one['mode']}")
