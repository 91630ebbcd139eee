"""Whether this machine can run a model, from the headers of its files. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from headrace import core, host
from headrace.backends.memory import check_weights_fit, gib
from headrace.backends.native.weights import packed_bytes, total_packed_bytes
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_files
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.schemes.folder import QuantizedFolder


def missing_requirement(model: str | Path) -> str:
    """Why a local model cannot run here, one line; empty if it can."""
    try:
        opened = open_files(model, download=False)
        opened.load_tokenizer().result()
    except (ValueError, OSError) as error:
        return " ".join(str(error).split())
    infos = [opened.source.info(name) for name in opened.source.names()]
    if opened.source.format == "safetensors":
        strange = [one for one in infos if one.kind not in KINDS and len(one.shape) > 1 and one.name.endswith("weight")]
        if strange:
            return f"tensor {strange[0].name!r} has the type {strange[0].kind}; only {', '.join(FLOATS)} are read"
    source = opened.source
    if core.available():
        need = packed_bytes(describe(opened.config), source)
    # Such a folder lists float8 tensors by their decoded type.
    elif isinstance(source, QuantizedFolder):
        need = sum(source.stored_bytes(one.name) for one in infos)
    else:
        need = sum(one.nbytes for one in infos)
    free = host.free_memory()
    if need > free:
        return f"the weights are {gib(need)} and {gib(free)} of memory are free"
    return ""


def check_room(models: Sequence[tuple[Opened, str]]) -> None:
    """Raise ValueError if the packed weights of all models, each with its `quantize`, do not fit in free memory.

    Without the native core nothing is checked here; torch checks when it loads.
    """
    if core.reason() or not models:
        return
    need, narrower = total_packed_bytes([(describe(each.config), each.source, quantize) for each, quantize in models])
    check_weights_fit(need, host.free_memory(), *(each.name for each, _ in models), narrower=narrower)


def describe_support(model: str | Path) -> str:
    """A line for the user: yes with the back end, or no with the reason."""
    if problem := missing_requirement(model):
        return f"no: {problem}"
    return f"yes, in torch ({core.reason()})" if core.reason() else "yes"
