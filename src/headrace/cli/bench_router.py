"""bench router: hits and times of several replicas, predicted for the requests of a trace."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from headrace.bench.figures import Measurement, Table
from headrace.cli.measuring import add_measurement
from headrace.data.settings import RoutePolicy


def register(bench: typer.Typer) -> None:
    """Add the command."""
    example = "headrace bench router trace.jsonl --replicas 8", "Hits and waits of three ways to choose a replica."
    add_measurement(bench, router, "replicas prompt_rate rate json_file", example)


def router(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            exists=True,
            dir_okay=False,
            help="JSON lines as Mooncake publishes them: timestamp (ms), input_length, output_length, hash_ids.",
        ),
    ],
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 8,
    prompt_rate: Annotated[float, typer.Option(min=1.0, help="Prompt tokens that a replica computes in a second.")] = 8000.0,
    step_ms: Annotated[float, typer.Option(min=0.0, help="Milliseconds that each running answer adds to a step.")] = 0.2,
    capacity: Annotated[int, typer.Option(min=512, help="Tokens of a replica's K/V cache.")] = 4_000_000,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests arrive this many times as fast as in the trace.")] = 1.0,
    most: Annotated[int | None, typer.Option(min=1, help="Number of requests to use (default: all).")] = None,
) -> Measurement:
    """Predict prefix cache hits and times to the first token of several replicas, by the server's router on a virtual clock."""
    from headrace.bench import router as bench

    requests = bench.read_trace(trace, rate, most)
    machine = bench.Machine(1 / prompt_rate, step_ms / 1000, capacity)
    figures = bench.compare(requests, replicas, machine, get_args(RoutePolicy))
    line = (
        f"predicted: {len(requests)} requests on {replicas} replicas; one pooled cache would have "
        f"{figures['pooled_hits']:.1%} of the prompt tokens"
    )
    return Measurement(figures, [line, Table(bench.COLUMNS, figures["rows"])])
