"""fit: what fits on a machine and how fast it is, from a model's headers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import complete_model, short_help
from headrace.cli.options import writable
from headrace.cli.output import json_text, print_fields, print_table, say, status
from headrace.data.progress import human_size

COMMON = "model context batch machine calibrate check as_json"
MODEL_HELP = "A catalog name (also not downloaded), a .gguf file, a folder, or a config.json of any language model."


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        cls=short_help(
            COMMON,
            ("headrace fit qwen3-0.6b --context 8192 --batch 4", "Memory, and what else fits, before the download."),
            ("headrace fit smollm2-135m --calibrate --check", "Predicted and measured times on this machine."),
            ("headrace fit ./config.json --machine h100 --devices 8", "Layouts on published machines."),
        )
    )(fit)


def fit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)],
    context: Annotated[
        int | None, typer.Option(help="Tokens of each sequence (default: 4096, or the model's context).")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.")] = 1,
    machine: Annotated[
        str, typer.Option(metavar="NAME", help="here, a machine file, or published: a100, h100, h200, l40s, 4090, mi300x, …")
    ] = "here",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine (30 s) and write its machine file first.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Measure the cells with the model and print the errors.")] = False,
    cells: Annotated[str, typer.Option(help="Cells of --check, as b1,b8 (default: all).")] = "",
    chunk: Annotated[int, typer.Option(help="Most tokens of a step.")] = 2048,
    kv_dtype: Annotated[str, typer.Option(help="Number format of K and V: bfloat16, int8, int4 or float32.")] = "bfloat16",
    quantize: Annotated[str, typer.Option(help="Round 16-bit weights at load: int8 or int4.")] = "",
    weights: Annotated[str, typer.Option(help="Format of a model without files, as Q4_K_M or BF16 (default: its own).")] = "",
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of a rank, as 24GiB (default: free, or the machine's).")
    ] = "",
    tp: Annotated[int, typer.Option(help="Ranks that share each layer: 1, 2, 4 or 8.")] = 1,
    pp: Annotated[int, typer.Option(help="Stages of whole layers.")] = 1,
    replicas: Annotated[int, typer.Option(help="Copies of the model.")] = 1,
    offload: Annotated[bool, typer.Option("--offload", help="Weights that do not fit in memory stay on disk.")] = False,
    devices: Annotated[int, typer.Option(min=1, max=64, help="Machines or accelerators that layouts may use.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Memory nodes (sockets) like the machine, used by one process.")] = 1,
    tpot: Annotated[float, typer.Option(min=0, help="Most milliseconds a token: prints the largest batch.")] = 0.0,
    ttft: Annotated[float, typer.Option(min=0, help="Most milliseconds to the first token: prints the chunk.")] = 0.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of --calibrate and --check (default: all cores).")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a roofline plot (SVG).", callback=writable)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict memory and speed of a model from its headers: what fits, how fast, on which machines.

    Bytes are those that the engine takes. Times need a machine: --calibrate measures this one; published ones come from data
    sheets, and their times are lower bounds. Whatever was not run is marked "predicted".
    """
    from headrace.startup.fit import headers, report
    from headrace.startup.fit.sizes import Layout, Load

    if quantize not in ("", "int8", "int4"):
        raise ValueError(f"--quantize {quantize}: must be int8 or int4")
    layout = Layout(tp, pp, replicas)
    shape = headers.open_shape(model, weights, quantize)
    load = Load(min(4096, shape.max_position) if context is None else context, batch, chunk, kv_dtype)
    chosen = _host(machine, nodes, check, calibrate, threads, report.kinds(shape))
    question = report.Question(load, layout, _memory(memory, chosen, machine, nodes), devices, tpot / 1e3, ttft / 1e3)
    found = report.report(shape, question, chosen)
    if offload:
        found["offload"] = report.offload_record(shape, question, chosen)
    if shape.source_positions:
        found |= _window(shape, load, chosen, check)
    elif not shape.encoder and (chosen is not None or check):
        names = [name.strip() for name in cells.split(",") if name.strip()] if check else None
        setting = {"kv_dtype": kv_dtype, "quantize": quantize or None, "threads": threads}
        found["cells"] = _cells(model, shape, load, layout, chosen, names, setting)
    if plot is not None:
        _plot(plot, found)
    print(json_text(found, indent=2)) if as_json else _print(found, load)


