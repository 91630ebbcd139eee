"""Choice between the two kernels of linear layers with integer weights, measured once for each processor and kept in a file.

The direct kernels unpack the weights again for every few input rows, panels unpack them once for all rows. The number of rows
from which panels are faster depends on the processor and on the weight type. Both compute the same bits. A choice whose times
did not repeat, because of other work on the machine, is used by this process alone.
"""

import contextlib
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

import headrace
from headrace import core, host
from headrace.weights.atomic_file import atomic_write
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.sparse import ZEROS
from headrace.weights.store import find_home

FILE = "kernels.json"  # in the home folder
# Input rows that are measured: from the last of them at which the direct kernels are not slower, panels are used.
ROWS = (16, 32, 64, 256)
FEWEST = 8  # most rows of one pass of a direct kernel, for which panels are never faster
ALWAYS = 1 << 30
# Outputs and columns of the measured layer: its rows and weights fit the second cache. With fewer outputs the two kernels are
# closer to each other than in a model's layers.
OUTPUTS, COLUMNS = 1536, 768
# Fewest and most measurements of each. Enough are made when the two shortest of each differ by at most AGREE, since other
# processes disturb single measurements.
REPEATS = (3, 24)
AGREE = 0.05

# Rows by weight type, by instruction set, by processor and version of Headrace.
Rows = Annotated[int, msgspec.Meta(ge=1, le=ALWAYS)]
Choices = dict[str, dict[str, dict[str, Rows]]]


def choose_kernels(linear: Any, pool: Any) -> None:
    """Set the number of rows above which a packed layer uses panels. pool: the threads that measure."""
    kind = linear.tensors[0].kind
    if kind not in FLOATS and kind not in ZEROS:
        linear.direct_rows = direct_rows(kind, pool)


def direct_rows(kind: str, pool: Any) -> int:
    """Most input rows for which the direct kernels of a weight type are used on this processor, measured if it is not known."""
    home = find_home()
    known = _known(home)
    if kind not in known:
        known[kind], repeated = measure(kind, pool)
        if home is not None and repeated:
            _keep(home / FILE, kind, known[kind])
    return known[kind]


def measure(kind: str, pool: Any) -> tuple[int, bool]:
    """The same, measured in a few ms, and whether the times repeated. The weights are zeros; no time depends on that."""
    module = core.module()
    block, nbytes = KINDS[kind]
    rows = np.zeros((OUTPUTS, COLUMNS // block * nbytes), np.uint8)
    arena = module.Arena()
    layers = [module.PackedLinear([module.pack(rows, kind, OUTPUTS, COLUMNS, arena, pool)])]
    x = np.ones((max(ROWS), COLUMNS), np.float32)
    times: dict[tuple[int, str], list[float]] = {(rows, path): [] for rows in ROWS for path in ("direct", "panels")}
    repeated = False
    fewest, most = REPEATS
    for number in range(most):
        for (count, path), found in times.items():
            found.extend(module.time_linears(layers, x[:count], pool, 1, path))
            found.sort()
        repeated = number + 1 >= fewest and all(found[1] <= (1 + AGREE) * found[0] for found in times.values())
        if repeated:
            break
    direct = [rows for rows in ROWS if times[rows, "direct"][0] <= times[rows, "panels"][0]]
    if not direct:
        return FEWEST, repeated
    return ALWAYS if direct[-1] == ROWS[-1] else direct[-1], repeated


@cache
def _known(home: Path | None) -> dict[str, int]:
    """The kept choices of this processor and instruction set; this process adds to them."""
    return {} if home is None else _read(home / FILE).get(_processor(), {}).get(_isa(), {})


def _read(file: Path) -> Choices:
    """The file's content; empty if there is none, or if it is not valid."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Choices)
    except (OSError, ValueError):
        return {}


def _keep(file: Path, kind: str, rows: int) -> None:
    """Add a choice to the file. A home folder that cannot be written only costs the measurement in the next process."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        everything = _read(file)
        everything.setdefault(_processor(), {}).setdefault(_isa(), {})[kind] = rows
        with atomic_write(file) as part:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=1))


def _isa() -> str:
    return str(core.module().cpu_info()["isa"])


def _processor() -> str:
    return f"{host.cpu_model()}, headrace {headrace.__version__}"
