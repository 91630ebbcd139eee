"""Are the kernels slower than they were? Shares of the machine's limit (bench.linears), kept in a file by processor and
instruction set."""

import json
from pathlib import Path
from typing import Any

from headrace import host

FALL = 0.75  # of a share that was kept: less is a fall, as memory's speed alone moves by a tenth or two

Shares = dict[str, dict[str, float]]  # by type and rows


def shares_of(result: dict[str, Any]) -> Shares:
    """Those of a measurement."""
    return {kind: {rows: figures["share"] for rows, figures in by_rows.items()} for kind, by_rows in result["types"].items()}


def machine(result: dict[str, Any]) -> tuple[str, str]:
    """Under what its shares are kept: the processor with the threads used, and the instruction set."""
    return f"{host.cpu_name()}, {result['threads']} threads", result["isa"]


def kept(file: Path, result: dict[str, Any]) -> Shares | None:
    """What a file has for the machine of a measurement; None where it has nothing. Raises ValueError for what is no such
    file."""
    name, isa = machine(result)
    found: Shares | None = read(file).get(name, {}).get(isa)
    return found


def keep(file: Path, result: dict[str, Any]) -> None:
    """Write the shares of a measurement into a file, in place of what it has of these types and rows on this machine."""
    everything = read(file) if file.exists() else {}
    name, isa = machine(result)
    mine = everything.setdefault(name, {}).setdefault(isa, {})
    for kind, by_rows in shares_of(result).items():
        mine.setdefault(kind, {}).update({rows: round(share, 2) for rows, share in by_rows.items()})
    file.write_text(json.dumps(everything, indent=1) + "\n")


def fallen(now: Shares, before: Shares) -> list[tuple[str, str]]:
    """The types and rows whose share is now less than FALL of what it was; what was not measured before is no fall."""
    return [
        (kind, rows)
        for kind, by_rows in now.items()
        for rows, share in by_rows.items()
        if share < FALL * before.get(kind, {}).get(rows, 0.0)
    ]


def best(one: Shares, other: Shares) -> Shares:
    """The larger share of each type and rows of two measurements."""
    return {
        kind: {rows: max(share, other.get(kind, {}).get(rows, 0.0)) for rows, share in by_rows.items()}
        for kind, by_rows in one.items()
    }


def read(file: Path) -> dict[str, Any]:
    """A file of shares, by processor and instruction set. Raises ValueError."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} has no shares ({error}); --update makes such a file") from None
    if not isinstance(data, dict) or not all(isinstance(by_isa, dict) for by_isa in data.values()):
        raise ValueError(f"{file} has no shares by processor and instruction set; --update makes such a file")
    return data
