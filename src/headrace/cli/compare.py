"""Command compare: decoding methods on the same prompts. Fields of a prompt without effect are refused by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench.figures import Table
from headrace.cli.help import short_help
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, ModelOptions, with_groups, writable
from headrace.cli.output import print_table, say, status
from headrace.data.progress import counted
from headrace.workflows.batch_output import RequestId
from headrace.workflows.batch_requests import BatchRequest, LineError, parse_object, parse_request
from headrace.workflows.prompts import lines_of

# Fields of data sets that describe a prompt.
LABELS = frozenset({"kind", "category", "question_id", "reference"})


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "source modes csv prompts max_tokens seed raw amateur",
        ("headrace compare MODEL -i prompts.txt --modes greedy,sample,beam4 --prompts 8", "Three methods on eight prompts."),
    )
    app.command(cls=short)(with_groups(compare))


def compare(
    model: ModelName,
    options: ModelOptions,
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            "-i",
            exists=True,
            dir_okay=False,
            help="Prompts, one per line: lines of generate in a .jsonl file, otherwise plain texts.",
        ),
    ],
    modes: Annotated[
        str, typer.Option(help="Methods, such as greedy,sample,beam4,best4,contrastive; an unknown name lists all of them.")
    ] = "greedy,sample,beam4",
    csv: Annotated[
        Path | None, typer.Option("--csv", "-o", help="Write every answer with its figures to this file.", callback=writable)
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Number of prompts to use (default: all).")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Most tokens of an answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the sampling methods.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue plain texts without the chat template.")] = False,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences in a batch.")] = 32,
) -> None:
    """Compare decoding methods on the same prompts: tokens/s, repetition, KV blocks.

    rep-4: share of an answer's 4-grams that repeat earlier ones. distinct-4: different 4-grams divided by all 4-grams of a
    method's answers. blocks: mean over requests of the most KV blocks held, 16 tokens each. Of the fields of a line only
    max_tokens is used; fields that a method sets are refused.
    """
    from headrace.bench import strategies
    from headrace.data.params import SamplingParams

    options.check()
    names = _names(modes, options.amateur, max_tokens, seed)
    jobs = read_lines(source, prompts)
    llm = open_llm(model, options, max_num_seqs=max_num_seqs, preset="offline", enable_prefix_caching=False)
    lines = [line_of(llm, job, raw) for job in jobs]
    ids, limits = [line.ids for line in lines], [line.max_tokens or max_tokens for line in lines]
    # Warm-up: the first steps of a process are slow.
    llm.generate([ids[0]], SamplingParams(max_tokens=8))
    compared = []
    status().start("comparing", len(names) * len(ids), unit="answers")
    for name in names:
        say(f"{name}: {counted(len(ids), 'prompts')} …")
        compared += strategies.compare(llm, ids, [name], limits, seed)
        status().advance(len(ids), name)
    status().finish()
    heads, *rows = Table(strategies.COLUMNS, compared).cells()
    print_table(heads, rows)
    if csv is not None:
        strategies.write_csv(csv, compared)
        say(f"{counted(len(ids), 'prompts')}, {counted(len(names), 'methods')}: {csv}")


def _names(modes: str, amateur: str | None, max_tokens: int, seed: int) -> list[str]:
    """Return the names of the methods. Raises before the model is loaded if one is invalid."""
    from headrace.bench import strategies

    names = [name.strip() for name in modes.split(",") if name.strip()]
    if not names:
        raise typer.BadParameter(f"--modes names no method; choose from {', '.join(strategies.MODES)}")
    for name in names:
        strategies.mode(name, max_tokens, seed)
    if "contrastive-decoding" in names and amateur is None:
        raise typer.BadParameter("contrastive-decoding needs a smaller model of the same vocabulary: --amateur MODEL")
    return names


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt: token ids, and the most tokens of its answer, None if the line has no limit."""

    ids: list[int]
    max_tokens: int | None = None


def read_lines(path: Path, most: int | None = None) -> list[BatchRequest]:
    """Return the prompts of a file, `most` at most. Raises ValueError, naming the line."""
    read = _requests(path) if path.suffix == ".jsonl" else _texts(path)
    requests = [request for request, _ in zip(read, range(most or 1 << 62), strict=False)]
    if not requests:
        raise ValueError(f"{path} has no prompt; write one a line")
    return requests


def line_of(llm: Any, request: BatchRequest, raw: bool) -> Line:
    """Return the token ids of a prompt, as `generate` makes them, or as `run` for a plain text. Raises ValueError."""
    most = request.params.get("max_tokens")
    if request.prompt_token_ids is not None:
        return Line(request.prompt_token_ids, most)
    if request.prompt is not None:
        return Line(llm.tokenizer.encode(request.prompt), most)
    assert request.messages is not None
    template = llm.opened.template
    if "text" in request.labels and (raw or template is None or template.source is None):
        return Line(llm.tokenizer.encode(request.messages[0]["content"]), most)
    return Line(llm.render(llm.opened.with_system(request.messages), **request.template), most)


def _texts(path: Path) -> Iterator[BatchRequest]:
    for number, text in enumerate(lines_of(path), 1):
        if text.strip():
            yield BatchRequest(number, number, messages=[{"role": "user", "content": text}], labels=frozenset({"text"}))


def _requests(path: Path) -> Iterator[BatchRequest]:
    owners: dict[RequestId, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            request = parse_request(_without_labels(parse_object(line, number)), number, owners)
            _check(request)
        except LineError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        yield request


def _without_labels(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request; the first of a data set's `turns` becomes the user's message."""
    found = {name: value for name, value in fields.items() if name not in LABELS}
    turns = found.pop("turns", None)
    if turns is None:
        return found
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise LineError("turns must be a list of texts")
    return {**found, "messages": [{"role": "user", "content": turns[0]}]}


def _check(request: BatchRequest) -> None:
    """Raise LineError for a field that the compared methods set themselves."""
    decided = sorted({*request.params, *(["tools"] if request.tools is not None else []), *request.ignored} - {"max_tokens"})
    if decided:
        raise LineError(f"{decided[0]}: the methods of --modes decide it, or compare has no use for it; remove it")
