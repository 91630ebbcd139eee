"""bench: measurements a reader can repeat."""

from typing import Annotated

import typer

from headrace.cli import bench_speculate, bench_tools
from headrace.cli.bench_beams import beams, sharing
from headrace.cli.bench_cascade import cascade
from headrace.cli.bench_exits import exits
from headrace.cli.bench_local import local
from headrace.cli.bench_masks import masks
from headrace.cli.bench_peers import peers
from headrace.cli.bench_peers_speculate import peers_speculate
from headrace.cli.bench_self_draft import self_draft
from headrace.cli.bench_serve import latency, serve
from headrace.cli.output import print_table, say


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    bench = typer.Typer(help="Measure: batching policies, speed on this machine, servers under load.", no_args_is_help=True)
    bench.command("batching")(batching)
    bench.command("local")(local)
    bench.command("peers")(peers)
    bench.command("peers-speculate")(peers_speculate)
    bench.command("serve")(serve)
    bench.command("latency")(latency)
    bench.command("beams")(beams)
    bench_speculate.register(bench)
    bench.command("sharing")(sharing)
    bench.command("self-draft")(self_draft)
    bench.command("masks")(masks)
    bench.command("cascade")(cascade)
    bench.command("exits")(exits)
    bench_tools.register(bench)
    app.add_typer(bench, name="bench", rich_help_panel="Measure")


def batching(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A model to run a part of the trace on, besides the fake one.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the trace.")] = 200,
    on_model: Annotated[int, typer.Option(min=1, help="How many of them run on MODEL.")] = 32,
    seqs: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 0,
) -> None:
    """Static against continuous batching on one trace, and KV memory under each reservation scheme."""
    from headrace.bench import batching as bench

    jobs = bench.trace(requests, seed)
    rows = [_row(None, bench.on_fake_model(jobs, policy, seqs)) for policy in bench.POLICIES]
    if model is not None:
        say(f"running {min(on_model, requests)} requests on {model} under each policy")
        rows += [_row(model, bench.on_model(model, jobs[:on_model], policy, seqs)) for policy in bench.POLICIES]
    print_table(("model", "policy", "steps", "tokens", "tokens/step", "tokens/s", "KV waste"), rows)
    print()
    table = bench.memory_table(jobs, seqs * bench.MAX_LEN)
    columns = ("KV memory", "steps", "used", "reserved", "internal", "external", "waste")
    print_table(columns, [_shares(name, shares) for name, shares in table.items()])


def _row(model: str | None, result: object) -> tuple[str, ...]:
    """Without a model the steps cost nothing, so that their speed says nothing."""
    from headrace.bench.batching import Result

    assert isinstance(result, Result)
    speed = f"{result.tokens_per_second:.1f}" if model else "-"
    counts = (str(result.steps), str(result.tokens), f"{result.tokens / result.steps:.2f}")
    return (model or "fake model", result.policy, *counts, speed, f"{result.waste:.1%}")


def _shares(name: str, shares: object) -> tuple[str, ...]:
    from headrace.bench.reservation import Shares

    assert isinstance(shares, Shares)
    whole = shares.taken + shares.external
    parts = (shares.used, shares.reserved, shares.internal, shares.external)
    return (name, str(shares.steps), *(f"{part / whole:.1%}" for part in parts), f"{shares.waste:.1%}")
