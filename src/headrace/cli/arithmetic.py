"""Command arithmetic: cost of a token in several number formats (bytes, speed limit, error)."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from headrace.cli.options import ModelName
from headrace.cli.output import print_table, say, status
from headrace.data.progress import human_size

FORMATS = ("F16", "Q8_0", "Q4_K_M")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(arithmetic)


def arithmetic(
    model: ModelName,
    number_format: Annotated[
        list[str] | None,
        typer.Option(
            "--format", "-f", help="GGUF mix (Q4_K_M) or grid (int4-g128, nf4-g64, int8-row-sym, e4m3); may be repeated."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens of context of each sequence.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="Number format of K and V: bfloat16, int8, int4 or float32.")] = "bfloat16",
    bandwidth: Annotated[float | None, typer.Option(min=0.001, help="Memory bandwidth in GB/s (default: measured).")] = None,
    speed: Annotated[float | None, typer.Option(min=0.001, help="Compute speed in 10^12 operations/s.")] = None,
    errors: Annotated[bool, typer.Option(help="Quantise some rows of each matrix and measure the error.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the cost of a token in each number format: bytes of weights and of K and V, speed limit by memory, error.

    A step reads all weights once, whatever the batch, and the K and V of every sequence. A token takes 2 operations per weight.
    BATCH* (needs --speed) is the batch at which multiplying takes as long as reading the weights. Errors are mean squares
    relative to those of the weights: rounding within the range of a scale, clipping outside it, and S²/12 for comparison.
    """
    from headrace.cli.opening import fetch

    path = fetch(model)

    from headrace.bench.machine import BandwidthProbe
    from headrace.compress.format_cost import format_costs

    status().start("measuring")
    costs = format_costs(path, number_format or list(FORMATS), kv_dtype, errors)
    rate = (BandwidthProbe().gb_per_s() if bandwidth is None else bandwidth) * 1e9
    status().finish()
    peak = float("inf") if speed is None else speed * 1e12
    if as_json:
        print(json.dumps([_record(format_cost, context, batch, rate, peak) for format_cost in costs], indent=2))
        return
    cost = costs[0].cost
    operations = f"{cost.operations / 1e9:.3g} billion operations"
    say(f"{cost.weights:,} weights; a token takes {operations} and {cost.kv_bytes:,.0f} bytes of K and V")
    say(f"at a context of {context} and a batch of {batch}; memory read at {rate / 1e9:.1f} GB/s")
    print_table(
        (
            "FORMAT",
            "BITS",
            "WEIGHTS",
            "READ A STEP",
            "OF IT K, V",
            "TOKENS/S AT MOST",
            "BATCH*",
            "SQNR",
            "ROUNDING",
            "CLIPPING",
            "S²/12",
        ),
        [_row(format_cost, context, batch, rate, peak) for format_cost in costs],
    )


def _row(format_cost: Any, context: int, batch: int, rate: float, peak: float) -> tuple[str, ...]:
    cost, error = format_cost.cost, format_cost.error
    step = cost.step_bytes(context, batch)
    limit = "" if peak == float("inf") else f"{cost.critical_batch(rate, peak):.1f}"
    errors = ("", "", "", "")
    if error is not None:
        noise = f"{error.noise:.2e}" if error.noise else "–"
        errors = (f"{error.sqnr:.1f} dB", f"{error.rounding:.2e}", f"{error.clipping:.2e}", noise)
    return (
        *(format_cost.format, f"{cost.bits:.2f}", human_size(cost.file_bytes), human_size(round(step))),
        *(f"{1 - cost.read_bytes / step:.0%}", f"{cost.ceiling(rate, context, batch, peak):.1f}", limit, *errors),
    )


def _record(format_cost: Any, context: int, batch: int, rate: float, peak: float) -> dict[str, Any]:
    cost = format_cost.cost
    return {
        "format": format_cost.format,
        "bits": cost.bits,
        **{name: getattr(cost, name) for name in ("weights", "file_bytes", "read_bytes", "kv_bytes", "operations")},
        "step_bytes": cost.step_bytes(context, batch),
        "tokens_per_s_at_most": cost.ceiling(rate, context, batch, peak),
        "critical_batch": None if peak == float("inf") else cost.critical_batch(rate, peak),
        "error": None if format_cost.error is None else asdict(format_cost.error),
    }
