"""Machines of the planner: bandwidth, peak speed and measured times of kernels. A file of one machine, and published ones."""

import math
import tomllib
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.data.spelling import did_you_mean
from headrace.weights.atomic_file import atomic_write
from headrace.weights.store import expand, home

PUBLISHED = Path(__file__).with_name("machines.toml")
HERE = "here"
# Share of the peak of a published machine that large products reach.
EFFICIENCY = 0.7
# Most memory nodes that the core uses.
MOST_NODES = 8
# Seconds that the threads of several memory nodes wait for each other in a layer: 8 barriers of 1.5 us.
NODE_BARRIERS = 8 * 1.5e-6


class Curve(msgspec.Struct, frozen=True):
    """Seconds of a call by its rows: `fixed` + bytes · `per_byte`, measured at `rows` rows (ascending)."""

    rows: tuple[int, ...]
    fixed: tuple[float, ...]
    per_byte: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or not len(self.rows) == len(self.fixed) == len(self.per_byte):
            raise ValueError("a curve has as many fixed and per_byte values as rows, and at least one")
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError("rows must be 1 or more, and ascending")
        if any(not 0 <= value < math.inf for value in (*self.fixed, *self.per_byte)):
            raise ValueError("seconds must be numbers from 0 on")

    def divided(self, count: int) -> "Curve":
        """Times of `count` memory nodes that share the bytes of a call; its fixed part stays."""
        return Curve(self.rows, self.fixed, tuple(value / count for value in self.per_byte))

    def seconds(self, rows: int, nbytes: float) -> float:
        """Interpolated in the logarithm of rows; beyond the last one in proportion to them."""
        return self._at(self.fixed, rows) + self._at(self.per_byte, rows) * nbytes

    def _at(self, values: tuple[float, ...], rows: int) -> float:
        if rows > self.rows[-1]:
            return values[-1] * rows / self.rows[-1]
        at = bisect_left(self.rows, rows)
        if at == 0:
            return values[0]
        low, high = self.rows[at - 1], self.rows[at]
        share = math.log(rows / low) / math.log(high / low)
        return values[at - 1] + (values[at] - values[at - 1]) * share


class Attention(msgspec.Struct, frozen=True):
    """Times of attention for heads of `head_dim` numbers, `group` of which share a KV head.

    decode: seconds of a call, of each sequence, and of each byte of K and V. prefill: seconds of each row, and of each product.
    """

    head_dim: int
    group: int
    kv_dtype: str
    decode: tuple[float, float, float]
    prefill: tuple[float, float]

    def divided(self, count: int) -> "Attention":
        """Times of `count` memory nodes that share the sequences, the heads and the bytes of a call."""
        call, sequence, byte = self.decode
        decode, prefill = (call, sequence / count, byte / count), (self.prefill[0] / count, self.prefill[1] / count)
        return Attention(self.head_dim, self.group, self.kv_dtype, decode, prefill)


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine: one process on one CPU host, or one accelerator.

    memory: bytes. bandwidth: bytes/s read. peak: operations/s (2 for a product) by number format: int8, bf16. link: latency in
    seconds and bytes/s between two of them. devices: accelerators of one host. measured: date and version of a measurement;
    empty for published figures, whose `source` says where from. nodes: most memory nodes (sockets) of a host, each like this
    machine. barriers: seconds of a layer in which the threads of several nodes wait for each other.

    Of a measurement: linear, by number format of weights in the cache; from_memory, seconds of reading a byte in a step that
    reads much more than `cache` bytes; apart, share of the shorter of reading and multiplying that does not happen at the same
    time as the longer, by rows; program, time of a step divided by the sum of its operations, by rows; quantize, embed,
    answers, host: seconds of a call, and of each number, number, logit, sequence.
    """

    name: str
    memory: int
    bandwidth: float
    peak: dict[str, float]
    link: tuple[float, float]
    devices: int = 1
    measured: str = ""
    source: str = ""
    threads: int = 0
    linear: dict[str, Curve] = {}
    from_memory: float = 0.0
    apart: Curve | None = None
    cache: int = 0
    attention: tuple[Attention, ...] = ()
    program: Curve | None = None
    quantize: tuple[float, float] = (0.0, 0.0)
    embed: tuple[float, float] = (0.0, 0.0)
    answers: tuple[float, float] = (0.0, 0.0)
    host: tuple[float, float] = (0.0, 0.0)
    # Bytes/s of the disk with the store; 0: not known.
    disk: float = 0.0
    nodes: int = 1
    barriers: float = 0.0

    def __post_init__(self) -> None:
        if self.memory < 1 or not 0 < self.bandwidth < math.inf or self.devices < 1:
            raise ValueError("memory, bandwidth and devices must be above 0")
        if not self.peak or any(not 0 < value < math.inf for value in (*self.peak.values(), self.link[1])):
            raise ValueError("peak and link must be speeds above 0")
        if self.measured and not (self.linear and self.attention and self.cache > 0):
            raise ValueError("a measured machine has linear, attention and cache")

    def of_nodes(self, count: int) -> "Machine":
        """A host of `count` memory nodes, each like this machine, whose threads share one process. Its times are predicted.

        Memory, bandwidth and peaks are multiplied, times per byte divided. Each layer waits at barriers between the nodes.
        Raises ValueError if the host cannot have them.
        """
        most = MOST_NODES if self.measured else self.nodes
        if not 1 <= count <= most:
            one = "one memory node" if most == 1 else f"1 to {most} memory nodes"
            raise ValueError(f"--nodes {count}: a host of {self.name} has {one}; lower it")
        if count == 1:
            return self
        return msgspec.structs.replace(
            self,
            name=f"{count} memory nodes of {self.name}",
            memory=count * self.memory,
            bandwidth=count * self.bandwidth,
            peak={name: count * value for name, value in self.peak.items()},
            threads=count * self.threads,
            linear={name: curve.divided(count) for name, curve in self.linear.items()},
            from_memory=self.from_memory / count,
            cache=count * self.cache,
            attention=tuple(each.divided(count) for each in self.attention),
            quantize=(self.quantize[0], self.quantize[1] / count),
            answers=(self.answers[0], self.answers[1] / count),
            barriers=NODE_BARRIERS,
        )

    def memory_share(self, read: float) -> float:
        """Share of a step's bytes that come from memory and not from the cache, if the step reads `read` bytes."""
        return min(1.0, max(0.0, 2 * (read / self.cache - 1))) if self.cache else 0.0

    def in_step(self, seconds: float, nbytes: float, rows: int, read: float) -> float:
        """Time of a call that takes `seconds` with its `nbytes` bytes in the cache, in a step that reads `read` bytes."""
        share, reading = self.memory_share(read), nbytes * self.from_memory
        apart = 0.0 if self.apart is None else self.apart.seconds(min(rows, self.apart.rows[-1]), 0.0)
        return share * (max(seconds, reading) + apart * min(seconds, reading)) + (1 - share) * seconds

    def factor(self, rows: int) -> float:
        """Time of a step of `rows` rows divided by the sum of its operations."""
        return 1.0 if self.program is None else self.program.seconds(min(rows, self.program.rows[-1]), 0.0)

    @property
    def label(self) -> str:
        """Where the figures come from, for people."""
        return f"measured {self.measured}" if self.measured else "published, not measured here"

    def ridge(self, products: str) -> float:
        """Operations per byte from which multiplying takes longer than reading."""
        return self.speed(products) / self.bandwidth

    def speed(self, products: str) -> float:
        """Peak operations/s of a number format; bf16's if the machine has no figure of its own."""
        return self.peak.get(products) or self.peak.get("bf16") or max(self.peak.values())

    def curve(self, kind: str) -> Curve | None:
        """Measured times of a weight format, or those of the nearest one in bits; None for a published machine."""
        if kind in self.linear or not self.linear:
            return self.linear.get(kind)
        digit = next((char for char in kind if char.isdigit()), "16" if kind == "BF16" else "4")
        near = [name for name in self.linear if digit in name and name != "BF16"]
        return self.linear[(near or list(self.linear))[0]]

    def attention_like(self, head_dim: int, group: int, kv_dtype: str) -> Attention:
        """The measured attention whose heads are most similar."""
        same = [each for each in self.attention if each.kv_dtype == kv_dtype] or list(self.attention)
        return min(
            same, key=lambda each: abs(math.log(each.head_dim / head_dim)) + abs(math.log(each.group / max(group, 1))) / 2
        )


