"""Recorded shares of the machine's limit (`linears`) by processor and instruction set, to find kernels that became slower."""

import json
from pathlib import Path
from typing import Any

from headrace import host

# A share below this part of the recorded one has fallen; memory bandwidth alone varies by 10 to 20 %.
FALL = 0.75

# By type and rows.
Shares = dict[str, dict[str, float]]


def shares_of(result: dict[str, Any]) -> Shares:
    """Shares of a measurement."""
    return {kind: {rows: figures["share"] for rows, figures in by_rows.items()} for kind, by_rows in result["types"].items()}


def machine(result: dict[str, Any]) -> tuple[str, str]:
    """Keys of the record: the processor with the number of threads, and the instruction set."""
    return f"{host.cpu_model()}, {result['threads']} threads", result["isa"]


def kept(file: Path, result: dict[str, Any]) -> Shares | None:
    """Recorded shares of the measurement's machine, None if there are none. Raises ValueError for an invalid file."""
    name, isa = machine(result)
    found: Shares | None = read(file).get(name, {}).get(isa)
    return found


def keep(file: Path, result: dict[str, Any]) -> None:
    """Record the shares of a measurement; replaces those of the same types and rows on this machine."""
    everything = read(file) if file.exists() else {}
    name, isa = machine(result)
    mine = everything.setdefault(name, {}).setdefault(isa, {})
    for kind, by_rows in shares_of(result).items():
        mine.setdefault(kind, {}).update({rows: round(share, 2) for rows, share in by_rows.items()})
    file.write_text(json.dumps(everything, indent=1) + "\n")


def fallen(now: Shares, before: Shares) -> list[tuple[str, str]]:
    """Types and rows whose share is below FALL times the recorded one. Unrecorded ones never are."""
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
    """Content of the file, by processor and instruction set. Raises ValueError."""
    try:
        data = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} has no shares ({error}); --update makes such a file") from None
    if not isinstance(data, dict) or not all(isinstance(by_isa, dict) for by_isa in data.values()):
        raise ValueError(f"{file} has no shares by processor and instruction set; --update makes such a file")
    return data