def _window(shape: Any, load: Any, machine: Any, check: bool) -> dict[str, Any]:
    """Predicted time of a window of sound, with a machine. Raises ValueError for `check`."""
    from headrace.startup.fit.sound import window_record

    if check:
        raise ValueError(f"--check measures answers to text, and {shape.name} is a speech model; leave it out")
    return {} if machine is None else {"window": window_record(shape, machine, load.batch, load.kv_dtype)}


def _machine(name: str, calibrate: bool, threads: int | None, kinds: Any) -> Any:
    from headrace.startup.fit.machine import HERE, find, save

    if not calibrate:
        return find(name)
    if name != HERE:
        raise ValueError(f"--calibrate measures this machine, and --machine names {name}; leave one out")
    from headrace.bench.calibrate import COMMON, SWEEPS
    from headrace.bench.calibrate import calibrate as measure

    status().start("measuring this machine", SWEEPS, unit="sweeps")
    machine = measure(threads or 0, (*COMMON, *kinds), lambda: status().advance(1))
    status().finish()
    say(f"{machine.name}: {save(machine)}")
    return machine


def _host(name: str, nodes: int, check: bool, calibrate: bool, threads: int | None, kinds: Any) -> Any:
    """The machine with `nodes` memory nodes. Raises ValueError if that cannot be predicted."""
    if nodes > 1 and check:
        raise ValueError(f"--check runs the model on this machine, and --nodes {nodes} is predicted; leave one of them out")
    machine = _machine(name, calibrate, threads, kinds)
    if nodes > 1 and machine is None:
        raise ValueError(f"--nodes {nodes} needs times of one node; measure this machine with --calibrate, or use --machine")
    return machine if nodes == 1 else machine.of_nodes(nodes)


def _memory(given: str, machine: Any, name: str, nodes: int) -> int:
    from headrace.data.config import parse_bytes
    from headrace.host import free_memory

    if given:
        return parse_bytes(given)
    return nodes * free_memory() if machine is None or (machine.measured and name == "here") else int(machine.memory)


def _cells(
    model: str, shape: Any, load: Any, layout: Any, machine: Any, names: Sequence[str] | None, setting: dict[str, Any]
) -> dict[str, Any]:
    """Predicted cells, and measured ones of `names` (None: none, empty: all)."""
    from dataclasses import replace

    from headrace.bench.fit_cells import NAMES, predict
    from headrace.startup.fit.report import cells_record

    if names is not None and (unknown := [name for name in names if name not in NAMES]):
        raise ValueError(f"--cells {unknown[0]}: unknown cell; choose from {', '.join(NAMES)}")
    predicted = predict(shape, machine, load.chunk, load.kv_dtype, replace(layout, replicas=1)) if machine else {}
    if names is None:
        return cells_record(predicted)
    if shape.config is None or shape.origin.startswith(("keys", "the catalog")):
        raise ValueError(f"--check runs the model, and {model} has no files that Headrace runs; leave --check out")
    if layout.ranks > 1:
        raise ValueError(f"--check runs one process, and the layout is {layout}; leave one of them out")
    from headrace.bench.fit_check import ROUNDS, check

    status().start("measuring", ROUNDS + 1, unit="rounds")
    measured = check(model, shape, load.chunk, setting, names or NAMES, machine, done=lambda: status().advance(1))
    status().finish()
    return cells_record(predicted or {name: {} for name in measured}, measured)