def machine_file() -> Path:
    """File of this machine's calibration."""
    return home() / "machine.json"


def save(machine: Machine, path: Path | None = None) -> Path:
    """Write a machine file. Raises OSError."""
    place = path or machine_file()
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(place) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(machine)))
    return place


def read(path: Path) -> Machine:
    """A machine file. Raises ValueError for one that is missing, damaged or lacks a line."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Machine)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); measure this machine: headrace fit --calibrate") from None
    except (msgspec.DecodeError, ValueError) as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path}: is not a machine file ({what}); write it again: headrace fit --calibrate") from None


def published() -> dict[str, Machine]:
    """Machines with published figures, by name."""
    return msgspec.convert(tomllib.loads(PUBLISHED.read_text("utf-8")), dict[str, Machine])


def find(name: str) -> Machine | None:
    """A machine: a published name, a file, or `here`, which is None before it was calibrated. Raises ValueError."""
    known = published()
    if name.lower() in known:
        return known[name.lower()]
    if name == HERE:
        return read(machine_file()) if machine_file().exists() else None
    path = expand(name)
    if path.suffix == ".json" or path.exists():
        return read(path)
    hint = did_you_mean(name, [HERE, *known], f"use {HERE}, a machine file, or one of {', '.join(known)}")
    raise ValueError(f"--machine {name}: unknown machine; {hint}")


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares of y = a + b·x with a, b ≥ 0, by relative error: (a, b). Points are (x, y)."""
    best = (math.inf, 0.0, 0.0)
    for a_free, b_free in ((True, True), (True, False), (False, True)):
        a, b = _solve(points, a_free, b_free)
        if a >= 0 and b >= 0:
            best = min(best, (sum((a + b * x - y) ** 2 / y**2 for x, y in points), a, b))
    return best[1], best[2]


def _solve(points: Sequence[tuple[float, float]], a_free: bool, b_free: bool) -> tuple[float, float]:
    saa = sum(1 / y**2 for _, y in points)
    sab = sum(x / y**2 for x, y in points)
    sbb = sum(x * x / y**2 for x, y in points)
    sa, sb = sum(1 / y for _, y in points), sum(x / y for x, y in points)
    if not b_free:
        return sa / saa, 0.0
    if not a_free:
        return 0.0, sb / sbb
    scale = saa * sbb - sab * sab
    if scale <= 1e-12 * saa * sbb:
        return -1.0, -1.0
    return (sa * sbb - sb * sab) / scale, (sb * saa - sa * sab) / scale
