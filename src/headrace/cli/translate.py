"""Command translate: the output of an encoder-decoder for each text, one line each."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import texts_of
from headrace.cli.opening import look_at, open_llm
from headrace.cli.options import HelperOptions, LeavingOptions, ModelName, ShowExitsOfMany, check_helpers, with_groups
from headrace.cli.output import json_text, status
from headrace.data.explicit import params_of
from headrace.data.params import ParamError, SamplingParams
from headrace.data.progress import Progress

# Texts of one engine call.
BATCH = 64


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "file beams max_tokens as_json draft exits exit_threshold threads",
        ('headrace translate MODEL "A dog runs on the grass."', "The translation."),
        ("headrace translate MODEL --beams 4 < in.txt > out.txt", "One line per line of the input."),
    )
    app.command(cls=short)(with_groups(translate))


def translate(
    model: ModelName,
    options: HelperOptions,
    leaving: LeavingOptions,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXTS]...", help="Texts (default: the lines of --file or stdin).")
    ] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File with one text per line.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Number of beams; 1: greedy decoding.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of a translation (default: the context).")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per text: text, translation, tokens, finish_reason.")
    ] = False,
    show_exits: ShowExitsOfMany = False,
) -> int:
    """Run an encoder-decoder (Marian, T5) on each text, and print one line per text.

    An empty line stays empty. T5 reads its task from the text ("translate English to German: …"). --draft, --cascade and
    --exits take another encoder-decoder with the same vocabulary, or exits that were trained for this model.
    """
    options.check()
    check_helpers(options, leaving.changes())
    if show_exits and options.exits is None and options.cascade is None:
        raise typer.BadParameter("--show-exits goes with --exits FOLDER or --cascade MODEL")
    # Refuses invalid options before the model is loaded.
    _params(beams, max_tokens or 1, leaving)
    given = texts_of(texts, file, blank=True)
    opened = look_at(model)
    if opened is None or opened.config.source is None:
        raise ValueError(
            f"{model} is not an encoder-decoder, so it cannot translate; prompt a chat model instead: headrace run"
        )
    llm = open_llm(model, options)
    status().finish()
    most = llm.memory_plan.max_model_len - 1
    params = _params(beams, most if max_tokens is None else min(max_tokens, most), leaving)
    exits: list[Any] = []
    # On a terminal, the output lines themselves show the progress.
    progress = Progress() if sys.stdout.isatty() else status()
    progress.start("translating", len(given), unit="texts")
    for start in range(0, len(given), BATCH):
        part = given[start : start + BATCH]
        outputs = iter(llm.generate([text for text in part if text.strip()], params))
        for text in part:
            output = next(outputs) if text.strip() else None
            print(_line(text, output, llm.tokenizer if as_json else None), flush=True)
            exits += [] if output is None else output.outputs[0].exits or []
        progress.advance(len(part))
    progress.finish()
    if show_exits:
        from headrace.cli.token_colours import print_exit_legend

        print_exit_legend(exits, llm.model_config.num_layers)
    return 0


def _params(beams: int, max_tokens: int, leaving: LeavingOptions) -> SamplingParams:
    """Return the sampling parameters. Raises typer.BadParameter for options that exclude each other."""
    how: dict[str, Any] = {"temperature": 0.0} if beams == 1 else {"beam_width": beams}
    try:
        return params_of({**how, "max_tokens": max_tokens, **leaving.changes()})
    except ParamError as error:
        raise typer.BadParameter(str(error)) from None


def _line(text: str, output: Any, tokenizer: Any) -> str:
    """Return the line to print, None for a blank text. With a tokenizer the line is JSON. Raises ValueError if it failed."""
    if output is not None and output.error is not None:
        raise ValueError(f"{text[:60]!r} cannot be translated: {output.error}")
    answer = None if output is None else output.outputs[0]
    translation = "" if answer is None else answer.text.strip().replace("\n", " ")
    if tokenizer is None:
        return translation
    from headrace.workflows.output_record import choice

    known = {} if answer is None else choice(answer, tokenizer)
    more = {"tokens": 0 if answer is None else len(answer.token_ids), "finish_reason": known.get("finish_reason")}
    more |= {name: known[name] for name in ("score", "exits") if name in known}
    return json_text({"text": text, "translation": translation, **more})
