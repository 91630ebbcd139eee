"""Beam search compared with independent sequences and with OpenVINO GenAI's: `python -m benchmarks.peers.beams`."""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.peers import engines
from headrace.bench.competitors import SOURCE, heading, kv_bytes, start_worker, worker_command
from headrace.bench.interleave import Cell, Variant, measure
from headrace.bench.machine import BandwidthProbe, Say
from headrace.cli.options import writable
from headrace.cli.output import print_table, say, status
from headrace.host import cores
from headrace.startup.loading import open_model
from headrace.stats.paired_ratio import ratio

OURS, INDEPENDENT, PEER = "headrace", "independent", "openvino"
PROMPT, NEW_TOKENS = 32, 64


def peer_engine() -> engines.PeerEngine:
    """OpenVINO GenAI with the worker for beam search."""
    return replace(engines.ENGINES[PEER], worker="openvino_beam.py")


def compare(
    model: str, beams: int, batches: tuple[int, ...], *, with_peer: bool, rounds: int, threads: int | None, say: Say
) -> dict[str, Any]:
    """Measure `batches` requests of `beams` beams each: 32 prompt tokens, 64 new tokens of the best hypothesis.

    Ratios: to the peer's tokens/s (if `with_peer`), and the time of beams over that of as many independent greedy
    sequences. Raises ValueError if the peer cannot read the model, and ValueError.
    """
    opened = open_model(model)
    opened.source.close()
    cells = [Cell(f"{batch} x beam {beams}", batch, PROMPT, NEW_TOKENS) for batch in batches]
    room = kv_bytes(cells, opened.config) * (beams + 1)
    task = {"threads": threads or cores(), "kv_bytes": room}
    ours = worker_command(engines.WORKERS / "ours_beam.py")
    commands: dict[str, tuple[list[str], dict[str, Any], dict[str, str]]] = {
        OURS: (ours, {"beams": beams}, SOURCE),
        INDEPENDENT: (ours, {"beams": beams, "independent": True}, SOURCE),
    }
    if with_peer:
        commands[PEER] = (peer_engine().command, {"beams": beams}, {})
    result = {**heading(opened, rounds), **task}
    with ExitStack() as stack:
        variants = []
        for name, (command, setting, env) in commands.items():
            worker = start_worker(stack, f"beams-{name}", command, env)
            about = worker.ask(model=str(opened.path), setting=setting, **task)
            variants.append(Variant(name, "", worker))
            say(f"{name}: {about['about']}")
        probe = BandwidthProbe()
        result["cells"] = {}
        for cell in cells:
            state = measure(variants, cell, rounds, opened.tokenizer.vocab_size, probe.gb_per_s)
            result["cells"][cell.name] = figures(variants, cell, max(state.others_cpu))
    return result


def figures(variants: list[Variant], cell: Cell, others_cpu: float) -> dict[str, Any]:
    """Tokens/s of each variant, the ratio to the peer, and the time over that of independent sequences."""
    speed = {variant.name: variant.speed(cell) for variant in variants}
    samples = {variant.name: variant.samples[cell.name] for variant in variants}
    record: dict[str, Any] = {
        "tokens_per_s": speed,
        "samples": samples,
        "over_independent": ratio(samples[INDEPENDENT], samples[OURS]).median,
        "others_cpu": others_cpu,
    }
    if PEER in samples:
        against = ratio(samples[OURS], samples[PEER])
        record |= {"ratio": against.median, "interval": [against.low, against.high], "confidence": against.confidence}
    return record


def beams(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or a catalog name that has one.")],
    width: Annotated[int, typer.Option(min=2, max=16, help="Beams of each request.")] = 4,
    peer: Annotated[bool, typer.Option(help="Beside OpenVINO GenAI's beam search.")] = True,
    install: Annotated[bool, typer.Option("--install", help="Install it, in its own environment.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements, after one to warm up.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; every core where not given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """One and eight requests of beam search: tokens/s of the best hypotheses, beside a peer and beside as many independent
    sequences, in turns."""
    if peer:
        engines.make_ready([peer_engine()], install, say)
    status().start("measuring")
    result = compare(model, width, (1, 8), with_peer=peer, rounds=rounds, threads=threads, say=say)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    columns = ("cell", "tokens/s", "time / independent", "openvino", "ratio", "interval", "other load")
    print_table(columns, [_row(name, one) for name, one in result["cells"].items()])


def _row(cell: str, record: dict[str, Any]) -> tuple[str, ...]:
    speed = record["tokens_per_s"]
    against = ("-", "-", "-")
    if "ratio" in record:
        against = (f"{speed['openvino']:.1f}", f"{record['ratio']:.2f}", "{:.2f} to {:.2f}".format(*record["interval"]))
    return (cell, f"{speed['headrace']:.1f}", f"{record['over_independent']:.2f}", *against, f"{record['others_cpu']:.0%}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (("smollm2-135m --no-peer", "Beside as many independent sequences."),)
    return run(beams, "peers.beams", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
