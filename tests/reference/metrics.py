"""Reference of the metrics at /metrics, from the registry of a server."""

import re
from types import SimpleNamespace
from typing import Any

from headrace.server.engines.metrics import LABELS, ModelMetrics, ServerMetrics
from headrace.server.protocols.cascade import Cascade
from tests.pages import item

ABOUT = {"headrace": "Of Headrace", "process": "Of the web process, by prometheus-client"}


def text() -> str:
    found: dict[str, list[str]] = {name: [] for name in ABOUT}
    registry = registered().registry
    collectors: dict[str, Any] = registry._names_to_collectors
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = getattr(collectors.get(metric.name), "_labelnames", LABELS if name.startswith("headrace") else ())
        by = f", by {', '.join(f'`{label}`' for label in labels)}" if labels else ""
        about = " ".join(metric.documentation.split())
        found[re.split("[:_]", name)[0]].append(item(f"`{name}` ({metric.type}{by})", about))
    return "\n\n".join(part for group, entries in found.items() for part in (f"## {ABOUT[group]}", "\n".join(entries)))


def registered() -> ServerMetrics:
    """The registry of a server with one model and one cascade."""
    figures = ServerMetrics()
    ModelMetrics(figures, "model")
    settings: Any = SimpleNamespace(name="cascade", tiers=["small", "large"])
    models: Any = SimpleNamespace(figures=figures)
    Cascade(settings, models)
    return figures
