"""Arguments of `LLM` that cannot work, found before weights are read or torch is imported."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from headrace.drafting.methods import check_speculation
from headrace.startup.backend import check_settings
from headrace.startup.loading import pick_device
from headrace.startup.opening import Opened
from headrace.startup.recipe import Settings


def check_arguments(given: Mapping[str, Any], target: Opened | None) -> None:
    """Check the arguments `given` to `LLM` for a model whose files are open (None: not known yet). Raises ValueError."""
    names = {field.name for field in fields(Settings)} - {"device"}
    settings = Settings(pick_device(given["device"]), **{name: given[name] for name in names & given.keys()})
    check_settings(settings, target)
    check_speculation(given.get("speculate"), given.get("draft_tokens"))
