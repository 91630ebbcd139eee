"""Beam search beside independent sequences and beside OpenVINO GenAI's, in turns, in one run."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from headrace.bench.bandwidth import BandwidthProbe
from headrace.bench.cells import Cell
from headrace.bench.engines import ENGINES, WORKERS, Engine, Say
from headrace.bench.pairs import ratio
from headrace.bench.peers import heading, kv_bytes
from headrace.bench.rounds import Party, measure
from headrace.bench.worker import Worker
from headrace.host import cores
from headrace.startup.loading import open_model
from headrace.weights.store import home

OURS, INDEPENDENT, PEER = "headrace", "independent", "openvino"
PROMPT, NEW_TOKENS = 32, 64


def peer() -> Engine:
    """The engine that is measured beside ours."""
    return replace(ENGINES[PEER], worker="openvino_beam.py")


def compare(
    model: str, beams: int, batches: tuple[int, ...], *, beside: bool, rounds: int, threads: int | None, say: Say
) -> dict[str, Any]:
    """Seconds and tokens/s of `batches` requests with so many beams each, 32 tokens in and 64 out.

    Tokens are those of the best hypothesis. Ratios: to the peer's tokens/s (where `beside`), and the time of beams over
    that of as many independent greedy sequences. Raises ValueError where the peer cannot read the model, WorkerError.
    """
    opened = open_model(model)
    opened.source.close()
    cells = [Cell(f"{batch} x beam {beams}", batch, PROMPT, NEW_TOKENS) for batch in batches]
    room = kv_bytes(cells, opened.config) * (beams + 1)
    task = {"threads": threads or cores(), "kv_bytes": room}
    ours = [sys.executable, "-P", str(WORKERS / "serve.py"), str(WORKERS / "ours_beam.py")]
    commands: dict[str, tuple[list[str], dict[str, Any], dict[str, str]]] = {
        OURS: (ours, {"beams": beams}, {"PYTHONPATH": str(WORKERS.parents[2])}),
        INDEPENDENT: (ours, {"beams": beams, "independent": True}, {"PYTHONPATH": str(WORKERS.parents[2])}),
    }
    if beside:
        commands[PEER] = (peer().command, {"beams": beams}, {})
    result = {**heading(opened, rounds), **task}
    with ExitStack() as stack:
        parties = []
        for name, (command, setting, env) in commands.items():
            logs = home() / "peers" / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            worker = Worker(command, logs / f"beams-{name}.log", env)
            stack.callback(worker.close)
            about = worker.ask(model=str(opened.path), setting=setting, **task)
            parties.append(Party(name, "", worker))
            say(f"{name}: {about['about']}")
        probe = BandwidthProbe()
        result["cells"] = {}
        for cell in cells:
            around = measure(parties, cell, rounds, opened.tokenizer.vocab_size, probe.gb_per_s)
            result["cells"][cell.name] = figures(parties, cell, max(around.others_cpu))
    return result


def figures(parties: list[Party], cell: Cell, others_cpu: float) -> dict[str, Any]:
    """tokens/s of each party, the ratio to the peer, and the time over that of independent sequences."""
    speed = {party.name: party.speed(cell) for party in parties}
    samples = {party.name: party.samples[cell.name] for party in parties}
    found: dict[str, Any] = {
        "tokens_per_s": speed,
        "samples": samples,
        "over_independent": ratio(samples[INDEPENDENT], samples[OURS]).median,
        "others_cpu": others_cpu,
    }
    if PEER in samples:
        against = ratio(samples[OURS], samples[PEER])
        found |= {"ratio": against.median, "interval": [against.low, against.high], "confidence": against.confidence}
    return found
