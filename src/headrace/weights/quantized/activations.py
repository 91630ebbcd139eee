"""How whoever runs a folder is asked to round activations, by the quantization_config of its config.json."""

from collections.abc import Mapping
from typing import Any

TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True}  # W8A8 as compressed-tensors says it


def activations_of(settings: Mapping[str, Any]) -> str:
    """ "token": int8 with one scale for each token, where some group of compressed-tensors says so; "auto": nothing is said, or
    what is left to the engine."""
    groups = settings.get("config_groups")
    each = groups.values() if isinstance(groups, Mapping) else ()
    asked = [group.get("input_activations") for group in each if isinstance(group, Mapping)]
    return "token" if any(isinstance(one, Mapping) and TOKEN.items() <= {**one}.items() for one in asked) else "auto"
