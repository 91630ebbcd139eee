"""Whether a model can be run here, from its headers, without loading it. Needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from headrace import core, host
from headrace.backends.memory import check_weights_fit, gib
from headrace.backends.native.weights import weights_room
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_files
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.schemes.folder import QuantizedFolder


def missing(model: str | Path) -> str:
    """Why a model on this machine cannot be run here, one line; empty where it can."""
    try:
        opened = open_files(model, download=False)
        opened.read_words().result()
    except (ValueError, OSError) as error:
        return " ".join(str(error).split())
    infos = [opened.source.info(name) for name in opened.source.names()]
    if opened.source.format == "safetensors":
        strange = [one for one in infos if one.kind not in KINDS and len(one.shape) > 1 and one.name.endswith("weight")]
        if strange:
            return f"tensor {strange[0].name!r} has the type {strange[0].kind}; only {', '.join(FLOATS)} are read"
    source = opened.source
    if isinstance(source, QuantizedFolder):  # float8 is listed as what it is read as
        need = sum(source.stored_bytes(one.name) for one in infos)
    else:
        need = sum(one.nbytes for one in infos)
    free = host.free_memory()
    if need > free:
        return f"the weights are {gib(need)} and {gib(free)} of memory are free"
    return ""


def check_room(models: Sequence[tuple[Opened, str]]) -> None:
    """Raise DoesNotFit where models that are to be in memory together, each with what its float weights become (`quantize`;
    empty: what they are), have no room as the native core packs them. Where the core is not there torch looks when it loads."""
    if core.reason() or not models:
        return
    need, narrower = weights_room([(describe(each.config), each.source, quantize) for each, quantize in models])
    check_weights_fit(need, host.free_memory(), *(each.name for each, _ in models), narrower=narrower)


def runs_here(model: str | Path) -> str:
    """ "yes", with what runs it, or "no", with what is missing."""
    if problem := missing(model):
        return f"no: {problem}"
    return f"yes, in torch ({core.reason()})" if core.reason() else "yes"
