"""bench serve and bench latency: load on an OpenAI server, ours or another's."""

import os
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

import typer

from headrace.bench.figures import Measurement, Table
from headrace.cli.measuring import add_measurement
from headrace.cli.options import writable, writable_folder
from headrace.cli.output import say, status

ASKED, WHEN, WHAT, TOLD = "Server", "Arrivals", "Requests", "Output"
KINDS = ("ids", "text", "chat")

Base = Annotated[str, typer.Argument(metavar="URL", help="Address of the API, such as http://127.0.0.1:8000/v1.")]
ModelOption = Annotated[str | None, typer.Option(help="Name of the model (default: the first one).", rich_help_panel=ASKED)]
Kind = Annotated[str, typer.Option(help="Form of the prompts: ids, text or chat.", rich_help_panel=ASKED)]
KeyFile = Annotated[
    Path | None, typer.Option(help="File with the API key (or HEADRACE_API_KEY).", exists=True, rich_help_panel=ASKED)
]
Plots = Annotated[
    Path | None,
    typer.Option(help="Write SVG plots into this folder.", callback=writable_folder, rich_help_panel=TOLD),
]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE.html", help="Write a page with figures and plots.", callback=writable, rich_help_panel=TOLD),
]

Timeout = Annotated[float, typer.Option(min=1, help="Timeout of an answer in seconds.", rich_help_panel=ASKED)]
Repeat = Annotated[
    bool,
    typer.Option(
        "--repeat-prompts",
        help="Send the same prompts in every run of a seed, so the prefix cache finds them.",
        rich_help_panel=WHAT,
    ),
]


def register(bench: typer.Typer) -> None:
    """Add the commands."""
    add_measurement(
        bench,
        serve,
        "model rate concurrency trace requests input_len output_len slo json_file report",
        ("headrace bench serve http://127.0.0.1:8000/v1 --concurrency 1,8,32", "1, 8 and 32 open requests."),
        (
            "headrace bench serve http://127.0.0.1:8000/v1 --rate 1,2,4 --slo ttft:0.5,tpot:0.05",
            "Poisson arrivals, with goodput.",
        ),
        ("headrace bench serve http://127.0.0.1:8000/v1 --report load.html", "Write a page with figures and plots."),
        panel=TOLD,
    )
    example = "headrace bench latency http://127.0.0.1:8000/v1 --lengths 64,1024", "First tokens of short and long prompts."
    add_measurement(bench, latency, "", example, panel=TOLD)


def serve(
    url: Base,
    model: ModelOption = None,
    kind: Kind = "ids",
    api_key_file: KeyFile = None,
    timeout: Timeout = 600.0,
    rate: Annotated[
        str, typer.Option(help="Poisson arrivals per second; several values are a sweep: 1,2,4.", rich_help_panel=WHEN)
    ] = "",
    concurrency: Annotated[str, typer.Option(help="Open requests; several values are a sweep.", rich_help_panel=WHEN)] = "",
    trace: Annotated[
        Path | None, typer.Option(exists=True, help="Trace to replay: Azure CSV or Mooncake .jsonl.", rich_help_panel=WHEN)
    ] = None,
    trace_scale: Annotated[float, typer.Option(help="Factor on the trace's arrival times.", rich_help_panel=WHEN)] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests per load.", rich_help_panel=WHAT)] = 100,
    limit: Annotated[int | None, typer.Option(min=1, help="Send only the first of them.", rich_help_panel=WHAT)] = None,
    input_len: Annotated[int, typer.Option("--input", min=1, help="Mean prompt tokens.", rich_help_panel=WHAT)] = 128,
    output_len: Annotated[int, typer.Option("--output", min=1, help="Mean answer tokens.", rich_help_panel=WHAT)] = 64,
    tail: Annotated[float, typer.Option(min=0, help="Spread of log-normal lengths: 1 is heavy.", rich_help_panel=WHAT)] = 0.0,
    cap_input: Annotated[int | None, typer.Option(min=1, help="Shorten longer prompts.", rich_help_panel=WHAT)] = None,
    cap_output: Annotated[int | None, typer.Option(min=1, help="Shorten longer answers.", rich_help_panel=WHAT)] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.", rich_help_panel=WHAT)] = 0.0,
    exact: Annotated[bool, typer.Option(help="Request answers of full length (ignore_eos).", rich_help_panel=WHAT)] = True,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up requests, which are not counted.", rich_help_panel=WHAT)] = 4,
    seed: Annotated[
        int, typer.Option(help="Seed of lengths, arrivals and, with --repeat-prompts, prompts.", rich_help_panel=WHAT)
    ] = 0,
    repeat_prompts: Repeat = False,
    slo: Annotated[str, typer.Option(help="Limits of goodput in s: ttft:0.5,tpot:0.05.", rich_help_panel=TOLD)] = "",
    watch: Annotated[str, typer.Option(help="Process ids whose CPU time is measured.", rich_help_panel=TOLD)] = "",
    plots: Plots = None,
    report: Report = None,
) -> Measurement:
    """Put load on any OpenAI server, and measure latencies, throughput and goodput.

    With --rate or --trace, requests are sent when they are due, whatever the server does, and times count from then. With
    --concurrency (8) that many requests are open.
    """
    from headrace.bench.load import drive, summary
    from headrace.bench.load.workload import Lengths, WorkloadLimits, describe_truncations, steady

    if bool(rate) + bool(concurrency) + (trace is not None) > 1:
        raise ValueError("give one of --rate, --concurrency and --trace")
    limits = summary.parse_slo(slo)
    extra = {"temperature": temperature, **({"ignore_eos": True} if exact else {})}
    target = _target(url, model, kind, api_key_file, timeout, extra, repeat_prompts)
    lengths = Lengths(input_len, output_len, tail)
    loads = _loads(rate, concurrency, trace, requests, lengths, seed)
    bounds = {name: WorkloadLimits(trace_scale, cap_input, cap_output, limit) for name, _, _ in loads}
    loads = [(name, bounds[name].apply(work), at_once) for name, work, at_once in loads]
    say(cut := describe_truncations({name: bound.cut for name, bound in bounds.items()}))
    drive.warm_up(target, WorkloadLimits(prompt=cap_input, output=cap_output).apply(steady(warmup, lengths, seed - 1)), say)
    pids, results = [int(number) for number in _numbers(watch)], {}
    for name, work, at_once in loads:
        status().start(name, len(work), unit="requests")
        results[name] = summary.measure(target, work, at_once, pids, limits, status().advance)
    status().finish()
    return _report(target.model, cut, results, plots, report)


