"""How whoever runs a folder is asked to round activations, by the quantization_config of its config.json."""

from collections.abc import Mapping
from typing import Any

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
ASKED = {  # W8A8 as compressed-tensors says it
    "token": INT8 | {"strategy": "token"},
    "tensor": INT8 | {"strategy": "tensor", "dynamic": False},
}


def activations_of(settings: Mapping[str, Any]) -> str:
    """ "token": int8 with one scale for each token, where some group of compressed-tensors says so; "tensor": with the one
    that a matrix has; "auto": nothing is said, or what is left to the engine."""
    groups = settings.get("config_groups")
    each = groups.values() if isinstance(groups, Mapping) else ()
    asked = [group.get("input_activations") for group in each if isinstance(group, Mapping)]
    found = [{**one} for one in asked if isinstance(one, Mapping)]
    return next((name for name, what in ASKED.items() if any(what.items() <= one.items() for one in found)), "auto")