def _print(found: dict[str, Any], load: Any) -> None:
    model, memory = found["model"], found["memory"]
    used = "" if model["parameters_used"] >= model["parameters"] else f", {model['parameters_used'] / 1e9:.3g} billion a token"
    fields = [
        ("model", f"{model['name']}: {model['architecture']}, {model['parameters'] / 1e9:.3g} billion weights{used}"),
        ("from", model["origin"]),
        ("load", f"{load.batch} × {load.context:,} tokens, K and V in {load.kv_dtype}, {load.chunk} tokens a step"),
    ]
    if model["refusal"]:
        fields.insert(2, ("runs here", f"no: {model['refusal']}"))
    fields += [(name, human_size(memory[name])) for name in ("weights", "kv", "state", "buffers", "process") if memory[name]]
    if windows := memory.get("kv_windows"):
        full, in_windows = human_size(memory["kv"] - windows), human_size(windows)
        at = next(at for at, (name, _) in enumerate(fields) if name == "kv")
        fields[at] = ("kv", f"{fields[at][1]}: {full} of layers that see all tokens, {in_windows} of layers with a window")
    fits = "fits" if memory["fits"] else "does not fit"
    where = "" if memory["layout"] == "one process" else f" a rank ({memory['layout']})"
    fields.append(("in all", f"{human_size(memory['total'])}{where}, {human_size(memory['available'])} are free: {fits}"))
    if "offload" in found:
        fields.append(("offload", _offload(found["offload"])))
    if model["source_bytes"]:
        fields.append(("K/V of a window", f"{model['source_bytes']:,.0f} bytes"))
    fields.append(("K/V per token", f"{model['kv_bytes_per_token']:,.0f} bytes"))
    print_fields(fields)
    print()
    print_table(("CONTEXT", "MOST SEQUENCES"), [(f"{one['context']:,}", f"{one['batch']:,}") for one in found["batches"]])
    print()
    print_table(("SEQUENCES", "LONGEST CONTEXT"), [(str(one["batch"]), f"{one['context']:,}") for one in found["contexts"]])
    if "machine" not in found:
        print("\nno times: measure this machine with --calibrate, or name one with --machine")
        return
    _print_times(found)


def _offload(one: dict[str, Any]) -> str:
    if not one["fits"]:
        return f"does not fit: two layers at a time take {human_size(one['memory'])}"
    if not one["disk"]:
        return "not needed, all weights fit"
    text = f"{human_size(one['memory'])} of weights in memory; each step reads {human_size(one['disk'])} from disk"
    if "tpot_ms" not in one:
        return f"{text}; --calibrate measures the disk"
    limit = "reading" if one["reading_ms"] >= one["computing_ms"] else "computing"
    return f"{text} ({one['bandwidth'] / 1e9:.2g} GB/s) and takes {one['tpot_ms']:.0f} ms, {limit} (predicted)"


def _print_times(found: dict[str, Any]) -> None:
    machine, predicted = found["machine"], found["predicted"]
    ridge = ", ".join(f"{name} {value:.0f}" for name, value in machine["ridge"].items())
    print()
    source = f" ({machine['source']})" if machine["source"] else ""
    print_fields(
        [
            ("machine", f"{machine['name']}: {machine['label']}{source}"),
            ("reads", f"{machine['bandwidth'] / 1e9:,.1f} GB/s; operations per byte at the ridge: {ridge}"),
            ("a token", f"{predicted['tpot_ms']:.2f} ms (predicted)"),
            ("a prompt", f"{predicted['ttft_ms']:.1f} ms (predicted)"),
        ]
    )
    if "window" in found:
        window = found["window"]
        text = f"{window['window_ms']:.0f} ms with {window['tokens']} tokens (encoder {window['encoder_ms']:.0f} ms)"
        side = "" if window["batch"] == 1 else f", {window['batch']} together"
        print_fields([("30 s of sound", f"{text}{side}: {window['speed']:.0f} times as fast as speech (predicted)")])
    if "batch_under_tpot" in found:
        print_fields([("most sequences", f"{found['batch_under_tpot']} within the time of a token (predicted)")])
    if "chunk_under_ttft" in found:
        chunk = found["chunk_under_ttft"]
        answer = f"{chunk['chunk']} tokens" if chunk["chunk"] else "none is fast enough"
        print_fields([("chunk", f"{answer}: {chunk['ttft_ms']:.1f} ms to the first token (predicted)")])
    for name, phase in found["phases"].items():
        print(
            f"\n{name}, {phase['rows']} rows: {phase['operations'] / 1e9:.3g} GFLOP, {human_size(round(phase['bytes']))} read"
        )
        print_table(("OPERATION", "GFLOP", "READ", "FLOP/BYTE", "LIMIT", "MS (PREDICTED)"), _operations(phase))
    _print_cells(found.get("cells", {}))
    print()
    head = ("LAYOUT", "RANK", "SEQUENCES", "MS A TOKEN", "MS A PROMPT", "TOKENS/S (PREDICTED)", "LIMIT")
    print_table(head, [_layout(one) for one in found["layouts"]])
    for line in found["advice"]:
        print(f"* {line}")


