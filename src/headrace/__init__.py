"""Headrace: an LLM inference engine. `from headrace import LLM, SamplingParams`; the names load when first used."""

from importlib import import_module
from typing import Any

# Where each public name lives. Not imported here: `import headrace` and the quick commands must not wait for torch.
_HOME = {
    "LLM": "headrace.llm",
    "AsyncLLM": "headrace.server.engines.async_llm",
    "SamplingParams": "headrace.data.params",
    "BeamSearchParams": "headrace.data.params",
    "RefineParams": "headrace.data.params",
    "RequestOutput": "headrace.data.outputs",
    "CompletionOutput": "headrace.data.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RefineParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def _version() -> str:
    metadata = import_module("importlib.metadata")  # slow to import, and seldom asked for
    try:
        return str(metadata.version("headrace"))
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