def _loads(
    rate: str, concurrency: str, trace: Path | None, requests: int, lengths: Any, seed: int
) -> list[tuple[str, list[Any], int | None]]:
    """Name, requests and number at once of each load."""
    from headrace.bench.load.workload import poisson, read_trace, steady

    loads: list[tuple[str, list[Any], int | None]] = []
    if trace is not None:
        loads.append((trace.name, read_trace(trace), None))
    for number in _numbers(rate):
        loads.append((f"{number:g}/s", poisson(requests, number, lengths, seed), None))
    for number in _numbers(concurrency or ("" if loads else "8")):
        loads.append((f"{number:g} at once", steady(requests, lengths, seed + int(number)), int(number)))
    return loads


def _report(model: str, cut: str, results: dict[str, Any], plots: Path | None, report: Path | None) -> Measurement:
    """The table and figures; writes the plots and the page."""
    from headrace.bench.load.report import page, pictures, table

    for name, (figures, _) in results.items():
        for error in figures["errors"]:
            say(f"{name}: {error}")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for name, drawn in pictures(model, results).items():
            (plots / f"{name}.svg").write_text(drawn, "utf-8")
    if report is not None:
        report.write_text(page(model, cut, results), "utf-8")
        say(f"the report: {report}")
    loads = {name: figures for name, (figures, _) in results.items()}
    return Measurement({"model": model, "cut": cut, "loads": loads}, [table(results)])


def latency(
    url: Base,
    model: ModelOption = None,
    kind: Kind = "ids",
    api_key_file: KeyFile = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "16,64,256,1024,4096",
    at_once: Annotated[str, typer.Option(help="Open requests for greedy and sampled decoding.")] = "1,8",
    output_len: Annotated[int, typer.Option("--output", min=8, help="Tokens per answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each length.")] = 3,
) -> Measurement:
    """Measure the time to the first token for several prompt lengths, and greedy decoding compared with sampling."""
    from headrace.bench.load import claims, drive
    from headrace.bench.load.workload import Lengths, steady

    target = _target(url, model, kind, api_key_file, 600.0, {"ignore_eos": True, "temperature": 0.0})
    drive.warm_up(target, steady(4, Lengths(64, 16), -1), say)
    status().start("measuring")
    first = claims.first_tokens(target, [int(number) for number in _numbers(lengths)], rounds, say)
    both = [claims.greedy_and_sampling(target, int(number), output_len, rounds) for number in _numbers(at_once)]
    figures = {"ttft": {row.length: row.ttft for row in first}, "step": {row.length: row.step for row in first}}
    figures |= {"greedy": {row.at_once: row.greedy for row in both}, "sampled": {row.at_once: row.sampled for row in both}}
    return Measurement(figures, [Table(claims.FIRST_TOKEN_COLUMNS, first), "", Table(claims.SAMPLING_COLUMNS, both)])


def _target(
    url: str, model: str | None, kind: str, key_file: Path | None, timeout: float, extra: dict[str, Any], repeat: bool = False
) -> Any:
    from importlib.util import find_spec

    if find_spec("h11") is None:
        raise ValueError("the load generator needs h11; install it with: pip install '.[serve]' in Headrace's folder")
    from headrace.bench.load.client import Target, first_model

    if kind not in KINDS:
        raise ValueError(f"--kind is one of {', '.join(KINDS)}, not {kind!r}")
    key = key_file.read_text("utf-8").strip() if key_file is not None else os.environ.get("HEADRACE_API_KEY") or None
    target = Target(url.rstrip("/"), model or "", kind, key, timeout, extra, "" if repeat else token_hex(8))
    target.address()
    return replace(target, model=model or first_model(target))


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{text!r}: give numbers with commas between, as 1,2,4") from None
    if any(number <= 0 for number in numbers):
        raise ValueError(f"{text!r}: give numbers above 0")
    return numbers
