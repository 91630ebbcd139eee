"""bench batching: one trace under two policies."""

from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.output import print_table, say
from headrace.data.progress import counted


def register(bench: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "",
        ("headrace bench batching", "Steps of a fake model: policies and KV memory."),
        ("headrace bench batching smollm2-135m --on-model 16", "And the speed of a real one."),
    )
    bench.command("batching", cls=short)(batching)


def batching(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model to run a part of the trace on, besides the fake one.")
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
        say(f"running {counted(min(on_model, requests), 'requests')} on {model} under each policy")
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
