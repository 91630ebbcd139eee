"""What loads when it is used: the half of Headrace that computes in torch, which takes longest to import."""

from importlib import import_module
from typing import Any


def late(module: str, name: str) -> Any:
    """`name` of a module that is imported now, if it was not before."""
    return getattr(import_module(module), name)