def _operations(phase: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            *(name, f"{one['operations'] / 1e9:.3g}", human_size(round(one["bytes"]))),
            *("" if one["intensity"] is None else f"{one['intensity']:.1f}", one["limit"], f"{one['ms']:.3f}"),
        )
        for name, one in phase["by_operation"].items()
    ]


def _layout(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        *(one["layout"], human_size(one["bytes"]), f"{one['batch']:,}", f"{one['tpot_ms']:.2f}", f"{one['ttft_ms']:.1f}"),
        *(f"{one['tokens_per_s']:.1f}", one["binding"]),
    )


def _print_cells(cells: dict[str, Any]) -> None:
    if not cells:
        return
    print()
    rows = []
    for name, cell in cells.items():
        measured, predicted = cell["measured"], cell["predicted"]
        rows.append(
            (
                *(name, f"{predicted['ms']:.2f}", f"{predicted['tokens_per_s']:.1f}"),
                *(("", "", "", "") if measured is None else _measured(cell)),
            )
        )
    head = ("CELL", "MS (PREDICTED)", "TOKENS/S (PREDICTED)", "MS (MEASURED)", "TOKENS/S", "ERROR", "SLOWNESS")
    print_table(head, rows)
    if any(cell["measured"] is not None for cell in cells.values()):
        print(
            "SLOWNESS: time of a linear layer next to the cell, divided by its calibrated time; predicted times are multiplied "
            "by it"
        )


def _measured(cell: dict[str, Any]) -> tuple[str, str, str, str]:
    measured = cell["measured"]
    return (
        *(f"{measured['ms']:.2f}", f"{measured['tokens_per_s']:.1f}", f"{cell['error']:+.1%}"),
        f"{measured['slowness']:.2f}",
    )


def _plot(path: Path, found: dict[str, Any]) -> None:
    """Write the roofline: operations/s over operations per byte."""
    if "phases" not in found:
        raise ValueError("--plot draws times: measure this machine with --calibrate, or name one with --machine")
    from headrace.bench.figures import Line
    from headrace.bench.plots import Axis, Point, scatter

    machine = found["machine"]
    points, names = [], []
    for phase, record in found["phases"].items():
        for name, one in record["by_operation"].items():
            if one["intensity"]:
                names.append(f"{phase} {name}")
                points.append(Point(len(names), one["intensity"], one["operations"] / one["ms"] / 1e6))
    peak = max(machine["peak"].values())
    ridge = peak / machine["bandwidth"]
    least, most = min(0.5, *(point.x for point in points)), max(4 * ridge, *(point.x for point in points))
    roof = Line("roof", [least, ridge, most], [least * machine["bandwidth"] / 1e9, peak / 1e9, peak / 1e9])
    x = Axis.of("operations per byte", [least, most], log=True)
    y = Axis.of("10^9 operations/s (predicted)", [*roof.y, *(point.y for point in points)], log=True)
    remark = f"{found['model']['name']} · {machine['name']} · {machine['label']}"
    path.write_text(scatter("Roofline", x, y, points, [roof], remark), "utf-8")
    say("; ".join(f"{number} {name}" for number, name in enumerate(names, 1)))
