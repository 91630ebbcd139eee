"""What loads when it is used: what computes in torch, which takes longest to import, and what few runs need."""

from importlib import import_module
from typing import Any


def late(module: str, name: str) -> Any:
    """`name` of a module that is imported now, if it was not before."""
    return getattr(import_module(module), name)
