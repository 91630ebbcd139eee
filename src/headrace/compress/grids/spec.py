"""Number formats by name: "Q4_K" (a GGUF kind), "int4-g128", "int8-tensor-sym", "nf4-g64", "nvfp4", "lloyd4"."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.compress.grids.encode import WRITTEN
from headrace.data.spelling import did_you_mean
from headrace.weights.kinds import KINDS
from headrace.weights.schemes.base import IntegerFormat
from headrace.weights.schemes.rows import BLOCK

GRIDS = {"int": "integers", "nf": "quantiles of the normal distribution", "pow": "powers of two", "lloyd": "Lloyd's algorithm"}
FLOATS = {"e4m3": 8, "e5m2": 8, "e2m1": 4}  # small floats (exponent and mantissa bits), and their bits
EXAMPLES = "int4-g128, int8-row-sym, nf4-g64, e4m3-tensor, nvfp4, pow4-g64 or lloyd4"
FOLDERS = "int4-g128, int4-g64-sym, int4-g32-sym, int8, int8-g128-sym, w8a8, w8a8-static, mxfp4, nvfp4"
FOLDER_BITS = range(3, 9)
WITHOUT_GROUPS = {  # one scale a row, no zero points
    "int8": IntegerFormat(8),
    "w8a8": IntegerFormat(8, activations=True),
    "w8a8-static": IntegerFormat(8, activations=True, static=True),
}
SCALE_BITS = 16
E8M0, E4M3 = "e8m0", "e4m3"  # 8-bit scales: powers of two; small floats times a float32 of the tensor
SCALED = {"mxfp4": ("e2m1", 32, E8M0), "nvfp4": ("e2m1", 16, E4M3)}
MAX_BITS = 8
_GRID = re.compile(r"(int|nf|pow|lloyd)([2-8])|(e4m3|e5m2|e2m1)")
_SHARING = re.compile(r"tensor|row|g([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A number format. family: "kind" (then `kind` names it), a key of GRIDS, or of FLOATS.

    group: numbers of a row that share a scale; 0: the whole row; None: the whole tensor. symmetric: integers without zero
    point, code 0 is zero. scales: E8M0 or E4M3; "": 16 bits.
    """

    family: str
    bits: int = 0
    group: int | None = 0
    symmetric: bool = True
    kind: str = ""
    scales: str = ""

    def __str__(self) -> str:
        if self.family == "kind":
            return self.kind
        if self.scales:
            return next(name for name, (_, _, scales) in SCALED.items() if scales == self.scales)
        sharing = {None: "-tensor", 0: ""}.get(self.group, f"-g{self.group}")
        sign = "-sym" if self.family == "int" and self.symmetric else ""
        return f"{self.family}{'' if self.family in FLOATS else self.bits}{sharing}{sign}"

    def stored_bits(self, n: int, k: int) -> float:
        """Bits of a number of a matrix [n, k], with its share of scales, zero points and tables."""
        if self.family == "kind":
            block, nbytes = KINDS[self.kind]
            return 8 * nbytes / block
        shared = {None: n * k, 0: k}.get(self.group, self.group or k)
        zero = 0 if self.symmetric else self.bits
        table = SCALE_BITS * 2**self.bits / (n * k) if self.family == "lloyd" else 0
        scale, whole = (8, 32 if self.scales == E4M3 else 0) if self.scales else (SCALE_BITS, 0)
        return self.bits + (scale + zero) / shared + table + whole / (n * k)


def parse(text: str) -> NumberFormat:
    """The format of a name, in any case. Raises ValueError with similar names if unknown."""
    if text.lower() in SCALED:
        family, size, scales = SCALED[text.lower()]
        return NumberFormat(family, FLOATS[family], size, scales=scales)
    if text.upper() in WRITTEN:
        return NumberFormat("kind", kind=text.upper())
    words = text.lower().split("-")
    match = _GRID.fullmatch(words[0])
    if match is None:
        raise ValueError(unknown(text, WRITTEN, f"or a grid such as {EXAMPLES}"))
    family, bits = (match[1], int(match[2])) if match[1] else (match[3], FLOATS[match[3]])
    if family == "nf" and bits != 4:
        raise ValueError(f"{text!r}: quantiles of the normal distribution have 4 bits; write nf4")
    group: int | None = 0
    sharing = words[1] if len(words) > 1 and words[1] != "sym" else "row"
    shared = _SHARING.fullmatch(sharing)
    rest = [word for word in words[1:] if word != sharing]
    if shared is None or rest not in ([], ["sym"]):
        raise ValueError(f"{text!r} is not a format: write {words[0]}, then -tensor, -row or -g128, then -sym if symmetric")
    group = None if sharing == "tensor" else int(shared[1] or 0)
    return NumberFormat(family, bits, group, family != "int" or rest == ["sym"])


def unknown(text: str, names: Iterable[str], more: str = "") -> str:
    """Message for an unknown format, with similar names and all names."""
    known = list(names)
    meant = did_you_mean(text.upper().replace("-", "_"), known)
    return f"unknown format {text!r}; {meant}{' ' if meant else ''}known are {', '.join(known)}{', ' if more else ''}{more}"


def integers_named(name: str) -> IntegerFormat:
    """Integers of folders by their name, in any case. Raises ValueError for formats that folders do not hold."""
    if name.lower() in WITHOUT_GROUPS:
        return WITHOUT_GROUPS[name.lower()]
    spec = parse(name)
    if spec.family != "int":
        raise ValueError(
            f"{spec} cannot be written to a folder; choose {FOLDERS}, or a GGUF type and an output name that ends in .gguf"
        )
    if spec.bits not in FOLDER_BITS:
        raise ValueError(f"{spec}: folders support integers of {FOLDER_BITS[0]} to {FOLDER_BITS[-1]} bits; choose {FOLDERS}")
    if spec.group is None or spec.group % BLOCK:
        raise ValueError(f"{spec}: a scale covers a row, or a group whose size is a multiple of {BLOCK}; choose {FOLDERS}")
    if spec.bits == 8 and not spec.symmetric:
        raise ValueError(
            f"{spec}: 8-bit integers have no zero points in folders, because they gain almost nothing; write {spec}-sym"
        )
    return IntegerFormat(spec.bits, spec.group, spec.symmetric)
